"""How texts are generated: one text alone, or many as jobs of one scheduler, in the same loop.

running.py    a text that the loop runs: its draft, its draws, and its report of each round
loop.py       one step of any number of texts: draft, decode, verify, take; reads prompts beside them
solo.py       one text that runs by itself, without an engine
job.py        a request and its texts (jobs): their states, segments and output
scheduler.py  which jobs hold a sequence: admission, shared prefixes, parking, preemption
core.py       one step of all jobs: schedule them, run the loop, take the new tokens
"""
