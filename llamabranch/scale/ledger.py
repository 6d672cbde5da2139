"""Which rows run in which worker, and how many worker processes each row has seen die.

Ray restarts a dead actor and retries its tasks without end, so a row that makes llama.cpp abort would
be tried for ever. A job has one ledger, an actor without a CPU on the node of its driver. A worker
process registers when it starts and names the rows that it begins and ends. When an actor registers
again, its previous process is dead, and each row that this process had begun and not ended gets a death;
none does if the whole node is gone, which is not a row's fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

MOST_DEATHS = 3  # of worker processes while they ran a row; then the row is reported as an error

Row = int | str  # the id of a row


def _living_nodes() -> set[str]:
    import ray

    return {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


@dataclass
class _Worker:
    process: str
    node: str
    rows: dict[Row, None] = field(default_factory=dict)
    reason: str | None = None
    is_loading: bool = True


class Ledger:
    """The attempts of a job's rows.

    Args:
        living_nodes: returns the ids of the nodes that are alive.
    """

    def __init__(self, living_nodes: Callable[[], Collection[str]] = _living_nodes) -> None:
        self._living_nodes = living_nodes
        self._workers: dict[str, _Worker] = {}
        self._deaths: Counter[Row] = Counter()
        self._reasons: dict[Row, str] = {}
        self._n_loading_deaths = 0
        self._n_deaths = 0

    def register(self, actor: str, process: str, node: str) -> int:
        """Note that a process of an actor has started.

        Returns:
            How many processes in a row, of all actors, died while they loaded the model.
        """
        before = self._workers.get(actor)
        if before is not None and before.process != process:
            self._bury(before)
        self._workers[actor] = _Worker(process, node)
        return self._n_loading_deaths

    def _bury(self, worker: _Worker) -> None:
        self._n_deaths += 1
        if worker.node and worker.node not in self._living_nodes():
            return
        self._n_loading_deaths += worker.is_loading
        self._deaths.update(worker.rows.keys())
        if worker.reason is not None:
            self._reasons.update(dict.fromkeys(worker.rows, worker.reason))

    def ready(self, actor: str) -> None:
        """Note that the model of an actor is loaded."""
        self._n_loading_deaths = 0
        if actor in self._workers:
            self._workers[actor].is_loading = False

    def deaths(self, rows: Sequence[Row]) -> list[tuple[int, str | None]]:
        """Return for each row how many processes died while they ran it, and the last known reason."""
        return [(self._deaths[row], self._reasons.get(row)) for row in rows]

    def begin(self, actor: str, process: str, rows: Iterable[Row]) -> None:
        """Note that a process runs these rows."""
        # An actor that is not known: this ledger has been restarted.
        worker = self._workers.setdefault(actor, _Worker(process, "", is_loading=False))
        if worker.process == process:
            worker.rows.update(dict.fromkeys(rows))

    def end(self, actor: str, process: str, rows: Iterable[Row]) -> None:
        """Note that rows have results."""
        worker = self._workers.get(actor)
        for row in rows:
            if worker is not None and worker.process == process:
                worker.rows.pop(row, None)
            if self._deaths[row] < MOST_DEATHS:  # an error stays one if its block runs again
                del self._deaths[row]
                self._reasons.pop(row, None)

    def last_words(self, actor: str, reason: str) -> None:
        """Note why a process is about to end itself."""
        if actor in self._workers:
            self._workers[actor].reason = reason

    def n_deaths(self) -> int:
        """Return how many processes have died."""
        return self._n_deaths
