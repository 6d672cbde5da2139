"""The properties of a model, its tokenizer, and the comparison of vocabularies."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from pathlib import Path

import pytest
import toys
from programs import run_code, run_python

import llamabranch as lb
from llamabranch.errors import ConfigError, SnapshotError, UsageError
from llamabranch.loading import LoadOptions
from llamabranch.model.fingerprint import quick_key

TEXTS = [
    "",
    " ",
    "Once upon a time",
    "  two  spaces\n\nand\tlines\r\n",
    "“Grüße,” said the naïve façade — 世界 は 広い",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b\ufeff",
    "\0\x01\x7f",
    "<|endoftext|> is only text here",
    "spaces stay here . and , here ! or ? and I 'm not ' a ' n't he 's",
    "don't we'll I'M 12345 3.14159 a1b2 ___",
]


# -- facts ---------------------------------------------------------------------------------------


def test_properties_of_the_bundled_pair(target: lb.Model, draft: lb.Model) -> None:
    for model in (target, draft):
        kinds = (model.architecture, model.file_type, model.memory_type, model.vocab_type)
        assert kinds == ("llama", "Q8_0", "attention", "bpe")
        assert model.can_generate and model.has_text
        assert (model.n_vocab, model.n_swa) == (4096, 0) and model.n_ctx_train >= 512
        assert model.metadata["general.architecture"] == "llama"
        assert model.name == model.path.stem  # not general.name, which other files share
        assert model.name in repr(model)
        assert model.size_bytes < model.path.stat().st_size
    assert target.n_params > 4 * draft.n_params
    assert (target.n_layer, target.n_embd, draft.n_layer, draft.n_embd) == (6, 256, 2, 128)


def test_end_tokens_are_eog_and_others_are_not(target: lb.Model) -> None:
    assert target.eos in target.eog_tokens
    assert all(target.is_eog(token) for token in target.eog_tokens)
    assert not target.is_eog(target.tokenize("a", add_special=False)[0])


def changed(path: Path, at: int) -> None:
    """Change a byte in the weights, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def large(tmp_path: Path, target: lb.Model) -> Path:
    """The bundled target, which is larger than its first and last MiB together."""
    return Path(shutil.copy(target.path, tmp_path / "large.gguf"))


def test_fingerprint_is_of_the_whole_file(large: Path, tmp_path: Path) -> None:
    other = Path(shutil.copy(large, tmp_path / "other.gguf"))
    changed(other, other.stat().st_size // 2)
    with lb.Model(large, vocab_only=True) as model, lb.Model(other) as fake:
        assert model.fingerprint == hashlib.sha256(large.read_bytes()).hexdigest()
        assert quick_key(large) == quick_key(other)
        assert model.fingerprint != fake.fingerprint
        assert model.is_of(model.fingerprint) and model.is_of(quick_key(other))
        assert not model.is_of(fake.fingerprint) and not model.is_of("")


def test_fingerprint_of_a_split_model_is_of_all_parts(tmp_path: Path) -> None:
    path = toys.write_llama(tmp_path / "toy.gguf")
    parts = toys.write_split(path, tmp_path, 3)
    with lb.Model(parts[0]) as model:
        before = model.fingerprint
        assert before != lb.Model(path).fingerprint
    changed(parts[2], parts[2].stat().st_size - 3)
    with lb.Model(parts[0]) as model:
        assert model.fingerprint != before


def test_file_that_was_replaced_after_loading_has_no_fingerprint(
    large: Path, tmp_path: Path, draft: lb.Model
) -> None:
    with lb.load(large, n_ctx=256, n_threads=1) as ctx:
        large.chmod(0o400)
        assert ctx.model.is_of(ctx.model.fingerprint)
        del ctx.model.fingerprint
        branch = lb.Branch.start(ctx, "Once")
        os.replace(shutil.copy(draft.path, tmp_path / "new.gguf"), large)
        with pytest.raises(UsageError, match="was changed, replaced or removed") as raised:
            _ = ctx.model.fingerprint
        assert "load the model again" in str(raised.value.hint)
        for _ in range(2):
            with pytest.raises(SnapshotError, match="cannot be identified"):
                branch.save(tmp_path / "a.branch")
            large.unlink(missing_ok=True)


def test_branch_and_chat_of_other_weights_in_the_middle_are_refused(
    large: Path, tmp_path: Path
) -> None:
    options: LoadOptions = {"n_ctx": 256, "n_threads": 1, "chat_template": "chatml"}
    with lb.load(large, **options) as ctx:
        lb.Branch.start(ctx, "Once upon").save(tmp_path / "a.branch")
        chat = lb.Chat(ctx, max_tokens=2)
        chat.send("One day").finish()
        chat.save(tmp_path / "chat")
    changed(large, large.stat().st_size // 2)
    with lb.load(large, **options) as ctx:
        with pytest.raises(SnapshotError, match="from another model"):
            lb.Branch.load(ctx, tmp_path / "a.branch", trusted=True)
        with pytest.raises(SnapshotError, match="from another model"):
            lb.Chat.load(ctx, tmp_path / "chat")


def test_branch_of_a_version_before_0_4_is_taken(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old fingerprint was a hash of the first and the last MiB."""
    with lb.load(large, n_ctx=256, n_threads=1) as ctx:
        branch = lb.Branch.start(ctx, "Once upon")
        with monkeypatch.context() as patch:
            patch.setattr(lb.Model, "fingerprint", quick_key(large))
            branch.save(tmp_path / "a.branch")
        assert lb.Branch.load(ctx, tmp_path / "a.branch").tokens == branch.tokens


def test_progress_goes_from_zero_to_one(target: lb.Model) -> None:
    seen: list[tuple[int, float]] = []
    lb.Model(
        target.path, progress=lambda share: seen.append((threading.get_ident(), share))
    ).close()
    assert {thread for thread, _ in seen} == {threading.get_ident()}
    assert seen == sorted(seen)
    assert seen[0][1] >= 0
    assert seen[-1][1] == 1

    def stop(_share: float) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        lb.Model(target.path, progress=stop)


def test_extra_buffers_change_no_text(target: lb.Model) -> None:
    # Weights are never laid out for AMX by default: code that reads them was seen to end the process.
    def text_of(model: lb.Model) -> str:
        with lb.Context(model, n_ctx=256) as ctx:
            branch = lb.Branch.start(ctx, "The king", temperature=0)
            return "".join(t.text for t in branch.generate(20))

    with lb.Model(target.path, extra_buffers=False) as plain:
        assert text_of(plain) == text_of(target)
    with pytest.raises(ConfigError, match="extra_buffers"):
        lb.Model(target.path, extra_buffers="yes")


EXTRA_BUFFERS = """
import sys, llamabranch as lb
try:
    with lb.load(sys.argv[1], n_ctx=64, extra_buffers=True) as ctx:
        ctx.decode([1] * 8, 0, logits="all")
        print("decoded")
except lb.errors.UnsupportedError as error:
    print("AMX" in str(error), error.hint)
"""


def test_extra_buffers_work_or_are_refused(target: lb.Model) -> None:
    output = run_code(EXTRA_BUFFERS, target.path)
    assert output in ("decoded\n", "True extra_buffers='auto' does not repack them\n")


@pytest.mark.parametrize(
    ("architecture", "memory"),
    [("llama", "attention"), ("gemma3", "sliding-window"), ("mamba", "recurrent"),
     ("lfm2", "hybrid"), ("rwkv7", "recurrent")],
)  # fmt: skip
def test_memory_type_is_known(architecture: str, memory: str, tmp_path: Path) -> None:
    with lb.Model(toys.write_toy(tmp_path / "toy.gguf", architecture)) as model:
        assert model.memory_type == memory
        assert model.can_generate


# -- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_whole_and_never_splits_a_character(
    text: str, target: lb.Model, toy: lb.Model
) -> None:
    for model in (target, toy):
        decoder = model.text_decoder()
        tokens = model.tokenize(text, add_special=False)
        assert model.detokenize(tokens) == text
        pieces = [decoder.feed(token) for token in tokens]
        assert "".join(pieces) + decoder.flush() == text
        assert not any("\ufffd" in piece for piece in pieces)
        if model is toy:  # a token is a byte here: a character appears with its last byte
            assert len(pieces) == len(text.encode())
            assert all(len(piece) <= 1 for piece in pieces)


def test_broken_utf8_becomes_replacement_characters_and_nothing_else_is_lost(
    toy: lb.Model,
) -> None:
    data = b"a\xf0\x9f\x99b\xffc\xe4\xb8"
    tokens = [_byte_token(toy, byte) for byte in data]
    decoder = toy.text_decoder()
    streamed = "".join(map(decoder.feed, tokens)) + decoder.flush()
    assert streamed == data.decode("utf-8", "replace")
    assert toy.detokenize(tokens) == streamed


def _byte_token(model: lb.Model, byte: int) -> int:
    return next(t for t in range(model.n_vocab) if model.piece(t) == bytes([byte]))


def test_special_tokens_are_parsed_only_with_parse_special(target: lb.Model) -> None:
    assert target.eos is not None
    spelled = target.detokenize([target.eos], special=True)
    assert target.tokenize(spelled, add_special=False, parse_special=True) == [target.eos]
    assert target.eos not in target.tokenize(spelled, add_special=False)
    assert target.detokenize([target.eos]) == ""
    assert target.piece(target.eos) == b""


# -- pairs ---------------------------------------------------------------------------------------


def test_vocabularies_are_compared(
    target: lb.Model, draft: lb.Model, toy: lb.Model, small_toy: lb.Model
) -> None:
    report = target.compatibility(draft)
    assert report and "same" in report.reason
    assert (report.n_different, report.first_difference) == (0, None)
    assert report.n_vocab == (4096, 4096)
    report = target.compatibility(toy)
    assert not report
    assert report.first_difference is not None
    assert report.n_different > 200
    assert not small_toy.compatibility(toy)


def test_padding_of_the_vocabulary_does_not_matter(tmp_path: Path) -> None:
    with (
        lb.Model(toys.write_toy(tmp_path / "a.gguf", vocab=300)) as narrow,
        lb.Model(toys.write_toy(tmp_path / "b.gguf", vocab=320)) as wide,
    ):
        assert narrow.compatibility(wide)
        assert wide.compatibility(narrow)
        assert wide.compatibility(narrow).n_vocab == (320, 300)


def test_loading_prints_nothing(target: lb.Model) -> None:
    code = "import sys, llamabranch as lb; lb.Context(lb.Model(sys.argv[1]), n_ctx=256)"
    done = run_python("-c", code, target.path)
    assert done.stdout == done.stderr == ""
