"""One document and its model: its file, its access, and the steps that operations share."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw
from msgspec.structs import replace

from ..branch import Produced
from ..engine import Request
from ..model.text import n_common
from ..model.thoughts import plan_thinking
from ..request.fields import SamplingFields, TextFields
from ..sampling import Sampler, SamplingParams
from ..sampling.grammar import Grammar
from ..sampling.noise import derive_seed
from ..serve.errors import HttpError
from ..serve.generation import all_texts
from ..serve.page import Page
from ..serve.service import TOO_LONG, Service
from .document import (
    SETTINGS,
    AnyRecord,
    Change,
    Document,
    Ended,
    Head,
    Kept,
    Made,
    Mode,
    Node,
    Settings,
    Tokens,
    unread,
)
from .live import MOST_TOP, Live, PageJob, leaves_cores
from .page import FILES
from .turns import chat_fields, head_of, thinking_at
from .window import Window, prompt_of, window_of

_TOLD = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")  # settings that the page shows
_GRAMMARS = ("grammar", "json_schema", "regex", "choice")
ASIDES = {"memory": "the memory", "authors_note": "the author's note"}
_KINDS = {"json_schema": "the schema", "regex": "the expression", "choice": "the choice"}
_MOST_SENT = 500  # nodes, or tokens, of one action that are sent as events
_BEGINNING, _END = "There was once a king who lived in a", " kitchen."
_SEED, _N, _TOKENS = 7, 3, 12


class BarFields(Settings, kw_only=True):
    """The settings of the bar next to Continue."""

    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class Do(Settings, kw_only=True):
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
    tools: tuple[dict[str, object], ...] = ()
    n: Annotated[int, Meta(ge=1)] = 3
    max_tokens: Annotated[int, Meta(ge=0)] = 24
    resume: bool = False
    token: int | None = None
    bookmark: bool | None = None
    note: str | None = None
    mode: Mode = "text"
    bar: BarFields | None = None


async def text_grammar(settings: Settings) -> Grammar | None:
    """Return the grammar that a text must follow, or None.

    Raises:
        GrammarError, ConfigError: it is invalid, or there are several.
    """
    fields = TextFields(
        grammar=settings.grammar, json_schema=settings.json_schema,
        regex=settings.regex, choices=settings.choice,
    )  # fmt: skip
    return await asyncio.to_thread(fields.text_grammar)


def _ruled_from(record: Made, node: Node) -> int:
    """Return the position from which the grammar of a new node applies.

    A stretch of text that was written under a grammar may be continued in its middle, or a token may be
    picked there, under the same grammar. Then the new node belongs to the stretch: the grammar applies
    from the beginning of the stretch, and a forbidden token is refused before anything is made.
    Everywhere else, also after a complete stretch, the grammar begins with the first generated token.
    In a chat it applies to the whole answer after the thought, whoever wrote it (`thinking_at`).
    """
    is_picked, at = record.kind == "taken", record.at
    place = at if is_picked and at < node.end else at - 1  # the token that is replaced, or the last
    for owner, *_ in node.stretches(place, place + 1):
        rules = [[getattr(made, name) for name in _GRAMMARS] for made in (record, owner.made)]
        since = owner.made.ruled_from
        since = owner.at + owner.n_given if since is None else since
        is_complete = owner.reason == "stop" and at == owner.end
        if any(rules[0]) and rules[0] == rules[1] and since <= at and not is_complete:
            return since
    return at + is_picked


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
        self.example = Example(self)
        self.given: dict[
            str, dict[str, object]
        ] = {}  # answers to actions, by the id of the request
        self._draft = draft
        self._loading = "loading the model"

    def ready(self) -> None:
        """Tell the tabs that the model is loaded. A file of another model becomes read-only."""
        model = self.service.model
        head, journal = self.document.head, self.journal
        if head is None:
            self.add(Head(model=model.name, fingerprint=model.fingerprint))
        elif not model.is_of(head.fingerprint):
            told = f"It was written with the model {head.model}, and this is {model.name}."
            told += " To read it with this model, import it into another document."
            if journal.read_only is None:
                journal.complain(f"{journal.path.name} is read-only. {told}")
                journal.read_only = told
        self.emit("reset", {})

    def model(self) -> dict[str, object]:
        """Return the facts about the model that the page shows."""
        service = self.service_of()
        if service is None:
            return {"model": None, "loading": self._loading}
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
            "max_choices": service.settings.max_choices,
        }  # fmt: skip
        return {"model": fields, "loading": None}

    def opening(self, message: str) -> None:
        """Report how far a model is loaded. Any thread may call this."""
        if message != self._loading:
            self._loading = message
            self.call(self.emit, "set", {"loading": message})

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

    async def made(
        self, do: Do, node: Node, at: int, kind: str, n: int = 1, n_given: int = 0
    ) -> list[Made]:
        """Return the records of ``n`` nodes to generate, each with its own seed.

        Args:
            do: the settings.
            node, at: they continue the first ``at`` tokens of this node's text.
            kind: "sampled", or "taken" after a picked token.
            n, n_given: how many nodes, and tokens that each one begins with.

        Raises:
            HttpError: a setting does not fit the text, or the memory is too long.
        """
        document, n_ctx = self.document, self.service.n_ctx
        seed = secrets.randbits(31) if do.seed in (None, "", "-1") else int(do.seed or 0)
        settings = {name: getattr(do, name) for name in SETTINGS} | {"seed": str(seed)}
        first = Made(id=document.name(), parent=do.node, at=at, kind=kind, by="A", **settings)
        self.check_mode("chat" if document.turns(node, at) else "text", do)
        first.ruled_from = _ruled_from(first, node)
        memory, note = await self.asides(first)
        room = n_ctx - max(1, min(n * do.max_tokens, n_ctx // 4)) - n_given
        fixed = at if await text_grammar(first) is None else min(at, first.ruled_from)
        first.window = self._window(node, at, room, memory, note, fixed)
        return [first] + [
            replace(first, id=document.name(i), seed=str(derive_seed(seed, i))) for i in range(1, n)
        ]

    def _window(
        self, node: Node, end: int, room: int, memory: list[int], note: list[int], fixed: int
    ) -> Window | None:
        ids, turns, model = node.tokens(end), self.document.turns(node, end), self.service.model
        return window_of(
            model, ids, room, memory=len(memory), note=len(note), head=head_of(turns, ids, model),
            fixed=fixed, places=[turn.at for turn in turns if turn.role == "user"],
        )  # fmt: skip

    def check_mode(self, mode: Mode, settings: Settings) -> None:
        """Raise HttpError or UnsupportedError if settings do not fit texts, or chats."""
        if mode == "chat" and settings.thinking is not None:
            plan_thinking(self.service.model, [], settings.thinking)
        mine, others = ("texts", ["thinking"]) if mode == "text" else ("chats", [*ASIDES])
        for name in others:
            if getattr(settings, name) not in (None, ""):
                said = ASIDES.get(name, name)
                raise HttpError(400, f"{said} is not for {mine}", param=name)

    async def asides(self, settings: Settings) -> list[list[int]]:
        """Return the tokens of the memory and of the author's note, each with the end of its line.

        Raises:
            HttpError: they take more than half of the context.
        """
        asides, most = list[list[int]](), self.service.n_ctx // 2
        for name, said in ASIDES.items():
            text: str = getattr(settings, name)
            line = text if text[-1:].isspace() else f"{text}\n"
            asides += [await self.service.tokenize(line, add_special=False) if text.strip() else []]
            if sum(map(len, asides)) > most:
                both = (
                    f"{' and '.join(ASIDES.values())} have"
                    if len(asides[-1]) <= most
                    else f"{said} has"
                )
                told = f"{both} {sum(map(len, asides)):,} tokens; half of the context is {most:,}"
                raise HttpError(400, told, param=name)
        return asides

    def params(self, made: Settings) -> SamplingParams:
        """Return the sampling settings. Raises ConfigError: they are invalid."""
        fields = made.sampling or SamplingFields()
        seed, service = None if made.seed is None else int(made.seed), self.service
        return fields.sampling(service.settings.sampling, service.model).replace(
            seed=seed, logprobs=True
        )

    async def request(self, node: Node, max_tokens: int | None) -> Request:
        """Return the request that continues a node.

        Raises:
            HttpError, LlamaBranchError: the settings are invalid, or the text breaks its grammar.
        """
        record, document, thinking = node.made, self.document, None
        grammar, turns = await text_grammar(record), document.turns(node)
        continues = len(node.ids) - node.n_given
        ruled_from = node.end - continues if record.ruled_from is None else record.ruled_from
        is_answer = turns and turns[-1].role == "assistant"
        if is_answer and (grammar or record.stop or record.thinking is not None):
            # These apply to the answer, not to the thought.
            thinking, ruled_from = thinking_at(document, self.service.model, node, node.end)
            continues = min(continues, node.end - ruled_from)
        if grammar is not None:
            continues = node.end - ruled_from
        tokens = prompt_of(record.window, node.tokens(), *await self.asides(record))
        self.service.check_room(tokens, max_tokens)
        if grammar is not None and record.window is not None and ruled_from < record.window.start:
            message = f"{TOO_LONG}: the context has no room for all that the grammar runs over"
            raise HttpError(400, message)
        if grammar is not None and continues:
            await asyncio.to_thread(self._check_follows, grammar, tokens[-continues:])
        return Request(
            tokens, continues=continues, grammar=grammar, thinking=thinking,
            sampling=self.params(record), max_tokens=max_tokens, stop=record.stop,
            top_logprobs=MOST_TOP,
        )  # fmt: skip

    def _check_follows(self, grammar: Grammar, ids: Sequence[int]) -> None:
        """Raise HttpError if a grammar does not allow a text. Its last token is new."""
        model = self.service.model
        n = Sampler(model, SamplingParams(), grammar).count_allowed(ids)
        if n < len(ids):
            said = _KINDS.get(grammar.kind, "the grammar")
            piece = repr(model.detokenize([ids[n]], special=True))[1:-1]
            where = "here" if n == len(ids) - 1 else "in what is written so far"
            raise HttpError(400, f"{said} does not allow `{piece}` {where}", kind="not_allowed")

    async def following(self, node: Node, end: int) -> Produced | None:
        """Return what could follow the first tokens of a text; it is never an end token."""
        owners, service = node.stretches(end - 1, end), self.service
        memory, note = await self.asides(owners[0][0].made if owners else node.made)
        window = self._window(node, end, service.n_ctx - 1, memory, note, end)
        request = service.next_request(prompt_of(window, node.tokens(end), memory, note), MOST_TOP)
        (text,) = await all_texts(service, [request])
        return next(iter(text.result.emitted), None)

    def make(self, records: Iterable[AnyRecord], cid: str = "") -> list[Node]:
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

    def copied(self, found: Document) -> list[AnyRecord]:
        """Return records that add another document, with new names; one of no model is tokenized."""
        names = {node.id: self.document.name(i) for i, node in enumerate(found.shown())}
        model, records, ends = self.service.model, list[AnyRecord](), dict[str, int]()
        for record in map(copy, found.records()):
            match record:
                case Made():
                    if found.head is None:
                        record.at = 0 if record.parent is None else ends[record.parent]
                    at, record.parent = record.at, record.parent and names[record.parent]
                case Tokens() if found.head is None:
                    tokenize = (
                        partial(model.tokenize, add_special=False) if at else model.prompt_tokens
                    )
                    ids = tokenize(found.text(found.nodes[record.id]), parse_special=False)
                    ends[record.id] = at + len(ids)
                    record = unread(record.id, ids, ("t" if at else "p") * len(ids))
                case Tokens():
                    model.check_tokens(record.named())
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


class Example:
    """The first screen's example: a sentence with its numbers, and three endings by the model.

    It is written once, into a document of its own. It can be stopped, and is then written again.
    """

    def __init__(self, loom: Loom) -> None:
        self._loom = loom
        self._job = PageJob("example", "example", None)
        self._writing: asyncio.Task[Document] | None = None

    async def document(self) -> Document:
        """Return the example: a node for the sentence, then one for each ending.

        Raises:
            HttpError, LlamaBranchError: it was stopped, or does not fit into the context.
        """
        writing = self._writing
        if writing is None or (writing.done() and (writing.cancelled() or writing.exception())):
            self._job = PageJob("example", "example", None)
            writing = self._writing = asyncio.ensure_future(self._write(self._job))
        return await asyncio.shield(writing)

    def stop(self) -> None:
        """Let the user's own text go first."""
        if self._writing is not None and not self._writing.done():
            self._loom.stop([self._job])

    async def _write(self, job: PageJob) -> Document:
        service_of = self._loom.service_of
        loom = Loom(Path(os.devnull), 0, service_of, read_only=True)
        loom.ready()
        ids, start = [await loom.service.tokenize(text) for text in (_BEGINNING + _END, _BEGINNING)]
        records: list[AnyRecord] = [Made(id="n1", kind="prompt"), unread("n1", ids, "p" * len(ids))]
        for i in range(1, 1 + _N):
            records.append(Made(
                id=f"n{1 + i}", parent="n1", at=n_common(ids, start), kind="sampled", by="A",
                seed=str(derive_seed(_SEED, i)), max_tokens=_TOKENS,
            ))  # fmt: skip
        sentence, *endings = loom.make(records)
        await loom.score(job, sentence)
        await loom.generate(job, [(node, await loom.request(node, _TOKENS)) for node in endings])
        if job.is_stopped or job.error is not None:
            raise HttpError(503, "the example was stopped")
        return loom.document
