"""A page on a thread of this process, over the bundled model, and a script that calls it."""

from __future__ import annotations

import itertools
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import toys
from serving import TARGET, WAIT_S, Command, Serving, bundled_engine, httpx

import llamabranch as lb
from llamabranch.loom import Loom, front_of

if TYPE_CHECKING:
    from typing_extensions import Self

DRAFT = Path(lb.__file__).parent / "data" / "tale-draft-q8_0.gguf"
# A template of today's kind: thoughts, calls, control tokens; earlier thoughts are left out.
CHAT = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{ m.content or '' }}"
    '{%- for c in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", '
    "\"arguments\": ' + (c.function.arguments | tojson) + '}\n</tool_call>' }}{%- endfor %}"
    "{%- else %}{{ m.content }}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def chat_model(folder: Path) -> Path:
    """Write the bundled target with a chat template and its control tokens."""
    return toys.write_chat(TARGET, folder / "chat.gguf", CHAT, *CONTROL)


def events_of(answer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and the data of the events of a stream."""
    name = ""
    for line in answer.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def drafted() -> lb.Drafter:
    """Return a drafter over the bundled draft model."""
    return lb.ModelDrafter(lb.load(DRAFT, n_ctx=1024, n_seq_max=12, n_threads=1))


class Opened(Command):
    """``llamabranch open`` in a process of its own; its file is in ``folder``."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        file = folder / "tale.loom.jsonl"
        more = ("--no-browser", "--file", file, *arguments)
        super().__init__("open", *more)
        self.link = str(self.said["link"])
        self.cookies: list[Any] = []  # of the first browser that came by the link
        self.requests: list[str] = []
        key = {"Authorization": f"Bearer {self.said['key']}"}
        self.api = httpx.Client(base_url=self.url, headers=key, timeout=WAIT_S)

    def do(self, op: str, cid: str, **fields: object) -> Any:
        """Do an operation, as soon as the model is loaded; return its answer."""
        for _ in range(600):
            answer = self.api.post("/loom/do", json={"op": op, "cid": cid, **fields})
            if answer.status_code != 503:
                assert answer.status_code in (200, 202), answer.text
                return answer.json()
            sleep(0.1)
        raise AssertionError("the model was not loaded in a minute")

    def __exit__(self, *_: object) -> None:
        self.api.close()
        super().__exit__()


class Paged(Serving):
    """A page over a file in ``folder``; leaving the block ends it and checks what is left.

    Args:
        folder: where the file is.
        drafter: makes what drafts.
        waits: begin once the model is there; else it is loaded when ``may_load`` is set.
        model, n_ctx: what writes, and the size of its context.
    """

    def __init__(
        self,
        folder: Path,
        *,
        drafter: Callable[[], lb.Drafter | None] = lambda: None,
        read_only: bool = False,
        waits: bool = True,
        model: Path = TARGET,
        n_ctx: int = 1024,
    ) -> None:
        self.may_load = threading.Event()
        self.drafter: lb.Drafter | None = None
        self._waits = waits
        own: Any = {} if model == TARGET else {"chat_template": None}

        def made() -> lb.Drafter | None:
            self.drafter = drafter()
            return self.drafter

        def open_engine() -> lb.AsyncEngine:
            self.may_load.wait(WAIT_S)
            config = lb.SpeculativeConfig(draft_k=4)
            own["n_ctx"] = n_ctx
            return bundled_engine(n_seq_max=12, drafter=made, config=config, model=model, **own)

        super().__init__(open_engine)
        self.loom = Loom(
            folder / "tale.loom.jsonl", self.server.port, lambda: self.server.service,
            read_only=read_only,
        )  # fmt: skip
        self.server.front = front_of(self.loom)
        self.api = self.client(headers={"Authorization": f"Bearer {self.loom.guard.key}"})
        self.events: list[tuple[str, Any]] = []
        self._news = threading.Condition()
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex[:8]

    def loaded(self, *_: object) -> None:
        """Note that the model is there, and tell the page."""
        self.loom.ready()
        super().loaded()

    def __enter__(self) -> Self:
        if not self._waits:
            self.thread.start()
            return self
        self.may_load.set()
        super().__enter__()
        threading.Thread(target=self._listen, daemon=True).start()
        self.wait(lambda: bool(self.events))
        return self

    def __exit__(self, *raised: Any) -> None:
        self.may_load.set()
        self.wait_ready()
        super().__exit__(*raised)
        self.api.close()
        for ctx in () if self.drafter is None else self.drafter.contexts:
            ctx.close()

    def _listen(self) -> None:
        try:
            with self.api.stream("GET", "/loom/events", timeout=None) as answer:
                for event in events_of(answer):
                    with self._news:
                        self.events.append(event)
                        self._news.notify_all()
        except httpx.HTTPError:
            pass

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something is so; it is looked at after each event."""
        with self._news:
            assert self._news.wait_for(until, WAIT_S), self.events[-3:]

    def of(self, name: str, **fields: object) -> list[Any]:
        """Return the events of a kind that have these fields."""
        return [
            data
            for kind, data in list(self.events)
            if kind == name and all(data.get(key) == value for key, value in fields.items())
        ]

    def finish(self, job: str) -> Any:
        """Wait for the end of a job and return it."""
        self.wait(lambda: any(each["state"] != "running" for each in self.of("job", id=job)))
        return next(each for each in self.of("job", id=job) if each["state"] != "running")

    def do(self, op: str, status: int | None = None, **fields: object) -> Any:
        """Do an operation and return its answer, which has this status."""
        body = {"op": op, "cid": f"{self._name}-{next(self._numbers)}", **fields}
        answer = self.api.post("/loom/do", json=body)
        assert answer.status_code in ((status,) if status else (200, 202)), answer.text
        return answer.json()

    def done(self, op: str, **fields: object) -> Any:
        """Do an operation, wait for its job, and return the answer; the job must not have failed."""
        answer = self.do(op, None, **fields)
        job = self.finish(answer["job"])
        assert job["state"] == "done", job
        return answer | {"ended": job}

    def grow(self, node: str, n: int = 1, **fields: object) -> Any:
        """Continue a node, wait, and return the new node, or the nodes if there are several."""
        nodes = self.done("continue", node=node, n=n, **fields)["nodes"]
        return nodes[0] if n == 1 else nodes

    def type(self, text: str, node: str | None = None, **fields: object) -> Any:
        """Type a text, wait until it is scored, and return its node."""
        return self.done("type", node=node, text=text, **fields)["node"]

    def get(self, path: str, /, **query: object) -> Any:
        """Return the answer to a GET request."""
        answer = self.api.get(path, params={key: str(value) for key, value in query.items()})
        assert answer.status_code == 200, answer.text
        return answer

    def doc(self, **query: object) -> Any:
        """Return the document."""
        return self.get("/loom/doc", **query).json()

    def nodes(self) -> list[str]:
        """Return the names of the nodes of the document."""
        return list(self.doc()["nodes"]["id"])

    def tokens(self, node: str, *, whole: bool = False, **more: object) -> Any:
        """Return the tokens of a node, or of its whole text."""
        nodes = self.doc()["nodes"]
        at = 0 if whole else nodes["at"][nodes["id"].index(node)]
        found = self.get("/loom/tokens", node=node, **{"from": at}, **more).json()
        parts = found.pop("parts")
        for name in ("ids", "lp", "h", "rk", "al", "text", *(("top",) if "top" in more else ())):
            found[name] = [value for part in parts for value in part[name]]
        found |= {"at": at, "node": found["nodes"][-1]}
        return found | {"src": "".join(part["src"] for part in parts)}

    def text(self, node: str) -> str:
        """Return the text of a node, from its root on."""
        return str(self.get("/loom/export", format="markdown", node=node).text)
