"""How a text is generated: its state, and the one loop of draft, decode, verify, take.

text.py         a text: its sequence, tokens, sampler and logits, in step with the K/V cache
output.py       a token that is given out; limits, EOG tokens, stop strings, and the output so far
plan.py         what is decoded of one text in a round
loop.py         the texts that run, and one step of any number of them
verify.py       which drafted tokens are accepted, from the logits of one decode
rules.py        the rules for that: pure functions over distributions and random numbers
drafter.py      the interfaces of drafters, of their draft states and of draft lengths; when a draft ends
length.py       how many tokens to draft: as many as raise the throughput
drafting.py     who drafts, what is learned, and the draft states that are kept between generations
generation.py   one generation, round by round, as an iterator
config.py       the settings of speculative decoding
stats.py        counts and times, under vLLM's names
"""
