"""A chat in the terminal: turns and commands are read, answers are streamed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import fields

import typer
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

import llamabranch as lb
from llamabranch.chat import Answer, Exchange

from .console import Console
from .interrupts import EXIT_INTERRUPTED, InterruptHandler
from .options import setting_value
from .trees import drawn_tree

_PROMPT = "> "
Read = Callable[[str], str]  # from the text to begin with to what was typed


class ChatSession:
    """A chat, the terminal, and the commands that change one in the other.

    Args:
        chat: the conversation.
        console: where answers are printed.
        interactive: turns are typed; an answer that fails does not end the program then.

    Attributes:
        chat: the conversation, another one after /load.
        has_failed: whether a command has failed.
    """

    def __init__(self, chat: lb.Chat, console: Console, *, interactive: bool = True) -> None:
        self.chat = chat
        self._console, self._interactive = console, interactive
        self._contexts = [chat.ctx, *chat.speculator.drafter.contexts]
        self._read: Read | None = None
        self._line = ""  # the last one of an answer, as it was printed
        self._has_quit = False
        self._n_printed = 0
        self.has_failed = False

    # -- turns -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Read turns from the terminal until it ends."""
        self._read = _reader(self._console)
        self._console.note("/help lists the commands; Ctrl-C ends an answer, Ctrl-D the program.")
        # A Ctrl-C outside of an answer only drops what was typed.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while not self._has_quit:
                try:
                    line = self._read("")
                    while line.endswith("\\"):
                        line = line[:-1] + "\n" + self._read("")
                    self.take(line)
                except EOFError:
                    self._console.line()
                    return
                except KeyboardInterrupt:
                    self._console.line()
                except UnicodeDecodeError as error:
                    self._console.error(f"that is not UTF-8: {error}")
        finally:
            signal.signal(signal.SIGINT, previous)

    def take(self, line: str) -> None:
        """Do what a line says: a command if it begins with a slash, else a message."""
        if self._has_quit or not line.strip():
            return
        try:
            if not self._interactive and self._console.out.is_terminal:
                self._console.line(_PROMPT + line, "dim")
            if not line.startswith("/"):
                self.say(line)
                return
            name, _, rest = line[1:].partition(" ")
            name = _ALIASES.get(name, name)
            if name not in COMMANDS:
                hint = _INSTEAD.get(name, "/help lists the commands")
                raise lb.ConfigError(f"there is no command /{name}", hint=hint)
            COMMANDS[name](self, rest.strip())
        except lb.LlamaBranchError as error:
            if not self._interactive and not line.startswith("/"):
                raise
            self.has_failed = True
            self._console.error(error.message, error.hint)

    def say(self, text: str) -> None:
        """Send a message and stream its answer."""
        self._stream(lambda: self.chat.send(text))

    def _stream(self, begin: Callable[[], Answer]) -> None:
        """Print an answer as it is generated; Ctrl-C ends it."""
        answer: Answer | None = None
        before = self.chat.current, self.chat.n_cut
        interrupted = False
        with InterruptHandler(self._contexts) as interrupts:
            try:
                answer = begin()
                if self._n_printed and not self._interactive:
                    self._write("\n")
                for token in answer:
                    self._write(token.text)
                    interrupts.check()
            except (KeyboardInterrupt, lb.DecodeInterruptedError):
                if not interrupts.requested:
                    raise
                interrupted = True
                for context in self._contexts:  # where nothing was being decoded
                    context.resume()
                if answer is not None:
                    answer.close()
        self._n_printed += 1
        if answer is None or (interrupted and not answer.tokens):
            self._console.note("interrupted: the message was taken back")
        else:
            self._write("\n")
            self._note_end(answer, is_same=before == (self.chat.current, self.chat.n_cut))
        if interrupted and not self._interactive:
            raise typer.Exit(EXIT_INTERRUPTED)

    def _write(self, text: str) -> None:
        self._console.write(self._wrapped(text) if self._console.out.is_terminal else text)

    def _wrapped(self, text: str) -> str:
        """Return what to write for ``text``: a word that reaches the edge is moved to the next line."""
        shown = ""
        for piece in re.split(r"(?<=\s)", text):
            line = self._line + piece
            start = line.rfind(" ", 0, len(line.rstrip())) + 1  # of its last word
            if start and cell_len(line.rstrip()) >= self._console.out.width:
                n = cell_len(self._line[start:])
                shown += "\b" * n + " " * n + "\n"
                line = piece = line[start:]
            shown += piece
            self._line = "" if line.endswith("\n") else line
        return shown

    def _note_end(self, answer: Answer, *, is_same: bool) -> None:
        """Note how an answer has ended, and what it did not see unless that ``is_same`` as before."""
        reasons = {
            None: "interrupted: this part of the answer stays",
            "length": "the answer has reached max_tokens: /set max_tokens N",
            "capacity": "the context is full: the answer ends here",
        }
        n = self.chat.n_cut
        if n and not is_same:
            what = "message and its answer" if n == 1 else f"{n} messages with their answers"
            self._console.note(f"the context is full: the model no longer sees the first {what}")
        if answer.finish_reason in reasons:
            self._console.note(reasons[answer.finish_reason])

    # -- commands ----------------------------------------------------------------------------------

    def retry(self, _: str) -> None:
        """Answer the last message once more, on a new branch."""
        self._stream(self.chat.retry)
        self._where()

    def undo(self, _: str) -> None:
        """Take the last message and its answer back."""
        self._console.note(f"taken back: {_short(self.chat.undo())}")

    def edit(self, rest: str) -> None:
        """Replace message N and answer it, on a new branch."""
        number, _, text = rest.partition(" ")
        n = _number(number, "/edit N [TEXT]", len(self.chat.exchanges))
        if not text.strip() and 1 <= n <= len(self.chat.exchanges):
            text = "" if self._read is None else self._read(self.chat.exchanges[n - 1].user)
            if not text.strip():
                raise lb.errors.UsageError("nothing to replace it with", hint="/edit N TEXT")
        self._stream(lambda: self.chat.edit(n, text))
        self._where()

    def fork(self, _: str) -> None:
        """Go on on a new branch; this one stays as it is."""
        self.chat.fork()
        self._where()

    def branches(self, _: str) -> None:
        """Draw the tree of all branches."""
        self._console.render(drawn_tree(self.chat.outline()))

    def switch(self, rest: str) -> None:
        """Go on on branch N."""
        self.chat.switch(_number(rest, "/switch N"))
        self._where()

    def compare(self, rest: str) -> None:
        """Print the last answers of two branches side by side, or two answers to one message."""
        numbers = [_number(each, "/compare [A [B]]") for each in rest.split()]
        if not numbers:
            numbers = [self._other_answer()]
        if len(numbers) == 1:
            numbers.append(self.chat.current)
        last = [self._last_of(number) for number in numbers[:2]]
        if not self._console.out.is_terminal:
            for number, exchange in zip(numbers, last, strict=False):
                asked = f"{_PROMPT}{exchange.user}"
                self._console.line(f"branch {number}\n{asked}\n{exchange.answer}\n")
            return
        table = Table.grid(padding=(0, 3, 0, 0), expand=True)
        for _ in last:
            table.add_column(ratio=1)
        table.add_row(*(Text(f"branch {number}", "bold") for number in numbers))
        table.add_row(*(Text(_PROMPT + exchange.user, "dim") for exchange in last))
        table.add_row(*(Text(exchange.answer) for exchange in last))
        self._console.render(table)

    def _last_of(self, number: int) -> Exchange:
        if not (found := self.chat.on(number)):
            raise lb.errors.UsageError(
                f"branch {number} has no answer yet", hint="send a message first"
            )
        return found[-1]

    def _other_answer(self) -> int:
        """Return the branch whose last answer is another one to the same message; make one if need be."""
        chat, mine = self.chat, self._last_of(self.chat.current)
        for number in reversed(chat.branches):
            for other in chat.on(number)[-1:]:
                if other is not mine and other.user == mine.user and other.parent is mine.parent:
                    return number
        number = chat.current
        self.retry("")
        return number

    def system(self, rest: str) -> None:
        """Print or set the system message; - removes it."""
        if rest:
            self.chat.system = None if rest == "-" else rest
        self._console.note(f"system: {self.chat.system or 'none'}")

    def set(self, rest: str) -> None:
        """Print the settings, or change one: /set temp 0.5."""
        name, _, value = rest.partition(" ")
        name = name.lstrip("-").replace("-", "_")
        name = _SETTINGS.get(name, name)
        if not name:
            known = {f.name: getattr(self.chat.sampling, f.name) for f in fields(lb.SamplingParams)}
            known["max_tokens"] = self.chat.max_tokens
            rows = [(name, str(value)) for name, value in known.items()]
            self._console.table(("setting", "value"), rows, left=("value",))
            return
        self.chat.set(**{name: setting_value(value.strip())})
        self._console.note(f"{name}: {value.strip()}")

    def save(self, rest: str) -> None:
        """Save the chat with its branches."""
        folder = _path(rest, "/save FOLDER")
        self.chat.save(folder)
        self._console.note(f"saved in {folder}")

    def load(self, rest: str) -> None:
        """Go on with a chat that was saved."""
        folder, old = _path(rest, "/load FOLDER"), self.chat
        old.close()  # for room; if the other one cannot be read, it goes on and reads itself again
        speculator = old.speculator
        self.chat = lb.Chat.load(old.ctx, folder, speculator.drafter, speculator.config)
        self.show_last()

    def show_last(self) -> None:
        """Show where turns are typed what a chat that was loaded ends with."""
        for exchange in self.chat.exchanges[-1:] if self._interactive else ():
            self._console.line(_PROMPT + exchange.user, "dim")
            self._console.line(exchange.answer)
        self._where()

    def stats(self, _: str) -> None:
        """Print how many tokens were evaluated, cached and drafted."""
        stats = self.chat.stats
        drafts = stats.speculative
        rows = [
            ("answers", stats.num_answers),
            ("tokens evaluated", stats.num_evaluated_tokens),
            ("prompt tokens from the cache", stats.num_cached_tokens),
            ("tokens drafted", drafts.num_draft_tokens),
            ("drafted tokens accepted", drafts.num_accepted_tokens),
            ("target decodes of answers", drafts.target_forward_passes),
            ("turns left out", stats.num_cut_exchanges),
        ]
        self._console.table(("", "so far"), [(name, f"{count:,}") for name, count in rows])

    def help(self, _: str) -> None:
        """Print this list."""
        rows = [(usage, method.__doc__) for usage, method in USAGES.items()]
        self._console.table(("command", "what it does"), rows, left=("what it does",))
        self._console.line("A line that ends with \\ goes on in the next one.")

    def quit(self, _: str) -> None:
        """End the program, as Ctrl-D does."""
        self._has_quit = True

    def _where(self) -> None:
        """Note which branch this is and what its last message was."""
        found = self.chat.exchanges
        after = f", after: {_short(found[-1].user)}" if found else ", at the beginning"
        self._console.note(f"branch {self.chat.current}{after}")


# Each command as it is written, and its method, whose first line tells what it does.
USAGES: dict[str, Callable[[ChatSession, str], None]] = {
    "/retry": ChatSession.retry,
    "/undo": ChatSession.undo,
    "/edit N [TEXT]": ChatSession.edit,
    "/fork": ChatSession.fork,
    "/branches": ChatSession.branches,
    "/switch N": ChatSession.switch,
    "/compare [A [B]]": ChatSession.compare,
    "/system [TEXT]": ChatSession.system,
    "/set [NAME VALUE]": ChatSession.set,
    "/save FOLDER": ChatSession.save,
    "/load FOLDER": ChatSession.load,
    "/stats": ChatSession.stats,
    "/help": ChatSession.help,
    "/quit": ChatSession.quit,
}
COMMANDS = {usage.split()[0][1:]: method for usage, method in USAGES.items()}

# llama-cli's names, and what does the same or nearly so.
_ALIASES = {"regen": "retry", "exit": "quit"}
_SETTINGS = {"temp": "temperature", "predict": "max_tokens", "n_predict": "max_tokens"}
_INSTEAD = {
    "clear": "/undo takes a message back, /edit 1 TEXT begins anew on another branch",
    "read": 'llamabranch chat -p "$(cat FILE)" begins with the text of a file',
}


def _reader(console: Console) -> Read:
    """Return what reads a turn from the terminal: prompt_toolkit if it is installed, else ``input``."""
    if sys.stdout.isatty():
        try:
            return _line_editor()
        except ImportError:
            console.note("For an editor with completion: pip install 'llamabranch[chat]'")
        with contextlib.suppress(ImportError):
            import readline  # gives input() a history

            readline.parse_and_bind("set enable-bracketed-paste on")  # as its own default is

    def read(default: str) -> str:
        if default:
            sys.stderr.write(f"in place of: {default}\n")
        return input(_PROMPT if sys.stdout.isatty() else "")

    return read


def _line_editor() -> Read:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    commands = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession(completer=commands)
    return lambda default: session.prompt(_PROMPT, default=default)


def _short(text: str, longest: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _number(text: str, usage: str, default: int | None = None) -> int:
    if not text and default:
        return default
    if not text.isdecimal():
        raise lb.errors.UsageError(f"{text!r} is no number" if text else "which one?", hint=usage)
    return int(text)


def _path(text: str, usage: str) -> str:
    if not text:
        raise lb.errors.UsageError("where?", hint=usage)
    return os.path.expanduser(text)
