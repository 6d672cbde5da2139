"""``llamabranch search``: the best of many continuations of a prompt, by any method of the library."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import typer

from llamabranch import Branch, ConfigError, Drafter, LlamaBranchError, SamplingParams
from llamabranch.search import (
    SearchResult,
    SearchStats,
    beam_search,
    best_of_n,
    smc,
    step_search,
    tree_search,
    vote,
)

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .console import Console, print_json
from .files import check_new_file, write_new_file
from .interrupts import InterruptHandler
from .opening import open_pair
from .options import (
    OUTPUT,
    ChatOptions,
    ModelOptions,
    PromptArgument,
    RuntimeOptions,
    TextOutputOptions,
    TextSettings,
)
from .reporting import EXIT_INTERRUPTED
from .search_report import print_tree, search_page, stats_text

WIDTHS = {"beam": 4, "best-of": 8, "vote": 16, "smc": 8, "steps": 4, "mcts": 3}
NEED_REWARD = ("steps", "mcts")
NEED_LIMIT = ("beam", "smc", "mcts")  # of tokens: they weigh or compare texts by their lengths
_CELLS_PER_TEXT = 256
_LEAST_CELLS = 2048
_NONE_HINT = "raise --max-tokens, or allow shorter texts in the grammar; for smc also raise --width"


@dataclass(frozen=True)
class MethodOptions:
    """How to search."""

    panel: ClassVar[str] = "Search"

    method: str = option("beam", "How to search.", metavar="|".join(WIDTHS))
    width: int | None = option(
        None,
        "Beams, texts, particles, texts of a step, or moves; by default "
        + ", ".join(f"{n} ({name})" for name, n in WIDTHS.items())
        + ".",
        "--width",
        "-w",
        min=1,
    )
    best: int = option(1, "How many results to print.", min=1)
    length_penalty: float = option(1.0, "beam: above 0 favours long texts, below 0 short ones.")
    groups: int = option(1, "beam: groups of beams.", min=1)
    diversity_penalty: float = option(0.0, "beam: nats for a token of an earlier group.")
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
    sequences: int = option(
        33, "Sequences of the cache; a wider search decodes in waves.", min=2, max=256
    )

    def check(self, max_tokens: int | None) -> None:
        """Raise ConfigError for what cannot be searched with."""
        if self.method not in WIDTHS:
            raise ConfigError(
                f"unknown method {self.method!r}", hint="methods: " + ", ".join(WIDTHS)
            )
        if self.method in NEED_REWARD and self.reward is None:
            raise ConfigError(
                f"--method {self.method} needs a reward",
                hint="for example --reward 'python score.py', which reads the text and prints a number",
            )
        try:
            re.compile(self.answer)
        except re.error as error:
            raise ConfigError(f"--answer is no regular expression: {error}") from None
        if max_tokens is None and self.method in NEED_LIMIT:
            raise ConfigError(
                f"--method {self.method} needs a limit", hint="--max-tokens N, at least 1"
            )

    @property
    def n(self) -> int:
        """The width, or the method's default."""
        return self.width or WIDTHS[self.method]

    @property
    def n_sequences(self) -> int:
        """The sequences of the cache that the search can use."""
        if self.method == "mcts":
            return self.sequences
        return max(2, min(self.n + 1, self.sequences))

    def boundary(self) -> str | int:
        """Return where a step ends."""
        if self.step.isdecimal():
            return int(self.step)
        return self.step.replace("\\n", "\n").replace("\\t", "\t")

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling settings for the method: particles must not be truncated."""
        if self.method != "smc":
            return params
        default = SamplingParams()
        kept = {
            name: off
            for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
            if getattr(params, name) == getattr(default, name)
        }
        return params.replace(**kept)


@dataclass(frozen=True)
class SearchOutput(TextOutputOptions):
    """What is shown of a search."""

    panel: ClassVar[str] = OUTPUT

    tree: bool = option(False, "Draw the tree of the search.", "--tree")
    html: Path | None = option(
        None, "Also write a page: the results and the tree of the search.", metavar="FILE"
    )


@with_bundles
def search(
    *,
    given: PromptArgument,
    chat: ChatOptions,
    method: MethodOptions,
    models: ModelOptions,
    text: TextSettings,
    runtime: RuntimeOptions,
    output: SearchOutput,
) -> None:
    """Search for the best continuation: beams, samples, votes, particles, steps, or a tree.

    All candidates share the prompt and every decode. Ctrl-C ends the search with the best so far. On a
    pipe standard output is the text alone.
    """
    with output.console() as console, ExitStack() as stack:
        if output.html is not None:
            check_new_file(output.html)
        grammar = text.parse_grammar()
        method.check(text.max_tokens)
        params, prompt = method.params(text.params(text.seed)), given.read()
        target, drafters = replace(models, draft=models.draft or "none").resolve(console)
        n_sequences = method.n_sequences
        sized = runtime.with_room(target, prompt, text.max_tokens, chat)
        if runtime.n_ctx is None:  # a long prompt has cells of its own, which all texts share
            n_cells = max(_LEAST_CELLS, _CELLS_PER_TEXT * n_sequences)
            runtime = replace(runtime, n_ctx=n_cells + (sized.n_ctx or 0))
        context, drafter = open_pair(
            runtime,
            (target, drafters),
            console,
            stack,
            LoadOptions(n_seq_max=n_sequences, chat_template=chat.template),
            LoadOptions(n_seq_max=n_sequences + 1),
        )
        params = text.without_eog(params, context.model)
        start = chat.prompt_tokens(context.model, prompt)
        branch = Branch.start(context, start, sampling=params, grammar=grammar)
        with InterruptHandler([context, *drafter.contexts]) as interrupts:

            def on_step(stats: SearchStats) -> bool:
                console.progress(
                    f"{stats.steps} steps, {stats.decodes} decodes, {stats.elapsed_s:.1f} s"
                )
                return interrupts.requested

            try:
                result = _run(method, branch, text, drafter if drafters else None, on_step)
            finally:
                console.progress("")
        if output.html is not None:
            page = search_page(result, prompt, context.model.name, method.best)
            stack.callback(write_new_file, output.html, page)  # after the results are printed
        if output.as_json:
            record = {"prompt": prompt, "method": method.method, "seed": branch.seed}
            record |= {**result.as_dict(tree=output.tree), "interrupted": interrupts.requested}
            print_json(record)
        else:
            before = chat.shown_prompt(prompt) if output.shows_prompt(console) else ""
            _print(console, prompt, before, result, method.best, output.tree)
        if interrupts.requested:
            console.note("interrupted: the best so far")
            raise typer.Exit(EXIT_INTERRUPTED)
        if not result.hypotheses:
            raise LlamaBranchError(
                f"the search has found no text: none can be complete within {text.max_tokens} tokens",
                hint=_NONE_HINT,
            )


def _run(
    method: MethodOptions,
    branch: Branch,
    text: TextSettings,
    drafter: Drafter | None,
    on_step: Callable[[SearchStats], bool],
) -> SearchResult:
    n, most, stop = method.n, text.max_tokens, text.stop_strings
    limit = most or 0  # checked: it is given where it must be
    reward = None if method.reward is None else _reward(method.reward)
    if method.method == "beam":
        return beam_search(
            branch,
            n,
            limit,
            n=min(n, method.best),
            length_penalty=method.length_penalty,
            groups=method.groups,
            diversity_penalty=method.diversity_penalty,
            stop=stop,
            on_step=on_step,
        )
    if method.method == "smc":
        # A text that may not end by itself cannot be weighted by the probability that it does.
        return smc(branch, n, limit, force_end=not text.ignore_eos, stop=stop, on_step=on_step)
    if method.method == "best-of":
        return best_of_n(
            branch, n, most, reward=reward, stop=stop, drafter=drafter, on_step=on_step
        )
    if method.method == "vote":
        return vote(
            branch, _answer(method.answer), n, most, stop=stop, drafter=drafter, on_step=on_step
        )
    if reward is None:
        raise ConfigError(f"--method {method.method} needs a reward")
    if method.method == "steps":
        return step_search(
            branch,
            reward,
            n,
            beam_width=n,
            max_steps=method.iterations,
            step=method.boundary(),
            max_tokens=most,
            stop=stop,
            drafter=drafter,
            on_step=on_step,
        )
    return tree_search(
        branch,
        reward,
        method.iterations,
        expand=n,
        n=method.best,
        step=method.boundary(),
        max_tokens=limit,
        stop=stop,
        drafter=drafter,
        on_step=on_step,
    )


def _reward(command: str) -> Callable[[str], float]:
    """Return a function that runs ``command`` on a text and returns the number it prints."""

    def reward(text: str) -> float:
        # In a session of its own: Ctrl-C ends the search with the best so far, not the command.
        done = subprocess.run(
            command,
            shell=True,
            input=text,
            capture_output=True,
            encoding="utf-8",
            check=False,
            start_new_session=True,
        )
        try:
            if done.returncode == 0:
                return float(done.stdout)
        except ValueError:
            pass
        printed = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(
            f"the reward {command!r} printed no number (exit code {done.returncode})",
            hint=printed[-1] if printed else None,
        )

    return reward


def _answer(pattern: str) -> Callable[[str], str | None]:
    """Return a function that finds the last match of ``pattern`` in a text."""
    compiled = re.compile(pattern)

    def answer(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        if not matches:
            return None
        last = matches[-1]
        return last[1] if compiled.groups and last[1] is not None else last[0]

    return answer


def _print(
    console: Console, prompt: str, before: str, result: SearchResult, best: int, tree: bool
) -> None:
    beside = console.beside
    if tree:
        print_tree(beside, result.tree, prompt)
    for hypothesis in result.hypotheses[:best]:
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
            others = [text for text in result.answer_forms[answer] if text != str(answer)]
            shares.append(f"{answer} {n}" + (f" (also {', '.join(others)})" if others else ""))
        beside.line(f"votes: {', '.join(shares)}")
    if result.log_evidence is not None:
        least = min(result.effective_sizes, default=0.0)
        beside.line(
            f"log evidence: {result.log_evidence:.3f} nats; at least {least:.1f} effective particles"
        )
    beside.line(stats_text(result.stats), "dim")
