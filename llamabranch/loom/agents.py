"""The journal of an agent as a document: a node for each prompt, each turn and each turn's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Raw

from ..agents import Step
from ..agents.journal import Recorded, read
from ..context.prefix_cache import n_common
from ..errors import ConfigError, ParseError
from .document import Document, Ended, Head, Made, Node, Piece, Pieces, Tokens

__all__ = ["document_of"]

_SHARED = 8  # if prompts have fewer first tokens in common, they are separate roots


def document_of(data: bytes, most: int) -> Document:
    """Return what all runs of a journal have read and written.

    Raises:
        ConfigError: it is damaged, or has more than ``most`` nodes.
    """
    try:
        runs = read(data)
        document = Document()
        for run in runs:
            _Reader(document, run, most).take_all()
    except ParseError as error:
        raise ConfigError(f"this journal of an agent is damaged: {error.message}") from None
    except (LookupError, ValueError, TypeError) as error:
        raise ConfigError(f"this journal of an agent is damaged: {error!r}") from None
    return document


class _Reader:
    def __init__(self, document: Document, run: Recorded, most: int) -> None:
        self._document, self._run, self._most = document, run, most
        self._turns: dict[tuple[str, int], Node] = {}
        agent = run.head.get("agent")
        sampling = agent.get("sampling") if isinstance(agent, Mapping) else None
        setting_names = ("temperature", "top_k", "top_p", "min_p")
        self._sampling = {k: v for k, v in (sampling or {}).items() if k in setting_names}
        if document.head is None:
            model, digest, kv_type = (
                str(run.head.get(name) or "") for name in ("model", "fingerprint", "kv_type")
            )
            document.apply(Head(model=model, fingerprint=digest, kv_type=kv_type))
        pieces = {int(token): _piece(piece) for token, piece in run.pieces.items()}
        document.apply(Pieces(p=pieces))

    def take_all(self) -> None:
        """Make the nodes of all paths, callers first."""
        for path in sorted(self._run.steps, key=lambda path: (path.count("/"), path)):
            self._take(path, self._run.steps[path])

    def _take(self, path: str, steps: Sequence[Step]) -> None:
        here = self._caller(path)
        tool_names: list[str] = []
        for step in steps:
            if step.kind == "result":
                tool_names.append(step.name)
            elif step.kind == "prompt":
                names = ", ".join(dict.fromkeys(tool_names))
                here = self._prompt(step, here, names)
                tool_names.clear()
            elif step.kind == "text" and step.tokens:
                seed = None if step.seed is None else str(step.seed)
                here = self._add(here, step.tokens, "continue", "A", seed=seed)
                self._turns[path, step.turn] = here
            elif step.kind == "end" and here is not None and here.made.seed is not None:
                self._document.apply(Ended(id=here.id, reason=step.text))

    def _caller(self, path: str) -> Node | None:
        """Return the node that a path continues, or None if it begins with its own prompt."""
        caller, slash, call = path.rpartition("/")
        if slash:
            return self._turns.get((caller, int(call.split(".")[0])))
        before = self._run.head.get("after")
        if not isinstance(before, Mapping):
            return None
        tokens = list(before["tokens"])
        for node in self._document.shown():
            if node.tokens() == tokens:
                return node
        return self._add(None, tokens, "prompt", "import")

    def _prompt(self, step: Step, here: Node | None, names: str) -> Node:
        if step.n and here is not None:
            return self._add(here, step.tokens, "typed", names or "user", at=step.n)
        for root in [*self._document.nodes.values()]:  # another task of the same agent
            if root.parent is None:
                n = n_common(root.ids, step.tokens)
                if n >= _SHARED:
                    return self._add(root, step.tokens[n:], "typed", step.agent, at=n)
        return self._add(None, step.tokens, "prompt", step.agent)

    def _add(
        self,
        parent: Node | None,
        tokens: Sequence[int],
        kind: str,
        by: str,
        *,
        at: int | None = None,
        seed: str | None = None,
    ) -> Node:
        document = self._document
        if len(document.nodes) >= self._most:
            raise ConfigError(
                f"the journal is too large: at most {self._most:,} nodes can be taken"
            )
        name, n = document.name(), len(tokens)
        if parent is not None and at is None:
            at = parent.end
        document.apply(
            Made(
                id=name, parent=None if parent is None else parent.id, at=at or 0, kind=kind, by=by,
                seed=seed, sampling=dict(self._sampling) if seed else {}, r=document.rev + 1,
            )
        )  # fmt: skip
        unknown = [None] * n
        source = "s" if seed else "p"
        document.apply(
            Tokens(
                id=name, ids=list(tokens), lp=[*unknown], h=[*unknown], rk=[*unknown], src=source * n,
                top=[Raw(b"[]")] * n, r=document.rev + 1,
            )
        )  # fmt: skip
        node = document.nodes[name]
        if seed is not None:
            document.apply(Ended(id=name, reason="stop", r=document.rev + 1))
        return node


def _piece(value: object) -> Piece:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(byte) is int and 0 <= byte < 256 for byte in value):
        return value
    if isinstance(value, dict) and isinstance(value.get("c"), str):
        return {"c": value["c"]}
    raise ValueError(f"the text of a token is {value!r:.40}")
