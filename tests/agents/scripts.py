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

import gguf
import numpy as np
from toys import BOS, EOS, Vocabulary, finish

__all__ = ["TEMPLATE", "call", "write_script"]

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
    "{% if add_generation_prompt %}<|assistant|>{{ '<|' ~ ns.word ~ ns.n ~ '|>' }}{% endif %}"
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
    embedding = np.zeros((len(known), width), dtype=np.float32)
    embedding[np.arange(len(known)), np.arange(len(known))] = 1
    output = np.zeros((len(known), width), dtype=np.float32)
    output[following, np.arange(len(known))] = 1
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(64)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(int(gguf.LlamaFileType.ALL_F32))
    for key, value in Vocabulary(tuple(known), base.n_control).metadata().items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kind = {str: gguf.GGUFValueType.STRING, bool: gguf.GGUFValueType.BOOL}
            writer.add_key_value(key, value, kind.get(type(value), gguf.GGUFValueType.UINT32))
    writer.add_eot_token_id(end)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "attn_q": (64, width), "attn_k": (64, width), "attn_v": (64, width), "attn_output": (width, 64),
        "ffn_gate": (64, width), "ffn_up": (64, width), "ffn_down": (width, 64),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(shape, dtype=np.float32))
    ones = np.ones(width, dtype=np.float32)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", ones)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", 4 * output)
    return finish(writer, path)


def _in_alphabet(text: str) -> str:
    """Return a text in GPT-2's printable characters for bytes."""
    alphabet = Vocabulary.named("bytes").tokens[2:]
    return "".join(alphabet[byte] for byte in text.encode())
