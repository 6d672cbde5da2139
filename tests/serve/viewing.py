"""Made-up records of a server's day: an agent, its sub-agents, a script, with every kind of cause."""

from __future__ import annotations

from collections.abc import Iterator

from llamabranch.request.record import Cause, Record

HEADER = (
    "x-anthropic-billing-header: cc_version=2.1.42; cch={}; mode=agent\nYou are a coding agent."
)
PLACE = "in the system prompt, line 1"
BEFORE, AFTER = HEADER.format("65abc"), HEADER.format("fa690")


class Day:
    """Writes records one after another.

    Args:
        time: when the first request came, in seconds since 1970.
    """

    def __init__(self, time: float) -> None:
        self.time = time
        self.records: list[Record] = []
        self._last: dict[str, Record] = {}

    def ask(
        self, session: str, *causes: Cause, cached: int = 0, generated: int = 160, parent: str = "",
        door: str = "messages", ended: str = "tool_calls", hint: str = "", chain: str = "",
        dropped: tuple[str, ...] = (),
    ) -> Record:  # fmt: skip
        """Add a request that read what the causes say, and follows the last of its session or chain."""
        read = sum(cause.n_tokens for cause in causes)
        name = session or chain
        before = self._last.get(name) or self._last.get(parent)
        record = Record(
            len(self.records), self.time, door, f"msg_{len(self.records):06x}", session, parent,
            cached + read, cached, read, generated, 0.01, 0.2 + read / 380, generated / 24, ended,
            [*causes], before.number if before is not None and name else None, [*dropped], hint,
        )  # fmt: skip
        self.records.append(record)
        if name:
            self._last[name] = record
        self.time += record.read_s + record.write_s + 2.4
        return record

    def go_on(self, session: str, n: int = 1, *, new: int = 340, **more: str) -> None:
        """Add turns that each read only what is new."""
        for i in range(n):
            last = self._last[session]
            cached = last.num_prompt_tokens + last.generated
            self.ask(session, fresh(new + 97 * i, cached), cached=cached, **more)  # type: ignore[arg-type]


def fresh(n: int, start: int) -> Cause:
    return Cause("new", n, f"{n:,} new tokens after token {start:,}", start)


def changed(n: int, of: int, number: int, before: str = BEFORE, after: str = AFTER) -> Cause:
    told = f"read again from token {of - n:,} of {of:,}: `cch=65abc` became `cch=fa690`, {PLACE}"
    return Cause(
        "changed", n, f"{told}; {n:,} tokens, 36.3 s", of - n, number, PLACE, before, after
    )


def first(n: int) -> Cause:
    return Cause("first", n, f"{n:,} tokens; no earlier prompt begins like this")


def made_up(time: float) -> list[Record]:
    """Return 40 records: two agents with sub-agents, a script, single requests; the last one runs."""
    day = Day(time)
    day.ask("main", first(11_204), generated=210)
    day.go_on("main", 4)
    hint = "--drop-line '^x\\-anthropic\\-billing\\-header:' leaves this line out"
    before = day.records[-1]
    again, n_new = (
        changed(before.num_prompt_tokens - 58, before.num_prompt_tokens, before.number),
        412,
    )
    day.ask("main", again, fresh(n_new, before.num_prompt_tokens), cached=58, hint=hint)
    day.go_on("main", 2, new=180)
    for name in ("explore", "write the tests"):
        day.ask(name, fresh(1_310, 9_860), cached=9_860, parent="main")
        day.go_on(name, 3 if name == "explore" else 4, new=520, parent="main")
    day.go_on("main", 1, new=1_480)
    last = day.records[-1]
    told = (
        "6,120 tokens read again: they were evicted at 14:02:37 because session review needed "
        "room for 7,940 tokens; -c 49152 would have been enough, 16.1 s"
    )
    day.ask(
        "main",
        Cause("evicted", 6_120, told, 9_800),
        fresh(260, last.num_prompt_tokens),
        cached=9_800,
    )
    day.ask("review", first(7_940), parent="", generated=420, ended="end_turn")
    rewritten = "the template leaves out earlier thoughts: 1,204 tokens from token 8,360 on, 3.2 s"
    was, now = "<think>\nThe list may be empty, so I", "The function returns None when"
    cause = Cause("rewritten", 1_204, rewritten, 8_360, 21, "message 3, line 1", was, now)
    day.ask("review", cause, fresh(311, 9_000), cached=7_940)
    day.go_on("review", 2)
    told = (
        "41 tokens read again from token 9,720: the text of the last answer is split into other "
        "tokens than it was generated in, 0.1 s"
    )
    cause = Cause("retokenized", 41, told, 9_720, 23, "", "unrelia ble", "un reliable")
    day.ask("review", cause, fresh(66, 9_761), cached=9_720)
    told, dropped = (
        "2,950 tokens; no earlier prompt begins like this",
        "x-anthropic-billing: cch=77e01",
    )
    day.ask("main", Cause("first", 2_950, told), cached=9_100, dropped=(dropped,))
    day.go_on("main", 3)
    memory = (
        "516 tokens read again: the memory of this model cannot return to token 4,100, only to "
        "token 3,584, 1.4 s"
    )
    for i, cause in enumerate(
        [first(3_900), fresh(212, 3_900), Cause("memory", 516, memory, 3_584, 28)]
    ):
        day.ask("", cause, cached=(0, 3_900, 3_584)[i], door="python", chain="script", ended="stop")
    for n in (96, 104, 88):
        scored = f"{n} tokens read again, because their log-probabilities are asked for, 0.3 s"
        day.ask("", Cause("scored", n, scored), generated=0, door="completions", ended="length")
    day.go_on("explore", 2, new=240, parent="main")
    day.ask("main", fresh(96, 14_400), cached=14_400, generated=12, ended="")
    return day.records


def everywhere(text: str) -> Iterator[Record]:
    """Yield records that have a text in each of their fields."""
    cause = Cause("changed", 3, text, 1, 0, text, f"a{text}b", f"a{text[::-1]}c")
    for n in range(2):
        yield Record(
            n,
            1.0,
            text,
            text,
            text,
            f"{text}{n}",
            9,
            6,
            3,
            1,
            0,
            1,
            1,
            text,
            [cause],
            0,
            [text],
            text,
        )
