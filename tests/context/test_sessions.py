"""Sessions: whose texts are evicted first, and that a child never evicts its parent's path."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import audit

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request
from llamabranch.context import sessions
from llamabranch.context.prefix_cache import PrefixCache
from llamabranch.context.sessions import Sessions


@pytest.fixture
def ctx(toy: lb.Model) -> Iterator[Context]:
    with Context(toy, n_ctx=512, n_seq_max=4, n_threads=1, prefix_cache=True) as ctx:
        yield ctx
        audit(ctx)


def text(first: int, n: int) -> list[int]:
    """A text that no text with another first token begins like."""
    return [first, *(2 + (first * 7 + i * i) % 200 for i in range(n - 1))]


def read(ctx: Context, tokens: list[int], session: str | None = None, **options: Any) -> Any:
    return ctx.complete(tokens, max_tokens=0, session_id=session, **options)


def kept(ctx: Context) -> dict[int, int]:
    """How many tokens of each text are kept, by the first token."""
    assert isinstance(ctx.prefix_cache, PrefixCache)
    lengths: dict[int, int] = {}
    for cached in ctx.prefix_cache.texts():
        first = cached.tokens[0]
        lengths[first] = max(lengths.get(first, 0), len(cached.tokens))
    return lengths


def evict(ctx: Context, n: int) -> None:
    assert ctx.prefix_cache is not None
    with ctx.lock:
        ctx.prefix_cache.evict(n)


def test_texts_are_evicted_in_the_order_of_their_sessions(ctx: Context) -> None:
    """Ended sessions first, then texts without one, a session's other texts, its longest text."""
    read(ctx, text(10, 60), "main")
    read(ctx, text(11, 40), "main")
    read(ctx, text(12, 60), "other", ttl=0)
    read(ctx, text(13, 60))
    for gone in (12, 13, 11, 10):
        assert gone in kept(ctx)
        evict(ctx, kept(ctx)[gone])
        assert gone not in kept(ctx)
    assert kept(ctx) == {}


def test_a_text_that_others_share_outlives_texts_that_were_used_later(ctx: Context) -> None:
    shared = text(20, 80)
    for i in range(5):
        read(ctx, [*shared, 30 + i, *text(40 + i, 8)])
    for first in (21, 22):
        read(ctx, text(first, 60))
    evict(ctx, 150)
    assert kept(ctx)[20] >= 80 and 21 not in kept(ctx)
    # It does not stay for ever: each eviction of other texts makes it older.
    for first in range(50, 80):
        read(ctx, text(first, 120))
    assert 20 not in kept(ctx)


def test_a_session_is_followed_through_its_turns(ctx: Context) -> None:
    """Its longest text stays whole while other texts come and go, and is no sequence of its own."""
    path = text(10, 100)
    for n in (100, 120, 140):
        path = text(10, n)
        assert read(ctx, path, "main").evaluated in (100, 20)
    for first in range(20, 40):
        read(ctx, text(first, 150))
    assert kept(ctx)[10] >= 139
    assert read(ctx, text(10, 160), "main").evaluated <= 22


def test_a_child_never_evicts_its_parents_path(ctx: Context) -> None:
    parent = text(10, 300)
    read(ctx, parent, "main")
    child: dict[str, Any] = {"session_id": "child", "parent_session_id": "main"}
    begun = [*parent[:200], *text(11, 100)]
    assert read(ctx, begun, "child", parent_session_id="main").cached == 200
    # It does not fit beside its parent: it ends, and the parent's path is still there.
    result = ctx.complete(text(12, 150), max_tokens=200, min_tokens=200, **child)
    assert (result.finish_reason, len(result.tokens) > 0) == ("capacity", True)
    with pytest.raises(lb.CacheFullError, match="room for 212, because 300 are kept for"):
        ctx.complete(text(13, 300), max_tokens=1, **child)
    # A grandchild neither.
    with pytest.raises(lb.CacheFullError):
        ctx.complete(text(14, 300), max_tokens=1, session_id="below", parent_session_id="child")
    assert kept(ctx)[10] >= 299
    assert read(ctx, parent, "main").evaluated == 1
    # Others may, when no child runs.
    assert ctx.complete(text(15, 400), max_tokens=1).error is None
    assert read(ctx, parent, "main").evaluated > 1


def test_nobody_evicts_a_path_while_a_child_runs(ctx: Context) -> None:
    """Another request waits until the child has ended."""
    parent = text(10, 200)
    read(ctx, parent, "main")
    with Engine(ctx, drafter=None) as engine:
        names: Any = {"session_id": "child", "parent_session_id": "main"}
        engine.add_request(Request([*parent, 5, 6], "child", 60, min_tokens=60, **names))
        engine.step()
        engine.add_request(Request(text(20, 320), "big", 2))
        results = {}
        while engine.has_unfinished():
            for event in engine.step():
                if event.result is not None:
                    results[event.id] = event.result
                    if event.id == "child":
                        assert "big" not in results
                        assert kept(ctx)[10] >= 200
    assert results["big"].error is None and results["child"].cached == 200


def test_sessions_that_nobody_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    known, clock = Sessions(), [100.0]
    monkeypatch.setattr(sessions, "monotonic", lambda: clock[0])
    main = known.of("main", None, 10)
    child = known.of("child", "main", 0)
    assert known.of("child", None, 5) is child and child.parent is main
    assert known.of("main", "child", 10).parent is None  # it would be its own ancestor
    assert known.of("main", "main", 10).parent is None
    text = object.__new__(Context)  # anything that can be referred to
    main.begin(text)
    clock[0] = 200.0
    assert not main.has_ended and known.running() == [main] and child.has_ended
    main.end(text)
    main.end(text)
    assert not main.has_ended and known.running() == []
    for clock[0], has_ended in ((210.0, True), (150.0, False)):  # the clock was set back
        assert main.has_ended == has_ended
    del child
    gc.collect()
    assert known.of("child", None, 5).parent is None


def test_texts_that_several_sessions_have_are_evicted(ctx: Context) -> None:
    """Their cells belong to none of them alone."""
    prefixes = ctx.prefix_cache
    assert prefixes is not None
    with Branch.start(ctx, text(10, 300)) as branch, ctx.lock:
        for name in "abc":
            prefixes.put(branch.seq_id, branch.tokens, prefixes.sessions.of(name, None, 600))
    assert len(prefixes) == 3
    evict(ctx, 200)
    assert kept(ctx) == {10: 100}
    assert read(ctx, text(20, 450), "d").error is None
    assert kept(ctx)[20] == 450


def test_no_session_is_read_twice_while_its_children_run(toy: lb.Model) -> None:
    """16 clients, sub-agents of 8 sessions, in half of the cells that all of their texts have."""
    mains = [Request(text(10 + i, 40), f"{i}", 8, session_id=f"main {i}") for i in range(8)]
    with Context(toy, n_ctx=512, n_seq_max=16, n_threads=1, prefix_cache=True) as ctx:
        engine = Engine(ctx, drafter=None)
        paths = [[*text(10 + i, 40), *r.tokens] for i, r in enumerate(engine.generate(mains))]
        results = engine.generate([
            Request(
                [*paths[i % 8], *text(30 + i, 30)], max_tokens=8, session_id=f"child {i}",
                parent_session_id=f"main {i % 8}",
            )
            for i in range(16)
        ])  # fmt: skip
        assert sum(map(len, paths)) + sum(30 + len(r.tokens) for r in results) > 1.8 * ctx.n_ctx
        for path, result in zip(paths * 2, results, strict=True):
            assert result.finish_reason in ("length", "stop")
            assert result.cached >= len(path) - 1
        audit(ctx)
