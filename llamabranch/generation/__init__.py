"""A text and its drafts: its state, its output, and the rules that accept drafted tokens.

text.py          a text: its sequence, tokens, sampler and logits, in step with the K/V cache
output.py        a token that is emitted, and the output of one generation so far
thought.py       the output while a text thinks
drafter.py       the interfaces of drafters, draft states and draft lengths; counts and times
draft_states.py  the draft states of texts, kept between generations
verify.py        drafted tokens after a text: the rules that accept or reject them
length.py        how many tokens to draft: the number with the highest throughput
config.py        the settings of speculation
"""
