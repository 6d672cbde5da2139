"""A chat in the terminal: turns and commands are read, answers are streamed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields

import typer

import llamabranch as lb
from llamabranch.chat import Answer

from .console import Console, shortened
from .interrupts import EXIT_INTERRUPTED, InterruptHandler
from .options import setting_value
from .trees import drawn_tree

_PROMPT = "> "


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
        self._has_quit = False
        self._n_printed = 0
        self.has_failed = False

    # -- turns -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Read turns from the terminal until it ends."""
        with contextlib.suppress(ImportError):
            import readline  # gives input() a history

            readline.parse_and_bind("set enable-bracketed-paste on")  # as its own default is
        self._console.note("/help lists the commands; Ctrl-C ends an answer, Ctrl-D the program.")
        # A Ctrl-C outside of an answer only drops what was typed.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while not self._has_quit:
                try:
                    line = _typed()
                    while line.endswith("\\"):
                        line = line[:-1] + "\n" + _typed()
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
                message = f"there is no command /{name}"
                raise lb.ConfigError(message, hint="/help lists the commands")
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
                    self._console.write("\n")
                for token in answer:
                    self._console.write(token.text)
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
            self._console.write("\n")
            self._note_end(answer, is_same=before == (self.chat.current, self.chat.n_cut))
        if interrupted and not self._interactive:
            raise typer.Exit(EXIT_INTERRUPTED)

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
        self._console.note(f"taken back: {shortened(self.chat.undo())}")

    def edit(self, rest: str) -> None:
        """Replace message N and answer it, on a new branch."""
        number, _, text = rest.partition(" ")
        n = _number(number, "/edit N TEXT")
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
            values = {
                f.name: getattr(self.chat.sampling, f.name) for f in fields(lb.SamplingParams)
            }
            values["max_tokens"] = self.chat.max_tokens
            rows = [(name, str(value)) for name, value in values.items()]
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
        after = f", after: {shortened(found[-1].user)}" if found else ", at the beginning"
        self._console.note(f"branch {self.chat.current}{after}")


# Each command as it is written, and its method, whose first line tells what it does.
USAGES: dict[str, Callable[[ChatSession, str], None]] = {
    "/retry": ChatSession.retry,
    "/undo": ChatSession.undo,
    "/edit N TEXT": ChatSession.edit,
    "/fork": ChatSession.fork,
    "/branches": ChatSession.branches,
    "/switch N": ChatSession.switch,
    "/system [TEXT]": ChatSession.system,
    "/set [NAME VALUE]": ChatSession.set,
    "/save FOLDER": ChatSession.save,
    "/load FOLDER": ChatSession.load,
    "/help": ChatSession.help,
    "/quit": ChatSession.quit,
}
COMMANDS = {usage.split()[0][1:]: method for usage, method in USAGES.items()}

# llama-cli's names.
_ALIASES = {"regen": "retry", "exit": "quit"}
_SETTINGS = {"temp": "temperature", "predict": "max_tokens", "n_predict": "max_tokens"}


def _typed() -> str:
    return input(_PROMPT if sys.stdout.isatty() else "")


def _number(text: str, usage: str) -> int:
    if not text.isdecimal():
        raise lb.errors.UsageError(f"{text!r} is no number" if text else "which one?", hint=usage)
    return int(text)


def _path(text: str, usage: str) -> str:
    if not text:
        raise lb.errors.UsageError("where?", hint=usage)
    return os.path.expanduser(text)
