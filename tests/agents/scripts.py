"""A model that says what a test wrote down: with real weights and a real decode.

The embeddings are one-hot, the block adds nothing, and the output matrix maps each token to the next one.
What the model says in a turn is a single token of its vocabulary, which the tokenizer never produces from
text. The template ends each prompt with a control token that is named after the first word of the task
and the number of answers so far. That token decides what the model says, so a conversation is a script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from toys import BOS, EOS, Array, Metadata, Vocabulary, write_toy

_MOST_TURNS = 12
# Calls as Hermes and Qwen write them; results as turns of a tool.
TEMPLATE = (
    "{% set ns = namespace(n=0, word='') %}"
    "{% if tools %}<|sys|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.word = m.content.split(':')[0].split()[-1] if not "
    "ns.word else ns.word %}{% endif %}"
    "{% if m.role == 'assistant' %}{% set ns.n = ns.n + 1 %}{% endif %}"
    "<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    "{% set f = c.function %}"
    '<call>{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}</call>'
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<|' ~ ns.word ~ "
    "('plain' if ns.word == 'lastly' and not tools else '') ~ ns.n ~ '|>' }}{% endif %}"
)


def call(name: str, /, **arguments: object) -> str:
    """Return a call as the template writes it."""
    return f'<call>{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}</call>'


def write_script(path: Path, scripts: Mapping[str, Sequence[str]], n_ctx: int = 8192) -> Path:
    """Write a model that plays ``scripts``: the answers of each, by the word that its tasks begin with.

    Args:
        path: the file.
        scripts: what the model says in turn 0, 1, ...; the words have letters only.
        n_ctx: the length that the model claims to be trained for.
    """
    roles = ("<|sys|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
    turns = [f"<|{word}{i}|>" for word, texts in scripts.items() for i in range(len(texts))]
    all_texts = [*dict.fromkeys(text for texts in scripts.values() for text in texts)]
    base = Vocabulary.with_control(BOS, EOS, *roles, *turns)
    known = [*dict.fromkeys((*base.tokens, *map(_in_alphabet, all_texts)))]
    number = {token: i for i, token in enumerate(known)}
    end = number["<|end|>"]
    following = np.full(len(known), end)
    for word, texts in scripts.items():
        for i, text in enumerate(texts):
            following[number[f"<|{word}{i}|>"]] = number[_in_alphabet(text)]
    width = -(-len(known) // 64) * 64
    embedding = np.eye(len(known), width, dtype=np.float32)
    output = np.zeros_like(embedding)
    output[following, np.arange(len(known))] = 4

    def values(name: str, noise: Array) -> Array:
        """Return the two matrices; norms are one, and the block is zero."""
        given = {"token_embd.weight": embedding, "output.weight": output}
        return given.get(name, np.full_like(noise, float(noise.ndim == 1)))

    metadata: Metadata = {"tokenizer.ggml.eot_token_id": end, "tokenizer.chat_template": TEMPLATE}
    return write_toy(
        path, vocab=Vocabulary(tuple(known), base.n_control), weights="f32", metadata=metadata,
        values=values, n_layer=1, n_embd=width, n_head=width // 64, n_ff=64, n_ctx_train=n_ctx,
    )  # fmt: skip


def _in_alphabet(text: str) -> str:
    """Return a text in GPT-2's printable characters for bytes."""
    alphabet = Vocabulary.named("bytes").tokens[2:]
    return "".join(alphabet[byte] for byte in text.encode())
