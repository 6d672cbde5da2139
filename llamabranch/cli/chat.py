"""``llamabranch chat``: a conversation in the terminal, from a pipe, or from a file of turns."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import typer

import llamabranch as lb
from llamabranch import Chat
from llamabranch.chat import Answer, saved_model

from . import options as opt
from .console import Console, shortened
from .drafters import open_pair, resolve
from .interrupts import EXIT_FAILURE, EXIT_INTERRUPTED, InterruptHandler
from .options import TEXT, Given, option, with_options

_PROMPT = "> "
_N_SEQ_MAX = 16  # sequences: two for each turn whose K/V is kept
# Each command and what it does.
USAGES = {
    "/retry": "Answer the last message once more, on a new branch.",
    "/undo": "Remove the last message and its answer.",
    "/edit N TEXT": "Replace message N and answer it, on a new branch.",
    "/fork": "Continue on a new branch; this one stays as it is.",
    "/branches": "Draw the tree of all branches.",
    "/switch N": "Continue on branch N.",
    "/system [TEXT]": "Print or set the system message; - removes it.",
    "/set [NAME VALUE]": "Print the settings, or change one: temperature 0.5, thinking off.",
    "/save FILE": "Save the chat with its branches.",
    "/help": "Print this list.",
    "/quit": "End the program, as Ctrl-D does.",
}
_THINKING = {"on": True, "off": False, "auto": None}
# Notes on how an answer ended.
_ENDS = {
    None: "interrupted: this part of the answer stays",
    "length": "the answer has reached max_tokens: /set max_tokens N",
    "capacity": "the context is full: the answer ends here",
}


class ChatSession:
    """A chat in the terminal, with its commands.

    Args:
        chat: the conversation.
        console: where answers are printed.

    Attributes:
        chat: the conversation.
        has_failed: whether an answer or a command has failed.
        is_typed: whether turns are typed, and not read from a pipe or a file.
    """

    def __init__(self, chat: lb.Chat, console: Console) -> None:
        self.chat, self._console = chat, console
        self._has_quit = self.has_failed = False
        self.is_typed = sys.stdin is not None and sys.stdin.isatty()
        chat.set(on_prompt_progress=console.reading)

    # -- turns -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Read turns until the user ends the program, or the file ends."""
        with contextlib.suppress(ImportError):
            import readline  # gives input() a history

            readline.parse_and_bind("set enable-bracketed-paste on")  # readline's default
        if self.is_typed:
            self._console.note("/help lists the commands; Ctrl-C ends an answer, Ctrl-D the chat.")
        # While nothing is generated, Ctrl-C only drops the typed line.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while not self._has_quit:
                try:
                    self.take(input(_PROMPT if self.is_typed and sys.stdout.isatty() else ""))
                except EOFError:
                    if self.is_typed:
                        self._console.line()
                    return
                except KeyboardInterrupt:
                    if not self.is_typed:
                        raise
                    self._console.line()
                except UnicodeDecodeError as error:
                    self._console.error(f"that is not UTF-8: {error}")
        finally:
            signal.signal(signal.SIGINT, previous)

    def take(self, line: str) -> None:
        """Run a line that begins with a slash as a command; send any other line as a message."""
        try:
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                self._stream(lambda: self.chat.send(line))
        except lb.LlamaBranchError as error:
            self.has_failed = True
            self._console.error(error.message, error.hint)

    def _stream(self, begin: Callable[[], Answer]) -> None:
        """Print an answer as it is generated, and then how it ended. Ctrl-C ends it."""
        chat, console = self.chat, self._console
        answer: Answer | None = None
        before = chat.current, chat.n_cut
        contexts = [chat.ctx, *chat.engine.drafter.contexts]
        with InterruptHandler(contexts) as interrupts:
            try:
                answer, was_thought = begin(), False
                for event in answer:
                    if event.thought and console.out.is_terminal:
                        console.write(event.thought, "dim")
                        was_thought = True
                    elif event.text:
                        console.write("\n\n" * was_thought + event.text)
                        was_thought = False
                    interrupts.check()
            except (KeyboardInterrupt, lb.DecodeInterruptedError):
                if not interrupts.requested:
                    raise
                console.progress("")
                # An interrupt that came while nothing was decoded must not stop the next decode.
                for context in contexts:
                    context.resume()
                chat.close()  # an answer that has just begun, too
        if answer is None or not answer.exchange.is_answered:
            console.note("interrupted: the message was removed")
        else:
            console.write("\n")
            if chat.n_cut and before != (chat.current, chat.n_cut):
                cut = f"the first {chat.n_cut} messages with their answers"
                console.note(f"the context is full: the model no longer sees {cut}")
            if answer.finish_reason in _ENDS:
                console.note(_ENDS[answer.finish_reason])
        if interrupts.requested and not self.is_typed:
            raise typer.Exit(EXIT_INTERRUPTED)

    # -- commands ----------------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        """Run a command; UsageError for a missing or bad argument, ConfigError for a wrong name."""
        name, _, rest = line.partition(" ")
        usage = next((usage for usage in USAGES if usage.split()[0] == name), None)
        if usage is None:
            raise lb.ConfigError(f"there is no command {name}", hint="/help lists the commands")
        try:
            if not rest and usage.endswith(("N", "FILE", "TEXT")):
                raise ValueError
            self._do(name, rest.strip())
        except ValueError as error:
            if isinstance(error, lb.LlamaBranchError):
                raise
            raise lb.errors.UsageError("an argument is missing or not valid", hint=usage) from None

    def _do(self, name: str, rest: str) -> None:
        chat, note = self.chat, self._console.note
        match name:
            case "/retry":
                self._stream(chat.retry)
            case "/undo":
                note(f"taken back: {shortened(chat.undo())}")
            case "/edit":
                number, text = rest.split(maxsplit=1)
                self._stream(lambda: chat.edit(int(number), text))
            case "/fork":
                chat.fork()
            case "/branches":
                self._console.line(chat.tree())
            case "/switch":
                chat.switch(int(rest))
            case "/system":
                if rest:
                    chat.system = None if rest == "-" else rest
                note(f"system: {chat.system or 'none'}")
            case "/set":
                self._set(*rest.split(maxsplit=1))
            case "/save":
                file = os.path.expanduser(rest)
                chat.save(file)
                note(f"saved in {file}")
            case "/help":
                self._console.table(("command", ""), list(USAGES.items()), left=("",))
            case "/quit":
                self._has_quit = True
        if name in ("/retry", "/edit", "/fork", "/switch"):
            self._where()

    def _set(self, name: str = "", value: str = "") -> None:
        if name:
            self.chat.set(**{name: _THINKING.get(value, opt.setting_value(value))})
            self._console.note(f"{name}: {value}")
            return
        rows = [*asdict(self.chat.sampling).items()]
        rows += [(name, self.chat.options.get(name)) for name in ("max_tokens", "thinking")]
        self._console.table(("setting", "value"), rows, left=("value",))

    def show_last(self) -> None:
        """If turns are typed, show the end of a chat that was loaded."""
        for exchange in self.chat.exchanges[-1:] if self.is_typed else ():
            self._console.line(_PROMPT + exchange.user, "dim")
            self._console.line(exchange.answer)
        self._where()

    def _where(self) -> None:
        """Print the number of the current branch and its last message."""
        exchanges = self.chat.exchanges
        after = f", after: {shortened(exchanges[-1].user)}" if exchanges else ", at the beginning"
        self._console.note(f"branch {self.chat.current}{after}")


@with_options(
    f"max_tokens system {opt.SAMPLING_OPTIONS} {opt.DRAFT_OPTIONS} {opt.FOLDER_OPTIONS} verbose",
    "chat",
)
def chat(
    given: Given,
    console: Console,
    prompt: str | None = option(TEXT, "-p --prompt TEXT", "The first message; more are typed."),
    load: Path | None = option(TEXT, "--load FILE", "Continue a chat that /save wrote."),
) -> None:
    """Talk with a model; retry, edit, fork and save turns.

    llamabranch chat -m smollm2-135m:Q8_0
    cat turns.txt | llamabranch chat -sys "Answer in one word."

    /help lists the commands; Ctrl-C ends an answer. A line is a turn.
    """
    if load is not None and given.model is None:
        given = replace(given, model=str(saved_model(load)))
    config, params = given.config(), given.params(given.seed)
    context, drafter = open_pair(given, resolve(given, console), console, n_seq_max=_N_SEQ_MAX)
    if load is None:
        talk = Chat(
            context, given.system, drafter=drafter, config=config,
            max_tokens=given.max_tokens, sampling=params,
        )  # fmt: skip
    else:
        talk = Chat.load(context, load, drafter, config)
        talk.system = given.system or talk.system
    talk.set(**given.set("chat"))
    session = ChatSession(talk, console)
    if load is not None:
        session.show_last()
    if prompt is not None:
        session.take(prompt)
    if sys.stdin is not None:  # None means that it was closed when the process started
        session.run()
    if session.has_failed and not session.is_typed:
        raise typer.Exit(EXIT_FAILURE)
