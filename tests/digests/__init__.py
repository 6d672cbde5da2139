"""What version 0.1 generated, to the token, so that every later version can be compared with it.

library.py   all that is asked of the library, in one place: the only file that follows its names
cases.py     the literal table of what is run
machine.py   which processor and build of llama.cpp this is, as far as logits tell
record.py    running, writing, comparing: ``python -m tests.digests.record``
v0_1.json    the record, made by version 0.1 itself
"""
