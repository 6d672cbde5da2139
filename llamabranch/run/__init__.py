"""How texts are generated: one text alone, or those of everybody who asks a context, in the same steps.

drafting.py   how the texts of a caller are drafted
running.py    a text as a step runs it: its draft, its draws, and its report of each round
step.py       one step of any number of texts: draft, decode, verify, take; reads prompts beside them
solo.py       one text that runs by itself, for branches and sessions
job.py        a request that runs, its texts, their states and output, and who asked for them
records.py    what each request has read, and why
scheduler.py  which texts hold a sequence: admission, shared prefixes, parking, preemption
core.py       the steps of all texts of a context: schedule them, run a step, take the new tokens
client.py     what a caller does: ask for texts, let steps run, take the events of its own texts
"""
