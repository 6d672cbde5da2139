"""The ledger: which rows get a death, and which do not."""

from __future__ import annotations

from functools import partial

from llamabranch.scale.ledger import MOST_DEATHS, Ledger

on_one_node = partial(Ledger, lambda: {"node"})


def test_rows_in_flight_get_a_death_when_their_actor_starts_again() -> None:
    ledger = on_one_node()
    ledger.register("a", "process 1", "node")
    ledger.ready("a")
    ledger.begin("a", "process 1", [1, 2, 3])
    ledger.end("a", "process 1", [2])
    assert ledger.deaths([1, 2, 3]) == [(0, None)] * 3
    ledger.last_words("a", "the engine failed")
    ledger.register("a", "process 2", "node")
    assert ledger.deaths([1, 2, 3, 4]) == [
        (1, "the engine failed"), (0, None), (1, "the engine failed"), (0, None)
    ]  # fmt: skip
    assert ledger.n_deaths() == 1
    ledger.begin("a", "process 2", [1, 3])
    ledger.end("a", "process 2", [1, 3])
    assert ledger.deaths([1, 3]) == [(0, None)] * 2


def test_row_of_another_worker_gets_no_death() -> None:
    ledger = on_one_node()
    for actor in ("a", "b"):
        ledger.register(actor, f"{actor} 1", "node")
        ledger.ready(actor)
    ledger.begin("a", "a 1", ["x"])
    ledger.begin("b", "b 1", ["y"])
    ledger.register("a", "a 2", "node")
    assert [n for n, _ in ledger.deaths(["x", "y"])] == [1, 0]


def test_row_that_has_seen_too_many_deaths_stays_an_error() -> None:
    ledger = on_one_node()
    ledger.register("a", "0", "node")
    for i in range(MOST_DEATHS):
        ledger.begin("a", str(i), [5])
        ledger.register("a", str(i + 1), "node")
    ledger.end("a", str(MOST_DEATHS), [5])
    assert ledger.deaths([5]) == [(MOST_DEATHS, None)]


def test_registering_the_same_process_again_is_no_death() -> None:
    ledger = on_one_node()
    ledger.register("a", "1", "node")
    ledger.begin("a", "1", [5])
    ledger.register("a", "1", "node")
    assert ledger.deaths([5]) == [(0, None)]
    assert ledger.n_deaths() == 0


def test_rows_are_not_blamed_for_a_node_that_is_gone() -> None:
    living = {"n1", "n2"}
    ledger = Ledger(lambda: living)
    ledger.register("a", "1", "n1")
    ledger.ready("a")
    ledger.begin("a", "1", [5])
    living.discard("n1")
    assert ledger.register("a", "2", "n2") == 0
    assert ledger.deaths([5]) == [(0, None)]
    assert ledger.n_deaths() == 1


def test_deaths_while_loading_are_counted_until_one_worker_is_ready() -> None:
    ledger = on_one_node()
    assert [ledger.register("a", str(i), "node") for i in range(4)] == [0, 1, 2, 3]
    assert ledger.register("b", "0", "node") == 3
    ledger.ready("b")
    assert ledger.register("a", "4", "node") == 1


def test_words_of_a_process_that_is_gone_change_nothing() -> None:
    ledger = on_one_node()
    ledger.register("a", "1", "node")
    ledger.register("a", "2", "node")
    ledger.begin("a", "1", [5])  # a message that was late
    ledger.end("a", "1", [6])
    ledger.register("a", "3", "node")
    assert ledger.deaths([5, 6]) == [(0, None)] * 2


def test_ledger_that_was_started_again_goes_on() -> None:
    ledger = on_one_node()
    ledger.begin("a", "1", [5])
    ledger.register("a", "2", "node")
    assert ledger.deaths([5]) == [(1, None)]
