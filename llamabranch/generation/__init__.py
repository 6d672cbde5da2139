"""How a text is generated: its state, and one loop of four steps: draft, decode, verify, take.

text.py         a text: its sequence, tokens, sampler and logits, in step with the K/V cache
output.py       a token that is emitted
loop.py         the running texts, and one step of any number of them
verify.py       drafted tokens after a text: the rules that accept or reject them
drafter.py      the interfaces of drafters, draft states and draft lengths; counts and times
length.py       how many tokens to draft: the number with the highest throughput
drafting.py     a context's drafter, its settings, and the draft states kept between generations
generation.py   one generation, round by round, as an iterator: limits, stop strings, the output so far
"""
