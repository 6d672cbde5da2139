"""The texts of version 0.1, to the token, so that every later version can be compared with it.

library.py   all that is asked of the library, in one place: the only file that follows its names
cases.py     the literal table of what is run
older.py     version 0.1 on this machine, in a process of its own, out of v0_1.zip
record.py    running and comparing a case
v0_1.json    what version 0.1 made of the table on one machine: saves running it on others like that one
"""
