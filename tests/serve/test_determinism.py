"""An answer does not depend on other requests, their order, drafts, or clients that leave."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from serving import Serving, bundled_engine, httpx, record_schema

import llamabranch as lb

PROMPTS = ["Once upon a time", "The wolf", "In the forest there stood", "A king had a daughter"]
SCHEMA = record_schema({"type": "integer"}, most=10)
VOLATILE = {"id", "created", "usage"}  # the usage says how much was cached


def requests(n: int) -> list[tuple[str, dict[str, Any]]]:
    """Return ``n`` requests of many kinds, the same each time."""
    chance = random.Random(5)
    pairs: list[tuple[str, dict[str, Any]]] = []
    for seed in range(n):
        prompt = chance.choice(PROMPTS) + " and then" * chance.randrange(12)
        body: dict[str, Any] = {
            "max_tokens": chance.randrange(1, 28),
            "temperature": chance.choice([0.0, 0.8, 1.2]),
            "seed": seed,
            "n": chance.choice([1, 1, 1, 3]),
            "stream": chance.random() < 0.4,
            **chance.choice(
                [{}, {"repeat_penalty": 1.2}, {"stop": [" the"]}, {"json_schema": SCHEMA}]
            ),
        }
        kind = chance.randrange(3)
        if kind == 0:
            messages = [{"role": "user", "content": prompt}]
            pairs.append(("/v1/chat/completions", {**body, "messages": messages}))
        elif kind == 1 and not body["stream"]:
            more = chance.choice([{"logprobs": 3}, {"echo": True, "logprobs": 1}, {"n": 2}])
            pairs.append(("/v1/completions", {**body, "prompt": prompt, **more}))
        else:
            pairs.append(("/v1/completions", {**body, "prompt": prompt, "logprobs": 0}))
    return pairs


async def answer(api: Any, path: str, body: dict[str, Any]) -> object:
    """Return an answer without the fields that may differ; the parts of a stream are joined."""
    reply = await api.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        return {key: value for key, value in reply.json().items() if key not in VOLATILE}
    texts: dict[int, list[object]] = {}
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                parts = texts.setdefault(choice["index"], ["", [], None])
                delta = choice.get("delta", choice)
                parts[0] = str(parts[0]) + (delta.get("text") or delta.get("content") or "")
                logprobs = choice.get("logprobs") or {"tokens": (), "token_logprobs": ()}
                scored = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
                parts[1] = [*parts[1], *scored]  # type: ignore[misc]
                parts[2] = choice["finish_reason"] or parts[2]
    return texts


def answers(
    open_engine: Callable[[], lb.AsyncEngine],
    n: int,
    *,
    concurrency: int,
    shuffle: int | None = None,
    leaves: float = 0.0,
) -> list[object]:
    """Return the answers of ``n`` requests, ``concurrency`` at a time.

    ``leaves``: the share of additional clients that disconnect in the middle.
    """
    asked = requests(n)
    order = list(range(n))
    chance = random.Random(shuffle)
    if shuffle is not None:
        chance.shuffle(order)
    received: list[object] = [None] * n

    async def main(url: str) -> None:
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as api:

            async def ask(i: int) -> None:
                async with gate:
                    received[i] = await answer(api, *asked[i])

            async def leave(i: int) -> None:
                async with gate:
                    task = asyncio.ensure_future(api.post(asked[i][0], json=asked[i][1]))
                    await asyncio.sleep(chance.random() * 0.05)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

            leaving = [i for i in order if chance.random() < leaves]
            await asyncio.gather(*map(ask, order), *map(leave, leaving))

    with Serving(open_engine) as server:
        asyncio.run(main(server.url))
    return received


CACHES: dict[str, dict[str, Any]] = {
    "usual": {},
    "small": {"n_ctx": 512, "parallel": 3},
    "own": {"n_ctx": 768, "parallel": 3, "kv_unified": False},
}
DRAFTERS: dict[str, Callable[[], lb.Drafter | None]] = {
    "none": lambda: None,
    "suffix": lb.SuffixDrafter,
}


@pytest.mark.parametrize(  # every pair of two of these
    ("n", "concurrency", "drafter", "kind"),
    [(24, 8, "suffix", "small"), (24, 8, "suffix", "own"),
     *(pytest.param(200, *load, marks=pytest.mark.slow) for load in (
         (8, "none", "usual"), (32, "none", "small"), (8, "suffix", "small"), (32, "suffix", "usual"),
         (32, "none", "own"), (8, "suffix", "own"),
     ))],
)  # fmt: skip
def test_answers_are_the_same_under_any_load(
    n: int, concurrency: int, drafter: str, kind: str
) -> None:
    engine = partial(bundled_engine, drafter=DRAFTERS[drafter], **CACHES[kind])
    received = answers(engine, n, concurrency=concurrency, shuffle=concurrency, leaves=0.3)
    assert received == expected(n)


@cache
def expected(n: int) -> list[object]:
    return answers(bundled_engine, n, concurrency=1)


def test_nothing_leaks_over_two_thousand_requests() -> None:
    """Neither sequences nor memory: the last thousand requests take no more than those before."""

    def size() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("memory is read from /proc")
    asked = requests(100)

    async def some(url: str) -> None:
        gate = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=url, timeout=600) as api:

            async def ask(i: int) -> None:
                async with gate:
                    body = {**asked[i % 100][1], "max_tokens": 4, "n": 1, "best_of": None}
                    await answer(api, asked[i % 100][0], body)

            await asyncio.gather(*map(ask, range(1000)))

    with Serving(bundled_engine) as server:
        sizes = []
        for _ in range(3):
            asyncio.run(some(server.url))
            sizes.append(size())
        service = server.server.service
        assert service is not None and service.n_texts == 0
        assert server.ctx.n_seq_free == server.ctx.n_seq_max
    assert sizes[2] - sizes[1] < 8 << 20, sizes
