"""How every token is generated: one text alone, or many as jobs of one scheduler, in the same loop.

running.py    a text while the loop runs it: its draft, its draws, what each round was worth
loop.py       one step of any number of texts: draft, decode, verify, take; reads prompts beside them
solo.py       one text that runs by itself: a job without a queue
job.py        a request and its texts (jobs): their states, segments and output
scheduler.py  which jobs hold a sequence: admission, shared beginnings, parking, preemption
core.py       one step of all jobs: schedule them, run the loop, take the new tokens
"""
