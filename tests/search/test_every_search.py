"""What all searches promise: room, drafts and other texts change no text, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import toys
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch import Branch, Context, search
from llamabranch.errors import CacheFullError, DecodeInterruptedError

STORY = "The wolf ran and the wolf ran and the wolf"
N_CELLS = 256  # llama.cpp's least
WHOLE: dict[str, Any] = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
WARM = lb.SamplingParams(**WHOLE)
Run = Callable[..., Any]


def first_letter(text: str) -> str | None:
    """Return one of three answers, or none for some texts."""
    letters = [c for c in text.lower() if c.isalpha()]
    place = ord(letters[0]) % 7 if letters else 6
    return None if place == 6 else "aaabbc"[place]


RUNS: dict[str, Run] = {
    "beam_search": partial(search.beam_search, beams=4, max_tokens=8),
    "best_of_n": partial(search.best_of_n, n=5, max_tokens=12),
    "vote": partial(search.vote, answer=first_letter, n=6, max_tokens=6),
    # One text at a time. With more, the votes would depend on which texts end first.
    "vote decided": partial(
        search.vote, answer=first_letter, n=8, max_tokens=6, confidence=1.0, width=1
    ),
}
SAMPLED = ["best_of_n", "vote", "vote decided"]


def outcome(result: search.SearchResult) -> tuple[Any, ...]:
    """Return the result of a search without its cost."""
    # The length of texts that were not needed for a decision depends on the room.
    return [h for h in result.hypotheses if h.finish_reason != "decided"], result.votes


@contextmanager
def nothing_is_left(root: Branch) -> Iterator[None]:
    """Assert that afterwards ``root`` and the content of its context are unchanged."""
    ctx = root.ctx

    def state() -> tuple[object, ...]:
        room = ctx.n_seq_free, ctx.usage().cells_used
        return *room, root.tokens, root.logits.tolist(), root.produce(), root.children

    before = state()
    yield
    assert state() == before
    ctx.audit()


# -- the texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [40, 1])
def test_one_beam_is_the_greedy_text(ctx: Context, max_tokens: int) -> None:
    with Branch.start(ctx, STORY, temperature=0.0) as root, root.fork() as branch:
        best = search.beam_search(root, beams=1, max_tokens=max_tokens).best
        plain = branch.generate(max_tokens).finish()
        assert (best.tokens, best.text) == (plain.tokens, plain.text)
        assert best.finish_reason == branch.finish_reason
        if best.finish_reason == "length":  # otherwise the end counts, too
            assert best.logprob == pytest.approx(branch.log_likelihood(), abs=1e-3)
            assert best.score == pytest.approx(best.logprob / len(best.tokens))


@pytest.mark.parametrize("name", RUNS)
def test_a_stop_string_ends_texts_before_it(ctx: Context, name: str) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = RUNS[name](root, stop=["e", ","])
        assert "stop" in {h.finish_reason for h in result.hypotheses}
        for h in result.hypotheses:
            text = ctx.detokenize(h.tokens)
            assert not {*"e,"} & {*h.text} and text.startswith(h.text)
            assert text == h.text or (text[len(h.text)] in "e," and h.finish_reason == "stop")


# -- room, drafts, company -----------------------------------------------------------------------------

ROOMS: dict[str, dict[str, Any]] = {
    "3 sequences": {"n_seq_max": 3, "n_batch": 64},
    "small batches": {"n_seq_max": 5, "n_batch": 5},
    "few cells": {"n_seq_max": 8, "n_batch": 64},
    "own cells": {"n_seq_max": 5, "n_ctx": 5 * N_CELLS, "kv_unified": False},
}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", RUNS)
def test_little_room_gives_the_same(target: lb.Model, ctx: Context, name: str, room: str) -> None:
    run = RUNS[name]
    if name == "beam_search" and room not in ("small batches", "own cells"):
        pytest.skip("it needs a sequence and cells for each beam")
    with Branch.start(ctx, STORY, sampling=WARM) as root, nothing_is_left(root):
        expected = run(root)
    options = {"n_ctx": N_CELLS, "n_threads": 1, "exact": True, **ROOMS[room]}
    with (
        Context(target, **options) as small,
        Branch.start(small, STORY, sampling=WARM) as root,
    ):
        others = [[9] * (small.usage().cells_free - 24)] if room == "few cells" else []
        rivals = [Branch.start(small, tokens) for tokens in others]
        with nothing_is_left(root):
            result = run(root)
        assert all(rival.position == len(others[0]) for rival in rivals)
        assert outcome(result) == outcome(expected)


@pytest.mark.parametrize("name", RUNS)
def test_recurrent_memory_searches_too(tmp_path: Path, name: str) -> None:
    outcomes = []
    with lb.Model(toys.write_lfm2(tmp_path / "lfm2.gguf", vocab="bytes")) as model:
        for n_seq_max in (7, 5):
            with (
                Context(model, n_ctx=512, n_seq_max=n_seq_max, n_threads=1) as ctx,
                Branch.start(ctx, "abcabc", sampling=WARM) as root,
                nothing_is_left(root),
            ):
                outcomes.append(outcome(RUNS[name](root)))
    assert [h.tokens for h in outcomes[0][0]] == [h.tokens for h in outcomes[1][0]] != []


@pytest.mark.parametrize("name", RUNS)
def test_where_no_sequence_is_free_the_reason_is_told(target: lb.Model, name: str) -> None:
    with (
        Context(target, n_ctx=256, n_seq_max=1, n_threads=1, exact=True) as narrow,
        Branch.start(narrow, STORY, sampling=WARM) as only,
        pytest.raises(lb.errors.SequencesExhaustedError) as caught,
    ):
        RUNS[name](only)
    assert caught.value.hint


@pytest.mark.parametrize("name", RUNS)
def test_a_full_cache_ends_texts_or_the_search(target: lb.Model, name: str) -> None:
    """Texts that are sampled have "capacity"; a search that compares its texts raises."""
    with (
        Context(target, n_ctx=256, n_seq_max=8, n_threads=1, exact=True) as ctx,
        Branch.start(ctx, STORY, sampling=WARM) as root,
        Branch.start(ctx, [9] * (ctx.usage().cells_free - 2)),
        nothing_is_left(root),
    ):
        if name in SAMPLED:
            hypotheses = RUNS[name](root).hypotheses
            assert {h.finish_reason for h in hypotheses} - {"decided"} == {"capacity"}
            assert {len(h.tokens) for h in hypotheses if h.finish_reason == "capacity"} == {3}
        else:
            with pytest.raises(CacheFullError):
                RUNS[name](root)


# -- what ends a search early ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_a_failed_decode_leaves_nothing_behind(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each decode in turn is interrupted, by llama.cpp's own abort; afterwards the text is the same."""
    run, real, n, fail_at = RUNS[name], C.llama_decode, 0, -1

    def decode(ptr: object, batch: C.llama_batch) -> int:
        nonlocal n
        if n == fail_at:
            ctx.interrupt()
        n += 1
        return int(real(ptr, batch))

    monkeypatch.setattr(C, "llama_decode", decode)
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        n = 0
        expected, n_decodes = outcome(run(root)), n
        assert n_decodes >= 3
        for fail_at in range(n_decodes):
            n = 0
            with nothing_is_left(root), pytest.raises(DecodeInterruptedError):
                run(root)
            assert n > fail_at
        n, fail_at = 0, -1
        assert outcome(run(root)) == expected


FAILING = [("best_of_n", "reward"), ("vote", "answer"), ("vote decided", "answer")]


@pytest.mark.parametrize(("name", "argument"), FAILING)
def test_what_a_function_raises_comes_through_and_nothing_is_left(
    ctx: Context, name: str, argument: str
) -> None:
    calls = count()
    kind: type[BaseException] = KeyboardInterrupt if argument == "answer" else ZeroDivisionError

    def fails(_: str) -> float:
        if next(calls) == 3:
            raise kind("division by zero")
        return 1.0

    with (
        Branch.start(ctx, STORY, sampling=WARM) as root,
        nothing_is_left(root),
        pytest.raises(kind, match="division by zero"),
    ):
        RUNS[name](root, **{argument: fails})
