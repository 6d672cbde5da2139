"""One document and its model: its file, its access, and the steps that operations share."""

from __future__ import annotations

import secrets
from asyncio import to_thread
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from ..engine import Request
from ..request.fields import SamplingFields, TextFields
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from ..sampling.noise import derive_seed
from ..serve.errors import HttpError
from ..serve.page import Page
from ..serve.service import Service
from .document import (
    Change,
    Document,
    Ended,
    Head,
    Kept,
    Made,
    Mode,
    Node,
    Record,
    Seed,
    Tokens,
)
from .example import Example
from .formats import Item
from .live import MOST_TOP, Live, PageJob, leaves_cores
from .page import FILES
from .turns import chat_fields, thinking_at

_TOLD = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")  # settings that the page shows
_MOST_SENT = 500  # nodes, or tokens, of one action that are sent as events


class TextSettings(Struct, kw_only=True):
    """How a text is sampled, where it stops, and which grammar it follows."""

    seed: Seed | None = None
    sampling: SamplingFields | None = None
    stop: list[str] = []
    grammar: str | None = None
    json_schema: dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None


class BarFields(TextSettings, kw_only=True, omit_defaults=True):
    """The settings of the bar next to Continue."""

    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class Do(TextSettings, kw_only=True):
    """The body of POST /loom/do: an operation and its fields."""

    op: str
    cid: Annotated[str, Meta(min_length=1, max_length=64)]
    node: str | None = None
    at: int | None = None
    text: str | None = None
    edit: bool = False
    role: Literal["user", "tool", "assistant", "system"] = "user"
    turn: int | None = None
    system: str | None = None
    tools: list[dict[str, object]] = []
    n: Annotated[int, Meta(ge=1)] = 3
    max_tokens: Annotated[int, Meta(ge=0)] = 24
    resume: bool = False
    token: int | None = None
    job: str | None = None
    bookmark: bool | None = None
    note: str | None = None
    current: bool = False
    set: dict[Mode, BarFields] = {}


async def text_grammar(settings: TextSettings | Made) -> Grammar | None:
    """Return the grammar that a text must follow, or None.

    Raises:
        GrammarError, ConfigError: it is invalid, or there are several.
    """
    fields = TextFields(
        grammar=settings.grammar, json_schema=settings.json_schema,
        regex=settings.regex, choices=settings.choice,
    )  # fmt: skip
    return await to_thread(fields.text_grammar)


class Loom(Live):
    """One document in the browser.

    Args:
        path, service_of, read_only: as for `Live`.
        port: where the server listens.
        draft: the name of the drafter.

    Raises:
        ConfigError: the file was not written by the page.
    """

    def __init__(
        self,
        path: Path,
        port: int,
        service_of: Callable[[], Service | None],
        *,
        read_only: bool = False,
        draft: str = "none",
    ) -> None:
        super().__init__(path, service_of, read_only=read_only)
        self.guard = Page(port, FILES)
        self.example = Example()
        self._draft = draft
        self._loading = {"message": "loading the model"}

    def ready(self) -> None:
        """Tell the tabs that the model is loaded. A file of another model becomes read-only."""
        model = self.service.model
        head, journal = self.document.head, self.journal
        if head is None and journal.read_only is None:
            self.add(Head(model=model.name, fingerprint=model.fingerprint))
        elif head is not None and not model.is_of(head.fingerprint):
            journal.read_only = journal.read_only or (
                f"It was written with the model {head.model}, and this is {model.name}. To read it "
                "with this model, import it into another document."
            )
        self.emit("model", self.model())
        self.tell_file()

    def model(self) -> dict[str, object]:
        """Return the facts about the model that the page shows."""
        service = self.service_of()
        if service is None:
            return {"state": "loading", "model": None, "loading": self._loading}
        ctx, model, sampling = service.ctx, service.model, service.settings.sampling
        usual = SamplingParams().as_dict()
        fields = {
            "name": Path(model.path).stem, "n_ctx": ctx.n_ctx_seq,
            "fingerprint": model.fingerprint, "exact": ctx.capabilities.exact,
            "leaves_cores": leaves_cores(ctx), "draft": self._draft,
            "sampling": {
                name: value for name, value in sampling.as_dict().items()
                if name in _TOLD or value != usual[name]
            },
            "chat": chat_fields(model),
            "eos": None if model.eos is None else model.detokenize([model.eos], special=True),
        }  # fmt: skip
        return {"state": "ready", "model": fields, "loading": None}

    def opening(self, message: str) -> None:
        """Report how far a model is loaded. Any thread may call this."""
        if message != self._loading["message"]:
            self._loading = {"message": message}
            self.call(self.emit, "model", {"loading": self._loading})

    def again(self, cid: str) -> dict[str, object] | None:
        """Return the answer to a request that was already done, even by an earlier process, or None."""
        r, document = self.document.asked.get(cid), self.document
        if r is None:
            return None
        nodes = [n for n in document.shown() if (n.made.a or n.made.r) == r]
        all_fields = [document.node_fields(node) for node in nodes]
        return {"nodes": all_fields, **({"node": all_fields[0]} if all_fields else {})}

    def node(self, name: str | None) -> Node:
        """Return a node. Raises HttpError if it does not exist or was undone."""
        node = self.document.nodes.get(name or "")
        if node is None or node.hidden:
            raise HttpError(404, f"there is no node {str(name)[:40]!r}", param="node")
        return node

    def check_count(self, n: int) -> None:
        """Raise HttpError if this is more texts than one request may ask for."""
        most = self.service.settings.max_choices
        if n > most:
            raise HttpError(400, f"n must be 1 to {most}", param="n")

    def check_writable(self) -> None:
        """Raise HttpError if the document is read-only."""
        if self.journal.read_only is not None:
            message = f"The document is read-only. {self.journal.read_only}"
            raise HttpError(409, message, kind="read_only")

    # -- nodes -----------------------------------------------------------------------------------------

    def made(self, do: Do, i: int, kind: str, at: int) -> Made:
        """Return the record of a node to generate, with its own seed."""
        if do.seed in (None, "", "-1"):
            do.seed = str(secrets.randbits(31))
        seed = int(do.seed or 0)
        return Made(
            id=self.document.name(i), parent=do.node, at=at, kind=kind, by="A",
            seed=str(derive_seed(seed, i) if i else seed), stop=do.stop, max_tokens=do.max_tokens,
            sampling=msgspec.to_builtins(do.sampling or SamplingFields()), grammar=do.grammar,
            json_schema=do.json_schema, regex=do.regex, choice=do.choice,
        )  # fmt: skip

    def params(self, made: Made) -> SamplingParams:
        """Return a node's sampling settings."""
        fields = msgspec.convert(made.sampling, SamplingFields)
        seed, service = None if made.seed is None else int(made.seed), self.service
        return fields.sampling(service.settings.sampling, service.model).replace(
            seed=seed, logprobs=True
        )

    async def request(self, node: Node, max_tokens: int | None) -> Request:
        """Return the request that continues a node.

        Raises:
            HttpError, LlamaBranchError: the settings are invalid.
        """
        record, tokens, thinking = node.made, node.tokens(), None
        grammar = await text_grammar(record)
        continues = len(node.ids) - node.n_given
        if grammar or record.stop:  # these apply to the answer, not to the thought
            thinking, begin = thinking_at(self.document, self.service.model, node, node.end)
            continues = min(continues, node.end - begin)
        self.service.check_room(tokens, max_tokens)
        return Request(
            tokens, continues=continues, grammar=grammar, thinking=thinking,
            sampling=self.params(record), max_tokens=max_tokens, stop=record.stop,
            top_logprobs=MOST_TOP,
        )  # fmt: skip

    def make(self, records: Iterable[Record], cid: str = "") -> list[Node]:
        """Add nodes and their tokens as one action, and return them. ``cid`` is the id of its request."""
        nodes: list[Node] = []
        first = 0
        for record in records:
            if isinstance(record, (Made, Change)):
                record.a, record.cid = first, "" if first else cid
            self.keep(record)
            if isinstance(record, Made):
                first = first or record.r
                nodes.append(self.document.nodes[record.id])
        if len(nodes) > _MOST_SENT:
            self.emit("reset", {})
        else:
            self.send_nodes(*nodes, cid=cid)
            if sum(len(node.ids) for node in nodes) <= _MOST_SENT:
                for node in filter(lambda node: node.ids, nodes):  # so tabs need not ask for them
                    self.emit("tokens", self.columns(node, 0, len(node.ids)))
        self.send_undo()
        return nodes

    def started(self, job: PageJob, nodes: Sequence[Node] = ()) -> dict[str, object]:
        """Return the answer for an operation whose job still runs."""
        return {"job": job.id, "nodes": [self.document.node_fields(node) for node in nodes]}

    def start_scoring(self, node: Node) -> PageJob:
        """Start a job that scores the tokens without numbers in a node's text."""
        return self.start("score", lambda job: self.score(job, node), node)

    def copied(self, found: Document | Sequence[Item]) -> list[Record]:
        """Return records that add the content of another file, with new names."""
        if not isinstance(found, Document):
            return self._from_texts(found)
        names = {node.id: self.document.name(i) for i, node in enumerate(found.shown())}
        records: list[Record] = []
        for record in [*found.records()]:
            match record:
                case Made():
                    record.parent = record.parent and names[record.parent]
                case Tokens():
                    self.service.model.check_tokens(record.ids)
                    records += self.document.learn(self.service.model, record.named())
                case Kept():
                    data = msgspec.json.decode(record.data, type=dict[str, object])
                    data["node"] = names[record.id]
                    record.data = Raw(msgspec.json.encode(data))
                case Ended() | Change(name="bookmark" | "note" | "deleted"):
                    pass
                case _:
                    continue
            record.id = names[record.id]
            records.append(record)
        return records

    def _from_texts(self, items: Sequence[Item]) -> list[Record]:
        model = self.service.model
        records: list[Record] = []
        ends: list[int] = []
        for i, item in enumerate(items):
            name, root = self.document.name(i), item.parent < 0
            at, parent = (0, None) if root else (ends[item.parent], self.document.name(item.parent))
            if root:
                ids = model.prompt_tokens(item.text, parse_special=False)
            else:
                ids = model.tokenize(item.text, add_special=False, parse_special=False)
            records.append(Made(id=name, parent=parent, at=at, kind="imported", by=item.by))
            records += self.plain(name, ids, "p" if root else "t")
            ends.append(at + len(ids))
            if item.bookmark:
                records.append(Change(id=name, name="bookmark"))
            if item.note:
                records.append(Change(id=name, name="note", value=item.note))
        return records
