"""The document: nodes, and the records that make and change them.

Every change of a document is a record. Only `Document.apply` carries records out: new ones, and
those read from a file. The tokens of a node never change; an undone node is hidden. Positions count
the tokens of a node's whole text, from its root on.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from ..model.tree import TextNode
from ..request.fields import SamplingFields
from .window import Window

Number = float | None
Piece = str | list[int] | dict[str, str]  # text; bytes that are not text; a control token's name
Seed = Annotated[str, Meta(pattern="^-?[0-9]{1,20}$")]
Mode = Literal["text", "chat"]
# At most so many tokens; None = as the template does.
Thinking = bool | Annotated[int, Meta(ge=0)] | None
_GENERATED = frozenset("sfdbc")
# Characters of a node's text: in general, in a list of more than _MANY nodes.
_SHOWN, _LISTED, _MANY = 40, 20, 2000


class Record(Struct, tag_field="op", omit_defaults=True, kw_only=True):
    """A line of the journal: its revision, its time in ms, and the id of the request for its action."""

    r: int = 0
    t: int = 0
    cid: str = ""


class Settings(Struct, kw_only=True, omit_defaults=True):
    """How a text is sampled, where it stops, which grammar it follows, what else the model sees.

    ``thinking`` is for chats, ``memory`` and ``authors_note`` are for texts.
    """

    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    seed: Seed | None = None
    sampling: SamplingFields | None = None
    stop: list[Annotated[str, Meta(min_length=1)]] = []
    grammar: str | None = None
    json_schema: dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    thinking: Thinking = None
    memory: str = ""
    authors_note: str = ""


SETTINGS = Settings.__struct_fields__
_FACTS = ("parent", "at", "kind", "by", "window", *SETTINGS)


class Head(Record, tag="head", kw_only=True):
    """The first line: the model that the numbers come from."""

    version: int = 1
    model: str = ""
    fingerprint: str = ""


class Turn(Struct, omit_defaults=True):
    """A turn of a conversation, by positions in the text.

    The template's own tokens come first, from ``at`` on. The message is from ``begin`` to ``end``, where
    None is the end of the text. ``text`` is the message as it was typed; None = the text of its tokens.
    """

    role: str
    at: int
    begin: int
    end: int | None = None
    text: str | None = None


class Made(Settings, tag_field="op", tag="node", kw_only=True):
    """A node, and the settings that it was generated with.

    ``r``, ``t`` and ``cid`` are as in every record; ``a`` is the revision of the action that made it, and
    0 = this record begins an action. ``turns`` are the turns of a conversation that begin or end in its
    tokens. The node that begins the conversation also has ``tools`` and ``variables`` for the chat
    template. The grammar of a generated node holds from the position ``ruled_from`` on, and ``window``
    says which part of the text was in the context; None = the whole text.
    """

    r: int = 0
    t: int = 0
    cid: str = ""
    id: str
    parent: str | None = None
    at: int = 0
    kind: str = "typed"
    by: str = "user"
    a: int = 0
    turns: list[Turn] = []
    tools: list[dict[str, object]] = []
    variables: dict[str, object] = {}
    window: Window | None = None
    ruled_from: int | None = None


class Tokens(Record, tag="tok", kw_only=True):
    """Tokens of a node, from its own token number ``at`` on: new tokens, or new numbers of known ones.

    ``al`` is how many tokens the grammar allowed at each place; [] = no grammar restricted any.
    """

    id: str = ""
    at: int = 0
    ids: list[int]
    lp: list[Number]
    h: list[Number]
    rk: list[int | None]
    src: str
    top: list[Raw]
    al: list[int | None] = []

    def named(self) -> list[int]:
        """Return all tokens that it names, also as alternatives."""
        return [*self.ids, *(token for raw in self.top for token, _ in decoded(raw))]


def unread(name: str, ids: Sequence[int], src: str) -> Tokens:
    """Return the tokens of a node without numbers; ``src`` has a letter for each."""
    none = [None] * len(ids)
    return Tokens(
        id=name, ids=[*ids], lp=[*none], h=[*none], rk=[*none], src=src, top=[Raw(b"[]")] * len(ids)
    )


class Pieces(Record, tag="voc", kw_only=True):
    """The texts of tokens, by id, so that a file can be read without its model."""

    p: dict[int, Piece]


class Ended(Record, tag="end", kw_only=True):
    """How the generation of a node ended.

    ``read`` prompt tokens were processed, ``cached`` were not; ``rate`` is in tokens per second.
    """

    id: str
    reason: str
    read: int = 0
    cached: int = 0
    rate: float | None = None


class Kept(Record, tag="keep", kw_only=True):
    """A round of speculation of a node, as the page gets it.

    Version 0.4 also kept comparisons and searches. Those are read and dropped.
    """

    id: str
    name: Literal["rounds", "compare", "searches"]
    data: Raw


class Change(Record, tag="set", kw_only=True):
    """A bookmark, a note or a deletion.

    Two names are not actions and cannot be undone: "current", the node that is shown, and "hidden", a
    node that was stopped before its first token.
    """

    id: str
    name: Literal["bookmark", "note", "deleted", "current", "hidden"]
    value: bool | str = True
    a: int = 0


class Bar(Record, tag="bar", kw_only=True):
    """The sampling settings of texts or of chats. Changing them is not an action."""

    mode: Mode
    fields: dict[str, object]


class Undo(Record, tag="undo", kw_only=True):
    """Undoes an action, or redoes it."""

    of: int
    again: bool = False


AnyRecord = Head | Made | Tokens | Pieces | Ended | Kept | Change | Bar | Undo


@dataclass(slots=True, eq=False)
class Node(TextNode):
    """A text: the first ``at`` tokens of its parent's text, then its own tokens."""

    made: Made
    parent: Node | None
    ids: list[int] = field(default_factory=list)
    lp: list[Number] = field(default_factory=list)
    h: list[Number] = field(default_factory=list)
    rk: list[int | None] = field(default_factory=list)
    src: list[str] = field(default_factory=list)
    top: list[Raw] = field(default_factory=list)
    al: list[int | None] = field(default_factory=list)
    ended: Ended | None = None
    hidden: bool = True  # until its record is applied
    bookmark: bool = False
    note: str = ""
    deleted: bool = False
    job: str | None = None
    rounds: list[Raw] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its name."""
        return self.made.id

    @property
    def at(self) -> int:
        """How many tokens its text takes from the beginning of its parent's."""
        return self.made.at

    @property
    def end(self) -> int:
        """How many tokens its text has."""
        return self.at + len(self.ids)

    @property
    def reason(self) -> str | None:
        """How its generation ended, "running" or "interrupted"; None if nothing was generated."""
        if self.ended is not None:
            return self.ended.reason
        if self.made.seed is None:
            return None
        return "running" if self.job else "interrupted"

    @property
    def n_given(self) -> int:
        """How many of its own tokens were not generated. They come first."""
        return next((i for i, s in enumerate(self.src) if s in _GENERATED), len(self.src))

    def stretches(self, start: int = 0, end: int | None = None) -> list[tuple[Node, int, int]]:
        """Return the nodes that own the tokens from ``start`` to ``end``, with ranges of own tokens."""
        stretches, end = [], self.end if end is None else min(end, self.end)
        for owner in self.ancestors():
            if end > max(owner.at, start):
                stretches.append((owner, max(0, start - owner.at), end - owner.at))
            end = min(end, owner.at)
            if end <= start:
                break
        return stretches[::-1]

    def tokens(self, end: int | None = None, start: int = 0) -> list[int]:
        """Return the ids of its text, or of its tokens from ``start`` to ``end``."""
        return [t for node, a, b in self.stretches(start, end) for t in node.ids[a:b]]

    def record(self, a: int, b: int | None = None) -> Tokens:
        """Return its own tokens from ``a`` to ``b`` as a record."""
        cut = slice(a, b)
        al = self.al[cut]
        return Tokens(
            id=self.id, at=a, ids=self.ids[cut], lp=self.lp[cut], h=self.h[cut], rk=self.rk[cut],
            src="".join(self.src[cut]), top=self.top[cut], al=al if any(al) else [],
        )  # fmt: skip


@dataclass(slots=True)
class Action:
    """A change that can be undone: (node, attribute, old value, new value)."""

    r: int
    op: str
    changes: list[tuple[Node, str, object, object]] = field(default_factory=list)


class Document:
    """All nodes, the actions that can be undone and redone, and the newest revision."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.nodes: dict[str, Node] = {}
        self.pieces: dict[int, Piece] = {}
        self.done: list[Action] = []
        self.undone: list[Action] = []
        self.current: str | None = None
        self.rev = 0
        self.asked: dict[str, int] = {}  # revisions of actions, by the ids of their requests
        self.bars: dict[Mode, dict[str, object]] = {}
        self._n_made = 0

    def apply(self, record: AnyRecord) -> None:
        """Carry out a record.

        Raises:
            LookupError, ValueError: it does not fit the document; nothing has changed.
        """
        match record:
            case Made():
                parent = None if record.parent is None else self.nodes[record.parent]
                if record.id in self.nodes:
                    raise ValueError(f"two nodes are called `{record.id}`")
                if not 0 <= record.at <= (n := parent.end if parent else 0):
                    above = f"`{record.parent}` has {n} tokens" if parent else "it has no parent"
                    raise ValueError(f"`{record.id}` cannot begin at {record.at}: {above}")
                node = self.nodes[record.id] = Node(record, parent)
                number = record.id[1:]
                self._n_made = max(self._n_made + 1, int(number) if number.isdecimal() else 0)
                self._act(record.a or record.r, record.kind, node, "hidden", False)
            case Tokens():
                self.put(self.nodes[record.id], record)
            case Pieces():
                self.pieces.update(record.p)
            case Ended():
                self.nodes[record.id].ended = record
            case Kept():
                if record.name == "rounds":
                    self.nodes[record.id].rounds.append(record.data)
            case Change(name="current"):
                self.current = self.nodes[record.id].id
            case Change(name="hidden"):
                self._drop(self.nodes[record.id])
            case Change():
                node, op = self.nodes[record.id], "delete" if record.name == "deleted" else "set"
                self._act(record.a or record.r, op, node, record.name, record.value)
            case Undo():
                source, other = self.done, self.undone
                if record.again:
                    source, other = other, source
                if not source or source[-1].r != record.of:
                    raise ValueError(f"there is no action {record.of} to undo or redo")
                action = source.pop()
                other.append(action)
                for node, name, old, new in action.changes[:: 1 if record.again else -1]:
                    setattr(node, name, new if record.again else old)
            case Bar():
                self.bars[record.mode] = record.fields
            case Head():
                self.head = record
            case _:
                raise ValueError("an unknown record")
        self.rev = max(self.rev, record.r)
        if record.cid:
            self.asked[record.cid] = record.r

    def _act(self, r: int, op: str, node: Node, name: str, value: object) -> None:
        if not self.done or self.done[-1].r != r:
            self.done.append(Action(r, op))
            self.undone.clear()
        self.done[-1].changes.append((node, name, getattr(node, name), value))
        setattr(node, name, value)

    def _drop(self, node: Node) -> None:
        """Hide a node for good: undo and redo do not bring it back."""
        node.hidden = True
        for actions in (self.done, self.undone):
            for action in actions:
                action.changes = [change for change in action.changes if change[0] is not node]
            actions[:] = [action for action in actions if action.changes]

    @staticmethod
    def put(node: Node, new: Tokens) -> None:
        """Put tokens into a node: append them, or replace known ones."""
        # The ids come last, so that no thread reads an id whose numbers are missing.
        columns, n = ("al", "lp", "h", "rk", "src", "top", "ids"), len(new.ids)
        is_whole = all(len(getattr(new, name)) == n for name in columns[not new.al :])
        if not 0 <= new.at <= len(node.ids) or not is_whole:
            raise ValueError(f"the tokens of `{node.id}` do not fit")
        known = [*node.al[new.at : new.at + n], *[None] * n][:n]
        for name in columns:
            getattr(node, name)[new.at : new.at + n] = getattr(new, name) or known

    def name(self, i: int = 0) -> str:
        """Return the name of the next node, or of the ``i``-th node after it."""
        return f"n{self._n_made + 1 + i}"

    def shown(self) -> Iterator[Node]:
        """Yield the nodes that are not undone, parents first."""
        return (node for node in [*self.nodes.values()] if not node.hidden)

    def records(self) -> Iterator[AnyRecord]:
        """Yield records that make the shown nodes again, in the order of their actions."""
        if self.head is not None:
            yield self.head
        yield Pieces(p=self.pieces)
        for node in self.shown():
            yield node.made
            if node.ids:
                yield node.record(0)
            yield from (Kept(id=node.id, name="rounds", data=data) for data in node.rounds)
            if node.ended is not None:
                yield node.ended
        for action in self.done:
            for node, name, _, value in action.changes:
                if name != "hidden" and not node.hidden:
                    change = {"id": node.id, "name": name, "value": value, "a": action.r}
                    yield msgspec.convert(change | {"r": action.r}, Change)
        for mode, fields in self.bars.items():
            yield Bar(mode=mode, fields=fields)
        if self.current is not None and not self.nodes[self.current].hidden:
            yield Change(id=self.current, name="current")

    def bytes_of(self, ids: Iterable[int], *, names: bool = False) -> bytes:
        """Return the text of tokens as UTF-8. With ``names``, control tokens are written by name."""
        return b"".join(_bytes(self.pieces[token], names=names) for token in ids)

    def texts(self, ids: Iterable[int], *, names: bool = False) -> list[str]:
        """Return the texts of consecutive tokens; a character that several share is in the last one."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self.bytes_of([token], names=names)) for token in ids]

    def written(self, ids: Iterable[int]) -> str:
        """Return the text of tokens with the names of control tokens, as the page shows it."""
        return self.bytes_of(ids, names=True).decode("utf-8", "replace")

    def turns(self, node: Node, end: int | None = None) -> list[Turn]:
        """Return the turns of a node's text, or of its first ``end`` tokens; the last may be cut short.

        A node's own turns replace its parents' turns from their position on. A node that forks inside
        a message continues that message.
        """
        turns: list[Turn] = []
        for owner, _, b in node.stretches(0, end):
            cut = owner.at + b
            own = [turn for turn in owner.made.turns if turn.at < cut]
            if own:
                turns = [turn for turn in turns if turn.at < own[0].at] + own
            if turns and (turns[-1].end or 0) > cut:
                turns[-1] = Turn(turns[-1].role, turns[-1].at, turns[-1].begin)
        n = node.end if end is None else end
        for i, turn in enumerate(turns):
            limit = turns[i + 1].at if i + 1 < len(turns) else n
            if turn.end is None or turn.end > limit:
                turns[i] = Turn(turn.role, turn.at, min(turn.begin, limit), limit)
        return turns

    def text(self, node: Node, *, own: bool = True) -> str:
        """Return the text of a node's own tokens, or with ``own=False`` its whole text."""
        return self.bytes_of(node.ids if own else node.tokens()).decode("utf-8", "replace")

    # -- as the page gets it ---------------------------------------------------------------------------

    def counts(self) -> dict[str, object]:
        """Return how many actions can be undone and redone."""
        return {"undo": len(self.done), "redo": len(self.undone)}

    def node_fields(self, node: Node) -> dict[str, object]:
        """Return everything about a node except its tokens.

        ``lp`` and ``h`` are the means over its own tokens.
        """
        record = node.made
        lp, h = ([x for x in column if x is not None] for column in (node.lp, node.h))
        return {
            **{name: getattr(record, name) for name in _FACTS},
            **{name: getattr(node.ended, name, None) for name in ("read", "cached", "rate")},
            "id": node.id, "n": len(node.ids), "reason": node.reason,
            "deleted": node.deleted, "bookmark": node.bookmark,
            "text": self.bytes_of(node.ids[: 4 * _SHOWN]).decode("utf-8", "replace")[:_SHOWN],
            "note": node.note, "hidden": node.hidden,
            "turns": [(turn.role, turn.at, turn.begin, turn.end) for turn in record.turns],
            "lp": round(sum(lp) / len(lp), 2) if lp else None,
            "h": round(sum(h) / len(h), 2) if h else None, "known": len(lp),
        }  # fmt: skip

    def listed(self) -> dict[str, list[object]]:
        """Return all nodes in columns, with the fields that every node has."""
        names = ["id", "parent", "at", "n", "kind", "by", "reason", "deleted", "bookmark", "text"]
        names += ["lp", "h", "known", "note", "turns"]
        nodes = [self.node_fields(node) for node in self.shown()]
        columns = {name: [fields[name] for fields in nodes] for name in names}
        if len(nodes) > _MANY:
            columns["text"] = [str(text)[:_LISTED] for text in columns["text"]]
        return columns

    def columns(self, node: Node, a: int, b: int, *, top: bool) -> dict[str, object]:
        """Return own tokens of a node from ``a`` to ``b``."""
        cut, pieces = slice(a, b), self.pieces
        columns: dict[str, object] = {
            n: getattr(node, n)[cut] for n in ("ids", "lp", "h", "rk", "al")
        }
        columns |= {"node": node.id, "at": node.at + a, "src": "".join(node.src[cut])}
        columns["text"] = [pieces[token] for token in node.ids[cut]]
        if top:
            tops = map(decoded, node.top[cut])
            columns["top"] = [[(t, p, pieces[t]) for t, p in alternatives] for alternatives in tops]
        return columns


def _bytes(piece: Piece, *, names: bool) -> bytes:
    if isinstance(piece, str):
        return piece.encode()
    if isinstance(piece, list):
        return bytes(piece)
    return piece["c"].encode() if names else b""


def short(x: float) -> Number:
    """Return a number as its shortest float32 decimal; None for NaN and infinity."""
    return float(str(np.float32(x))) if math.isfinite(x) else None


_top = msgspec.json.Decoder(list[tuple[int, Number]])


def decoded(raw: Raw) -> list[tuple[int, Number]]:
    """Return the most probable tokens at a position with their log-probabilities."""
    return _top.decode(raw)
