"""``llamabranch search``: the best of many continuations of a prompt, by any method of the library."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import typer

import llamabranch as lb
from llamabranch import ConfigError, SamplingParams
from llamabranch.search import SearchResult, SearchStats, outline

from ..arguments import choice
from ..loading import LoadOptions
from ..search.vote import last_match
from .bundles import option, with_bundles
from .console import Console
from .interrupts import EXIT_INTERRUPTED, InterruptHandler
from .job import with_room
from .options import ChatOptions, DraftOptions, OutputOptions, PromptOptions, TextOptions
from .trees import LEGEND, drawn_tree

WIDTHS = {"beam": 4, "best-of": 8, "vote": 16, "smc": 8, "steps": 4, "mcts": 3}
NEED_REWARD = ("steps", "mcts")
NEED_LIMIT = ("beam", "smc", "mcts")  # of tokens: they weigh or compare texts by their lengths
_MOST_SEQUENCES = 33  # of the cache; a wider search decodes in waves
_CELLS_PER_TEXT = 256
_LEAST_CELLS = 2048
_NONE_HINT = "raise -n, or allow shorter texts in the grammar; for smc also raise --width"


@dataclass(frozen=True)
class MethodOptions:
    """How to search."""

    panel: ClassVar[str] = "Search"
    first: ClassVar[str] = "method width reward"

    method: str = option("beam", "How to search.", metavar="|".join(WIDTHS))
    width: int | None = option(
        None,
        "Beams, texts, particles, texts of a step, or moves; by default "
        + ", ".join(f"{n} ({name})" for name, n in WIDTHS.items())
        + ".",
        "--width -w",
        min=1,
    )
    best: int = option(1, "How many results to print.", min=1)
    reward: str | None = option(
        None,
        "best-of, steps, mcts: a program that reads a text from standard input and prints "
        "a number, higher is better.",
        metavar="COMMAND",
    )
    answer: str = option(
        r"-?\d+(?:\.\d+)?",
        "vote: what finds the answer in a text; the last match counts, and of it the first group.",
        metavar="REGEX",
    )
    step: str = option(
        r"\n", "steps, mcts: where a step ends: at a text, or after N tokens.", metavar="TEXT|N"
    )
    iterations: int = option(40, "steps: at most N steps; mcts: texts evaluated.", min=1)
    tree: bool = option(False, "Draw the tree of the search.", "--tree")

    def check(self, max_tokens: int | None) -> None:
        """Raise ConfigError for what cannot be searched with."""
        choice("method", self.method, WIDTHS)
        hint = "for example --reward 'python score.py', which reads a text and prints a number"
        if self.method in NEED_REWARD and self.reward is None:
            raise ConfigError(f"--method {self.method} needs a reward", hint=hint)
        last_match(self.answer)
        if max_tokens is None and self.method in NEED_LIMIT:
            message = f"--method {self.method} needs a limit"
            raise ConfigError(message, hint="--n-predict N, at least 1")

    @property
    def n(self) -> int:
        """The width, or the method's default."""
        return self.width or WIDTHS[self.method]

    @property
    def n_sequences(self) -> int:
        """The sequences of the cache that the search can use."""
        if self.method == "mcts":
            return _MOST_SEQUENCES
        return max(2, min(self.n + 1, _MOST_SEQUENCES))

    def boundary(self) -> str | int:
        """Return where a step ends."""
        if self.step.isdecimal():
            return int(self.step)
        return self.step.replace("\\n", "\n").replace("\\t", "\t")

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling settings for the method: particles must not be truncated."""
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if self.method == "smc" else {}
        default = SamplingParams()
        unset = {k: v for k, v in off.items() if getattr(params, k) == getattr(default, k)}
        return params.replace(**unset)


@with_bundles
def search(
    *,
    given: PromptOptions,
    chat: ChatOptions,
    method: MethodOptions,
    text: TextOptions,
    models: DraftOptions,
    output: OutputOptions,
) -> None:
    """Search for the best continuation: beams, samples, votes, particles, steps, or a tree.

    All candidates share the prompt and every decode. Ctrl-C ends the search with the best so far. On a
    pipe standard output is the text alone.
    """
    with output.console() as console:
        grammar, constraint = text.parse_grammar(), text.load_constraint()
        if constraint is not None and method.method != "smc":
            raise ConfigError("of the searches only --method smc has a --constraint")
        method.check(text.max_tokens)
        params = method.params(text.params(models, text.seed))
        prompt = given.one()
        names = replace(models, draft=models.draft or "none").resolve(console)
        n_sequences = method.n_sequences
        sized = with_room(models, names[0], prompt, text.max_tokens)
        if models.n_ctx is None:
            # A long prompt needs cells beside those of the texts, which share it.
            n_cells = max(_LEAST_CELLS, _CELLS_PER_TEXT * n_sequences)
            models = replace(models, n_ctx=n_cells + (sized.n_ctx or 0))
        of_target = LoadOptions(n_seq_max=n_sequences, chat_template=chat.template)
        of_drafts = LoadOptions(n_seq_max=n_sequences + 1)
        context, drafter = models.open_pair(names, console, of_target, of_drafts)
        params = text.without_eog(params, context.model)
        start = chat.prompt_tokens(context.model, prompt)
        branch = lb.Branch.start(context, start, sampling=params, grammar=grammar)
        with InterruptHandler([context, *drafter.contexts]) as interrupts:

            def on_step(stats: SearchStats) -> bool:
                console.progress(
                    f"{stats.steps} steps, {stats.decodes} decodes, {stats.elapsed_s:.1f} s"
                )
                return interrupts.requested

            try:
                result = _run(
                    method, branch, text, drafter if names[1] else None, constraint, on_step
                )
            finally:
                console.progress("")
        before = prompt + "\n" * chat.is_on if console.out.is_terminal else ""
        _print(console, prompt, before, result, method)
        record = {"prompt": prompt, "method": method.method, "seed": branch.seed}
        found = result.as_dict(tree=method.tree)
        console.answer({**record, **found, "interrupted": interrupts.requested})
        if interrupts.requested:
            console.note("interrupted: the best so far")
            raise typer.Exit(EXIT_INTERRUPTED)
        if not result.hypotheses:
            raise lb.LlamaBranchError(
                f"the search has found no text: none can be complete within {text.max_tokens} tokens",
                hint=_NONE_HINT,
            )


def _run(
    method: MethodOptions,
    branch: lb.Branch,
    text: TextOptions,
    drafter: lb.Drafter | None,
    constraint: Callable[[str], bool] | None,
    on_step: Callable[[SearchStats], bool],
) -> SearchResult:
    n, most, name = method.n, text.max_tokens, method.method
    limit = most or 0  # checked: it is given where it must be
    shared: dict[str, Any] = {"stop": text.stop_strings, "on_step": on_step}
    more: dict[str, Any] = {**shared, "drafter": drafter}
    if name == "beam":
        return lb.search.beam_search(branch, n, limit, n=min(n, method.best), **shared)
    if name == "smc":
        # A text that may not end by itself cannot be weighted by the probability that it does.
        ends = not text.ignore_eos
        return lb.search.smc(branch, n, limit, constraint=constraint, force_end=ends, **shared)
    if name == "vote":
        return lb.search.vote(branch, last_match(method.answer), n, most, **more)
    reward = None if method.reward is None else partial(_reward, method.reward)
    if name == "best-of":
        return lb.search.best_of_n(branch, n, most, reward=reward, **more)
    if reward is None:
        raise ConfigError(f"--method {name} needs a reward")
    more["step"], n_most = method.boundary(), method.iterations
    if name == "steps":
        more |= {"max_steps": n_most, "max_tokens": most}
        return lb.search.step_search(branch, reward, n, beam_width=n, **more)
    more |= {"n": method.best, "max_tokens": limit}
    return lb.search.tree_search(branch, reward, n_most, expand=n, **more)


def _reward(command: str, text: str) -> float:
    """Run ``command`` on a text and return the number it prints."""
    # In a session of its own: Ctrl-C ends the search with the best so far, not the command.
    done = subprocess.run(
        command, shell=True, input=text, capture_output=True, encoding="utf-8", check=False,
        start_new_session=True,
    )  # fmt: skip
    with contextlib.suppress(ValueError):
        if done.returncode == 0:
            return float(done.stdout)
    printed = (done.stderr or done.stdout).strip().splitlines()
    raise ConfigError(
        f"the reward {command!r} printed no number (exit code {done.returncode})",
        hint=printed[-1] if printed else None,
    )


def _print(
    console: Console, prompt: str, before: str, result: SearchResult, method: MethodOptions
) -> None:
    beside = console.beside
    if method.tree:
        beside.render(drawn_tree(outline(result.tree, prompt=prompt)))
        beside.line(f"{LEGEND} Dim: pruned.", "dim")
        beside.line()
    for hypothesis in result.hypotheses[: method.best]:
        beside.line(
            f"score {hypothesis.score:.4f}, log p {hypothesis.logprob:.2f} nats, "
            f"{len(hypothesis.tokens)} tokens, {hypothesis.finish_reason}",
            "bold",
        )
        # On a pipe an empty line separates two texts, and none follows the last.
        if console is not beside and hypothesis is not result.hypotheses[0]:
            console.write("\n")
        console.write(before + hypothesis.text + ("\n\n" if console is beside else "\n"))
    if result.votes:
        shares = []
        for answer, n in result.votes.items():
            others = ", ".join(text for text in result.answer_forms[answer] if text != str(answer))
            shares.append(f"{answer} {n}" + f" (also {others})" * bool(others))
        beside.line(f"votes: {', '.join(shares)}")
    if result.log_evidence is not None:
        least = min(result.effective_sizes, default=0.0)
        beside.line(
            f"log evidence: {result.log_evidence:.3f} nats; at least {least:.1f} effective particles"
        )
    beside.line(stats_text(result.stats), "dim")


def stats_text(stats: SearchStats) -> str:
    """Return the cost of a search as a line."""
    again = f" ({stats.tokens_redecoded} again)" if stats.tokens_redecoded else ""
    return (
        f"{stats.decodes} decodes of {stats.tokens_decoded} tokens{again}, "
        f"{stats.tokens_shared} tokens shared, at most {stats.peak_sequences} sequences, "
        f"{stats.elapsed_s:.2f} s"
    )
