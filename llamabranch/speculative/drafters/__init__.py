"""Where drafts come from.

run.py               what models and heads share: read the new text, draw, for any number of texts
model.py             draft models
head.py              EAGLE-3 heads, and what MTP layers share with them: hidden states of the target
mtp.py               MTP layers
cross_vocabulary.py  draft models of another vocabulary, through the text
ngram_index.py       where an n-gram occurred before
copying.py           drafters that copy what followed it there
grammar.py           what a grammar forces, and another drafter where it leaves a choice
function.py          a function as a drafter
chain.py             several drafters, tried in order
"""
