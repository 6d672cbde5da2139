"""Where drafts come from.

base.py              the interface of a drafter and of its draft states
model.py             draft models: token by token, or as a tree
cross_vocabulary.py  draft models of another vocabulary, through the text
ngram_index.py       where an n-gram occurred before
copying.py           drafters that copy what followed it there
grammar.py           what a grammar forces, and another drafter where it leaves a choice
chain.py             several drafters, tried in order
"""
