"""Files that are no models, texts that are no text, snapshots that cannot be trusted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import toys
from crash_harness import ABC, World, case, must_raise, refuses

from llamabranch import Branch, Context, Grammar, Model, SamplingParams
from llamabranch.errors import (
    BranchStateError,
    CacheFullError,
    GrammarError,
    LlamaBranchError,
    ModelLoadError,
    SequencesExhaustedError,
    SnapshotError,
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


@case("load")
def truncated_anywhere(w: World) -> None:
    data = w.path.read_bytes()
    for end in [*range(0, 4000, 97), *range(4000, len(data), 4001)]:
        must_raise(ModelLoadError, Model, w.file(data[:end]))


@case("load")
def flipped_header(w: World) -> None:
    data = toys.write_llama(w.folder / "small.gguf", n_embd=32, n_head=1, n_ff=32).read_bytes()
    rng = np.random.default_rng(7)
    for at in rng.integers(0, 2500, 250):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        with (
            suppress(LlamaBranchError),
            Model(w.file(bytes(flipped))) as model,
            Context(model, n_ctx=256, n_seq_max=2, n_threads=1) as ctx,
        ):
            ctx.decode([2], 0)


@case("load")
def nan_weights_with_check_tensors(w: World) -> None:
    data = bytearray(toys.write_llama(w.folder / "f32.gguf", weights="f32").read_bytes())
    data[-4:] = b"\xff\xff\xff\x7f"
    must_raise(ModelLoadError, lambda: Model(w.file(bytes(data)), check_tensors=True))


@case("load")
def nan_weights_unchecked(w: World) -> None:
    data = bytearray(toys.write_llama(w.folder / "f32.gguf", weights="f32").read_bytes())
    data[-64:] = b"\xff\xff\xff\x7f" * 16
    data[4000:4004] = data[4000:4004]
    with Model(w.file(bytes(data))) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        ctx.decode([2, 3], 0)
        with suppress(LlamaBranchError):
            ctx.sample(SamplingParams())


@case("load")
def embedding_model(w: World) -> None:
    path = toys.write_bert(w.folder / "bert.gguf")
    with Model(path) as model:
        must_raise(UnsupportedError, lambda: Context(model, n_ctx=256))


@case("load")
def vocabulary_only(w: World) -> None:
    with Model(w.path, vocab_only=True) as model:
        assert model.detokenize(model.tokenize("abc")) == "abc"
        must_raise(UnsupportedError, lambda: Context(model, n_ctx=256))


@case("load")
def vocabulary_only_file(w: World) -> None:
    path = toys.write_llama(w.folder / "vocab.gguf", vocab="bytes", drop=("*",))
    must_raise(ModelLoadError, lambda: Model(path))
    with Model(path, vocab_only=True) as model:
        assert model.detokenize(model.tokenize("abc")) == "abc"


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


@case("text")
def odd_chats(w: World) -> None:
    for messages in (
        [],
        [("", "")],
        [("user", "a\0b")],
        [("x" * 300, "é🙂")],
        [("user", "a" * 99999)],
    ):
        with suppress(LlamaBranchError):
            w.model.apply_chat_template(messages)
    must_raise(LlamaBranchError, lambda: w.model.apply_chat_template([("user", "a\udc80")]))


# -- snapshots -------------------------------------------------------------------------------------


@case("snapshot")
def truncated_snapshot(w: World) -> None:
    path = w.folder / "root.branch"
    w.root.save(path)
    data = path.read_bytes()
    for end in [*range(0, min(len(data), 1500), 37), *range(1500, len(data), 997), len(data) - 1]:
        must_raise(SnapshotError, Branch.load, w.ctx, w.file(data[:end]))


@case("snapshot")
def flipped_snapshot(w: World) -> None:
    path = w.folder / "root.branch"
    w.root.save(path)
    data = path.read_bytes()
    rng = np.random.default_rng(3)
    for at in [*range(64), *(int(i) for i in rng.integers(0, len(data), 150))]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        must_raise(SnapshotError, Branch.load, w.ctx, w.file(bytes(flipped)))


@case("snapshot")
def snapshot_of_another_model(w: World) -> None:
    path = w.folder / "root.branch"
    w.root.save(path)
    other = toys.write_llama(w.folder / "other.gguf", vocab="bytes", seed=9)
    with Model(other) as model, Context(model, n_ctx=256, n_threads=1) as ctx:
        must_raise(SnapshotError, lambda: Branch.load(ctx, path))
        Branch.start(ctx, "abc").step()


@case("snapshot")
def snapshot_into_other_settings(w: World) -> None:
    path = w.folder / "root.branch"
    w.root.save(path)
    for options in ({"kv_type": "f16"}, {"kv_type": "f32", "flash_attention": False}):
        with w.context(**options) as ctx, suppress(SnapshotError):
            Branch.load(ctx, path).step()
    with w.context(n_ctx=1024, n_seq_max=8) as ctx:
        branch = Branch.load(ctx, path)
        np.testing.assert_array_equal(branch.logits, w.logits)


@case("snapshot")
def snapshot_that_does_not_fit(w: World) -> None:
    path = w.folder / "long.branch"
    with w.context(n_ctx=1024) as ctx:
        Branch.start(ctx, [60] * 600).save(path)
    must_raise((CacheFullError, SnapshotError), lambda: Branch.load(w.ctx, path))
    held = w.root.fork_many(3)
    must_raise(SequencesExhaustedError, lambda: Branch.load(w.ctx, path))
    for branch in held:
        branch.prune()


refuses(
    "snapshot",
    (SnapshotError, BranchStateError),
    snapshot_missing=lambda w: Branch.load(w.ctx, w.folder / "missing.branch"),
    snapshot_directory=lambda w: Branch.load(w.ctx, w.folder),
    snapshot_empty=lambda w: Branch.load(w.ctx, w.file(b"")),
    snapshot_is_a_model=lambda w: Branch.load(w.ctx, w.path),
    save_nowhere=lambda w: w.root.save(w.folder / "no" / "such" / "folder.branch"),
)
