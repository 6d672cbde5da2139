"""What POST /loom/do does. Each operation gets its fields, a node, and a position in its text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple

import msgspec

from ..model.text import n_common
from ..serve.errors import HttpError
from .document import AnyRecord, Bar, Change, Document, Made, Node, Turn, Undo, decoded, unread
from .live import PageJob
from .loom import BarFields, Do, Loom, text_grammar
from .turns import Talk, Written, beginning, common, messages_of, opened, write

_MOST_ANSWERS = 1000  # answers that are kept, for requests that come again
Answer = dict[str, object]


class _Operation(NamedTuple):
    run: Callable[[Loom, Do, Node, int], Coroutine[object, object, Answer]]
    needs_node: bool = False
    needs_file: bool = True  # the file must be writable


async def perform(loom: Loom, do: Do) -> Answer:
    """Return the answer to an operation. With an ``error``, it was done but is not saved yet.

    An action that was done before is not done again: it gets its first answer, or from an earlier
    process the nodes that it made.

    Raises:
        HttpError, LlamaBranchError: it was refused, and nothing was done.
    """
    operation = _OPERATIONS.get(do.op)
    if operation is None:
        raise HttpError(400, f"op must be one of {', '.join(_OPERATIONS)}", param="op")
    if not operation.needs_file:
        return await _run(loom, do, operation)
    async with loom.acting:
        answer = loom.given.get(do.cid, loom.again(do.cid))
        if answer is None:
            loom.check_writable()
            answer = loom.given[do.cid] = await _run(loom, do, operation)
            if len(loom.given) > _MOST_ANSWERS:
                del loom.given[next(iter(loom.given))]
    return answer | await loom.confirm()


async def _run(loom: Loom, do: Do, operation: _Operation) -> Answer:
    if do.node is None and operation.needs_node:
        raise HttpError(400, f"{do.op} needs a node", param="node")
    # Without a node: a new root.
    node = Node(Made(id=""), None) if do.node is None else loom.node(do.node)
    at = node.end if do.at is None else do.at
    least = int(do.node is not None and not do.edit)  # an edit of all is a new root
    if not least <= at <= node.end:
        raise HttpError(400, f"at must be {least} to {node.end}, not {at}", param="at")
    if _is_deleted(node, at) and do.op in ("type", "chat", "continue", "fork"):  # in another tab
        raise HttpError(409, "this branch was deleted; undo brings it back", param="node")
    return await operation.run(loom, do, node, at)


def _is_deleted(node: Node, at: int | None = None) -> bool:
    """Return whether a node's text, or the first ``at`` tokens of it, was deleted."""
    owners = [owner for owner, *_ in node.stretches(0, at)]
    return any(owner.deleted for owner in (owners if at is not None else [*owners, node]))


# -- texts -----------------------------------------------------------------------------------------


async def _type(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    loom.example.stop()
    document, text = loom.document, do.text or ""
    is_chat, old = bool(document.turns(node, at)), list[int]()
    if do.edit:
        old = node.tokens(start=at)
        n, text = await asyncio.to_thread(_same_tokens, document, old, text, special=not is_chat)
        at, old = at + n, old[n:]
        if not text and not old:
            return {"node": document.node_fields(node), "same": True}
    ids = await loom.service.tokenize(text, add_special=not at, parse_special=not is_chat)
    if not text and not document.bytes_of(node.tokens(at)):
        raise HttpError(400, "the text is empty", param="text")
    parent = do.node if at else None
    kind, src = ("typed", "t") if parent else ("prompt", "p")
    # Tokens after an edit that are as before keep their sources.
    n_same = n_common(ids[::-1], old[::-1])
    kept = [owner.src[i] for owner, a, b in node.stretches(node.end - n_same) for i in range(a, b)]
    record = Made(id=document.name(), parent=parent, at=at, kind=kind)
    return _new_text(loom, do, record, ids, src * (len(ids) - n_same) + "".join(kept))


def _new_text(loom: Loom, do: Do, record: Made, ids: Sequence[int], src: str) -> Answer:
    """Make a node of a text that the user wrote, and score it."""
    (new,) = loom.make([record, unread(record.id, ids, src)], do.cid)
    job = loom.start_scoring(new)
    return {"node": loom.document.node_fields(new), "same": False, "job": job.id}


async def _example(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    """Put the first screen's example into the document."""
    nodes = loom.make(loom.copied(await loom.example.document()), do.cid)
    fields = [loom.document.node_fields(new) for new in nodes]
    return {"node": fields[0], "nodes": fields}


def _same_tokens(
    document: Document, ids: list[int], text: str, *, special: bool
) -> tuple[int, str]:
    """Return how many of the tokens an edited text keeps, and the rest of the text.

    The kept tokens are whole characters. With ``special``, the name of a control token in the text
    counts as that token.
    """
    words = [document.bytes_of([token], names=special) or b"\xff" for token in ids]
    n, n_characters = common(words, [character.encode() for character in text])[-1]
    return n, text[n_characters:]


async def _score(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    """Score the tokens without numbers in a node's text."""
    return loom.started(loom.start_scoring(node))


async def _chat(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    """Begin a conversation, add a turn, or replace a turn; an answer can follow."""
    loom.example.stop()
    document, model = loom.document, loom.service.model
    if model.chat_template is None:
        raise HttpError(409, "the model has no chat template: begin a text instead")
    turns, after = document.turns(node, at) if do.node is not None else [], list[Turn]()
    if do.node is not None and not turns:
        raise HttpError(409, "this text is not a conversation", param="node")
    if do.turn is not None:
        if not 0 <= do.turn < len(turns):
            raise HttpError(400, f"turn must be 0 to {len(turns) - 1}", param="turn")
        do.role = turns[do.turn].role  # type: ignore[assignment]  # one of these
        # After an edited system message the same question is asked again.
        after = turns[do.turn + 1 : do.turn + 2] if do.role == "system" else []
        turns = turns[: do.turn]
    elif do.role == "assistant":
        raise HttpError(400, "an answer can only be edited: give its turn", param="role")
    loom.check_mode("chat", do)
    root = beginning(node)
    record = Made(id=document.name(), kind="chat", variables=root.variables, thinking=do.thinking)
    answer = (do.text or "") if do.role == "assistant" else None

    def written() -> Written:
        tools = root.tools or do.tools
        if do.node is None:
            record.variables = loom.service.dates()  # a conversation keeps its first date
        messages = messages_of(document, model, node, turns)
        if do.node is None and do.system:
            messages.append({"role": "system", "content": do.system})
        if answer is None and (do.text is not None or do.role != "user"):
            message: dict[str, object] = {"role": do.role, "content": do.text or ""}
            calls = messages[-1].get("tool_calls") if messages else None
            if do.role == "tool" and isinstance(calls, list):
                message["tool_call_id"] = calls[0]["id"]
            messages.append(message)
        messages += messages_of(document, model, node, after)
        talk = Talk(messages, tools, record.variables).thinking(model, do.thinking)
        return write(model, talk, node.tokens(at if do.turn is None else None), turns, answer)

    is_asked = do.node is None or (do.role == "user" and do.text is not None)
    if is_asked and not (do.text or "").strip():
        raise HttpError(400, "the message is empty", param="text")
    new = await asyncio.to_thread(written)
    if do.node is not None and not new.ids:  # nothing changed
        return {"node": document.node_fields(node), "same": True, "at": new.at}
    record.parent, record.at, record.turns = do.node if new.at else None, new.at, new.turns
    if record.parent is None:
        record.tools = [*(root.tools or do.tools)]
    return _new_text(loom, do, record, new.ids, ("t" if record.parent else "p") * len(new.ids))


async def _bar(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    """Keep the settings of texts or of chats. Invalid ones are refused."""
    bar = do.bar or BarFields()
    loom.params(bar)
    loom.check_count(bar.n or 1)
    loom.check_mode(do.mode, bar)
    await loom.asides(bar)
    await text_grammar(bar)
    loom.add(Bar(mode=do.mode, fields=msgspec.to_builtins(bar)))
    loom.emit("set", {"bars": loom.document.bars})
    return {"bars": loom.document.bars}


async def _continue(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    if do.resume:
        if node.reason != "interrupted":
            raise HttpError(409, "only an interrupted text can be resumed", param="node")
        most = node.made.max_tokens or do.max_tokens
        return _begin(loom, do, [node], most - (len(node.ids) - node.n_given))
    loom.check_count(do.n)
    model = loom.service.model
    opening = await asyncio.to_thread(opened, loom.document, model, node, at, do.thinking)
    made = await loom.made(do, node, opening.at, "sampled", do.n, len(opening.ids))
    records, src = list[AnyRecord](), "t" * len(opening.ids)
    loom.learn(opening.ids)
    for record in made:
        record.turns = opening.turns if opening.at < at or opening.ids else []
        records.append(record)
        if opening.ids:
            records.append(unread(record.id, opening.ids, src))
    await loom.request(Node(made[0], node, ids=opening.ids, src=[*src]), do.max_tokens)
    return _begin(loom, do, loom.make(records, do.cid), do.max_tokens)


def _begin(loom: Loom, do: Do, nodes: list[Node], max_tokens: int) -> Answer:
    async def work(job: PageJob) -> None:
        most = max(0, max_tokens)
        await loom.generate(job, [(node, await loom.request(node, most)) for node in nodes])

    for node in nodes:
        node.ended = None
    return loom.started(loom.start(do.op, work, nodes[0].parent, nodes), nodes)


async def _fork(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    model = loom.service.model
    if do.token is None:
        raise HttpError(400, "fork needs a token", param="token")
    model.check_tokens([do.token])
    (record,) = await loom.made(do, node, at, "taken", n_given=1)
    loom.learn([do.token])
    request = await loom.request(Node(record, node, ids=[do.token], src=["k"]), do.max_tokens)
    is_ruled = request.grammar is not None and request.continues > 0
    taken = unread(record.id, [do.token], "k")
    for owner, i, _ in node.stretches(at, at + 1):  # known numbers of this position
        taken.al = [owner.al[i]] if is_ruled and owner.al[i] else []
        for rank, (token, lp) in enumerate(decoded(owner.top[i]), 1):
            if token == do.token:
                taken.lp, taken.rk, taken.h, taken.top = [lp], [rank], [owner.h[i]], [owner.top[i]]
    (new,) = loom.make([record, taken], do.cid)
    if new.lp[0] is None:
        loom.start_scoring(new)
    is_end = is_ruled and model.is_eog(do.token)
    return _begin(loom, do, [new], 0 if is_end else do.max_tokens)


async def _stop(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    jobs = [*loom.jobs.values()]
    loom.stop(jobs)
    return {"stopped": [job.id for job in jobs]}


# -- marks, undo, the file -------------------------------------------------------------------------


async def _show(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    """Note which node is shown: a reload and an export begin there."""
    if loom.journal.read_only is None:
        loom.add(Change(id=node.id, name="current"))
    loom.document.current = node.id
    loom.emit("set", {"current": node.id})
    return {}


async def _set(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    records: list[AnyRecord] = []
    if do.bookmark is not None:
        records.append(Change(id=node.id, name="bookmark", value=do.bookmark))
    if do.note is not None:
        records.append(Change(id=node.id, name="note", value=do.note))
    if do.op == "delete":
        records.append(Change(id=node.id, name="deleted"))
    loom.make(records, do.cid)
    loom.send_nodes(node)
    if do.op == "delete":  # nobody would see the text
        jobs = [*loom.jobs.values()]
        loom.stop(job for job in jobs if job.nodes and all(map(_is_deleted, job.nodes)))
    return {}


async def _undo(loom: Loom, do: Do, node: Node, at: int) -> Answer:
    document, again = loom.document, do.op == "redo"
    actions = document.undone if again else document.done
    if not actions:
        raise HttpError(409, f"there is nothing to {do.op}")
    action = actions[-1]
    touched = [*dict.fromkeys(node for node, *_ in action.changes)]
    loom.stop({loom.jobs[node.job] for node in touched if node.job in loom.jobs})
    loom.add(Undo(of=action.r, again=again, cid=do.cid))
    loom.send_nodes(*touched)
    loom.send_undo()
    done = {
        "op": action.op, "nodes": [node.id for node in touched],
        "node": document.node_fields(touched[0]),
    }  # fmt: skip
    return {"redone" if again else "undone": done, **document.counts()}


_OPERATIONS = {
    "type": _Operation(_type), "chat": _Operation(_chat), "bar": _Operation(_bar),
    "example": _Operation(_example),
    "continue": _Operation(_continue, needs_node=True),
    "fork": _Operation(_fork, needs_node=True),
    "score": _Operation(_score, needs_node=True, needs_file=False),
    "stop": _Operation(_stop, needs_file=False),
    "show": _Operation(_show, needs_node=True, needs_file=False),
    "set": _Operation(_set, needs_node=True), "delete": _Operation(_set, needs_node=True),
    "undo": _Operation(_undo), "redo": _Operation(_undo),
}  # fmt: skip
