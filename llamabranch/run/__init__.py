"""How texts are generated: one text alone, or the texts of all callers of a context together.

drafting.py   how the texts of a caller are drafted
running.py    a running text: its draft, its draws, and its report of each round
step.py       one step of any number of texts: draft, decode, verify, take; it also reads prompts
solo.py       one text that runs by itself, for branches and sessions
job.py        a running request, its texts, their states and output, and its caller
records.py    what each request has read, and why
scheduler.py  which texts hold a sequence: admission, shared prefixes, parking, preemption
core.py       the steps of all texts of a context: schedule them, run a step, take the new tokens
client.py     what a caller does: ask for texts, let steps run, take the events of its own texts
"""
