"""How a text is generated: its state, and the one loop of draft, decode, verify, take.

text.py         a text: its sequence, tokens, sampler and logits, in step with the K/V cache
output.py       a token that is given out
loop.py         the texts that run, and one step of any number of them
verify.py       drafted tokens after a text: the rules that judge them, what is kept
drafter.py      the interfaces of drafters, draft states and draft lengths; what is counted and timed
length.py       how many tokens to draft: as many as raise the throughput
drafting.py     who drafts, by which settings, and the draft states that are kept between generations
generation.py   one generation, round by round, as an iterator: limits, stop strings, the output so far
"""
