"""Files that are not models, texts that are not text, snapshots that cannot be trusted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import toys
from crash_harness import ABC, World, case, must_raise, refuses

from llamabranch import Branch, Context, Grammar, Model, SamplingParams
from llamabranch.errors import (
    ConfigError,
    GrammarError,
    LlamaBranchError,
    ModelLoadError,
    TokenizeError,
    UnsupportedError,
)

# -- files -----------------------------------------------------------------------------------------

refuses(
    "load",
    ModelLoadError,
    missing=lambda w: Model(w.folder / "missing.gguf"),
    directory=lambda w: Model(w.folder),
    empty=lambda w: Model(w.file(b"")),
    not_gguf=lambda w: Model(w.file(b"GGML" + bytes(100))),
    version_1=lambda w: Model(w.file(b"GGUF\1\0\0\0" + bytes(100))),
    nul_in_path=lambda w: Model("a\0b.gguf"),
    surrogate_in_path=lambda w: Model("a\udc80b.gguf"),
    no_metadata=lambda w: Model(w.file(b"GGUF\3\0\0\0" + bytes(16))),
    unknown_architecture=lambda w: Model(_renamed(w, b"llama", b"lxama")),
    unknown_tokenizer=lambda w: Model(
        _renamed(w, b"\4\0\0\0\0\0\0\0gpt2", b"\4\0\0\0\0\0\0\0gptx")
    ),
    **{
        name: lambda w, k=name: Model(toys.write_broken(w.folder / "broken.gguf", k))
        for name in toys.BROKEN
    },
)


def _renamed(w: World, old: bytes, new: bytes) -> Path:
    return w.file(w.path.read_bytes().replace(old, new))


EMBEDDING = "predicts no tokens"
refuses(
    "load",
    UnsupportedError,
    embedding=(EMBEDDING, lambda w: Context(Model(toys.write_bert(w.folder / "bert.gguf")))),
)


@case("load")
def nan_weights_with_check_tensors(w: World) -> None:
    data = bytearray(toys.write_llama(w.folder / "f32.gguf", weights="f32").read_bytes())
    data[-4:] = b"\xff\xff\xff\x7f"
    must_raise(ModelLoadError, lambda: Model(w.file(bytes(data)), check_tensors=True))


@case("load")
def nan_weights_unchecked(w: World) -> None:
    data = bytearray(toys.write_llama(w.folder / "f32.gguf", weights="f32").read_bytes())
    data[-64:] = b"\xff\xff\xff\x7f" * 16
    with Model(w.file(bytes(data))) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        ctx.decode([2, 3], 0)
        with suppress(LlamaBranchError):
            ctx.sample(SamplingParams())


@case("load", is_quick=True)
def vocabulary_only(w: World) -> None:
    weightless = toys.write_llama(w.folder / "weightless.gguf", drop=("*",))
    must_raise(ModelLoadError, lambda: Model(weightless))
    for path in (w.path, weightless):
        with Model(path, vocab_only=True) as model:
            assert model.detokenize(model.tokenize("abc")) == "abc"
            message = must_raise(UnsupportedError, lambda m=model: Context(m, n_ctx=256))
            assert "only its vocabulary" in message


@case("load")
def no_vocabulary(w: World) -> None:
    path = toys.write_llama(w.folder / "none.gguf", vocab="none")
    with Model(path) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        must_raise(TokenizeError, lambda: model.tokenize("a"))
        must_raise(TokenizeError, lambda: model.detokenize([1]))
        must_raise(TokenizeError, lambda: Branch.start(ctx, "a"))
        must_raise((GrammarError, TokenizeError), lambda: Branch.create(ctx, grammar=Grammar(ABC)))
        must_raise(
            (UnsupportedError, TokenizeError), lambda: model.apply_chat_template([("user", "a")])
        )
        assert not model.is_eog(5)
        assert (model.bos, model.eos, model.piece(3)) == (None, None, b"")
        branch = Branch.start(ctx, [1, 2], dry_multiplier=0.8, repeat_penalty=1.1, seed=1)
        for _ in range(5):
            branch.step()
        assert branch.text == ""


@case("load")
def vocabulary_without_special_tokens(w: World) -> None:
    bare = {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}
    path = toys.write_llama(w.folder / "bare.gguf", metadata=bare, vocab=10)
    with Model(path) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        model.tokenize("!")
        Branch.start(ctx, [2]).step()


@case("load")
def sentencepiece_without_bytes(w: World) -> None:
    spm: dict[str, toys.Value | None] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0] * 16,
        "tokenizer.ggml.add_space_prefix": False,
    }
    path = toys.write_llama(w.folder / "spm.gguf", metadata=spm)
    with Model(path) as model:
        for text in ("z", "Ü", "a z", "🙂", "\n"):
            with suppress(TokenizeError):
                model.tokenize(text)
        model.tokenize("abc", add_special=False)


# -- text ------------------------------------------------------------------------------------------

BAD_TOKENS = {"minus_one": -1, "n_vocab": 258, "two_to_31": 1 << 31, "huge": 1 << 70, "text": "a"}
refuses(
    "text",
    TokenizeError,
    surrogate=lambda w: w.model.tokenize("a\udc80"),
    bytes_for_text=lambda w: w.model.tokenize(b"abc"),  # type: ignore[arg-type]
    none_for_text=lambda w: w.model.tokenize(None),  # type: ignore[arg-type]
    **{f"piece_{k}": lambda w, t=t: w.model.piece(t) for k, t in BAD_TOKENS.items()},
    **{
        f"detokenize_{k}": lambda w, t=t: w.model.detokenize([60, t]) for k, t in BAD_TOKENS.items()
    },
    **{
        f"decoder_{k}": lambda w, t=t: w.model.text_decoder().feed(t) for k, t in BAD_TOKENS.items()
    },
)


@case("text")
def odd_texts(w: World) -> None:
    for text in ("", "\0", "a\0b", " ", "\n" * 5000, "é" * 5000, "🙂", "<|bos|>"):
        assert w.model.detokenize(w.model.tokenize(text, add_special=False)) == text
    assert w.model.tokenize("<|bos|>", add_special=False, parse_special=True) == [0]
    assert w.model.detokenize([]) == ""
    assert not any(w.model.is_eog(token) for token in (-1, 258, 1 << 40))


NO_MESSAGES: list[Any] = [
    [], "Hello", [{"content": "a"}], [{"role": "user"}], [{"role": "user", "content": 5}], [5],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    [{"role": "user", "content": "\udc80"}], {"role": "user", "content": "a"}, [("", "a")],
]  # fmt: skip


@case("text", is_quick=True)
def no_messages(w: World) -> None:
    with Model(w.path, vocab_only=True, chat_template="chatml") as model:
        for messages in NO_MESSAGES:
            must_raise(ConfigError, model.apply_chat_template, messages)


@case("text")
def odd_chats(w: World) -> None:
    for messages in ([("user", "a\0b")], [("x" * 300, "é🙂")], [("user", "a" * 99999)]):
        with suppress(LlamaBranchError):
            w.model.apply_chat_template(messages)
