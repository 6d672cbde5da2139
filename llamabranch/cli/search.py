"""``llamabranch search``: find the best continuation of a prompt, by any method of the library."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import typer

import llamabranch as lb
from llamabranch import ConfigError, SamplingParams, hub
from llamabranch.search import SearchResult, SearchStats, outline

from ..arguments import choice
from ..loading import LoadOptions
from ..search.vote import last_match
from .bundles import option, with_bundles
from .console import Console
from .files import text_lines
from .interrupts import EXIT_INTERRUPTED, InterruptHandler
from .job import with_room
from .options import ChatFlags, DraftFlags, OutputFlags, PromptFlags, TextFlags
from .trees import LEGEND, drawn_tree

WIDTHS = {"beam": 4, "best-of": 8, "vote": 16, "smc": 8, "steps": 4, "mcts": 3}
NEED_REWARD = ("steps", "mcts")
DRAFTED = ("best-of", "vote", "steps", "mcts")
# Methods that need a limit of tokens, because they weigh or compare texts by length.
NEED_LIMIT = ("beam", "smc", "mcts")
_MOST_SEQUENCES = 33  # the most sequences of the cache; a wider search decodes in waves
_CELLS_PER_TEXT = 256
_LEAST_CELLS = 2048
_NONE_HINT = "raise -n, or allow shorter texts in the grammar; for smc also raise --width"


@dataclass(frozen=True)
class MethodFlags:
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
        "vote: a regular expression for the answer in a text. The last match counts; if it has groups, "
        "the answer is the first group.",
        metavar="REGEX",
    )
    step: str = option(
        r"\n", "steps, mcts: a step ends at this text, or after N tokens.", metavar="TEXT|N"
    )
    iterations: int = option(40, "steps: at most N steps; mcts: texts evaluated.", min=1)
    tree: bool = option(False, "Draw the tree of the search.", "--tree")

    def searching(self, text: TextFlags) -> Callable[..., SearchResult]:
        """Return the search, a function of a branch; ConfigError if options exclude each other."""
        choice("method", self.method, WIDTHS)
        name, n, step = self.method, self.n, self.step.replace("\\n", "\n").replace("\\t", "\t")
        if name in NEED_REWARD and self.reward is None:
            hint = "for example --reward 'python score.py', which reads a text and prints a number"
            raise ConfigError(f"--method {name} needs a reward", hint=hint)
        if text.max_tokens is None and name in NEED_LIMIT:
            raise ConfigError(f"--method {name} needs a limit", hint="--n-predict N, at least 1")
        reward = None if self.reward is None else partial(_reward, self.reward)
        by_steps = {"reward": reward, "step": int(step) if step.isdecimal() else step}
        most, ends = self.iterations, not text.ignore_eos
        methods: dict[str, tuple[Callable[..., SearchResult], dict[str, Any]]] = {
            "beam": (lb.search.beam_search, {"beams": n, "n": min(n, self.best)}),
            "best-of": (lb.search.best_of_n, {"n": n, "reward": reward}),
            "vote": (lb.search.vote, {"answer": last_match(self.answer), "n": n}),
            # If EOG is forbidden, a text cannot be weighted by the probability that it ends.
            "smc": (lb.search.smc, {"particles": n, "force_end": ends}),
            "steps": (lb.search.step_search, by_steps | {"n": n, "beam_width": n, "max_steps": most}),
            "mcts": (
                lb.search.tree_search, by_steps | {"iterations": most, "expand": n, "n": self.best},
            ),
        }  # fmt: skip
        search, arguments = methods[name]
        return partial(search, max_tokens=text.max_tokens, stop=text.stop_strings, **arguments)

    @property
    def n(self) -> int:
        """The width that the user set, or the default of the method."""
        return self.width or WIDTHS[self.method]

    @property
    def n_sequences(self) -> int:
        """How many sequences the search can use."""
        if self.method == "mcts":
            return _MOST_SEQUENCES
        return max(2, min(self.n + 1, _MOST_SEQUENCES))

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling settings; by default "smc" has no top-k, top-p or min-p."""
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if self.method == "smc" else {}
        default = SamplingParams()
        unset = {k: v for k, v in off.items() if getattr(params, k) == getattr(default, k)}
        return params.replace(**cast("lb.sampling.SamplingSettings", unset))


@with_bundles
def search(
    *,
    given: PromptFlags,
    chat: ChatFlags,
    method: MethodFlags,
    text: TextFlags,
    models: DraftFlags,
    output: OutputFlags,
) -> None:
    """Search for the best continuation: beams, samples, votes, particles, steps, or a tree.

    All candidates share the prompt and every decode. Ctrl-C ends the search with the best so far. A
    pipe gets only the text.
    """
    with output.console() as console:
        grammar, searching = text.parse_grammar(), method.searching(text)
        params = method.params(text.params(models, text.seed))
        prompt = given.one()
        names = replace(models, draft=models.draft or "none").resolve(console)
        n_sequences = method.n_sequences
        sized = with_room(models, names[0], prompt, text.max_tokens)
        if models.n_ctx is None:
            # The texts share the prompt. A long one needs cells in addition to theirs.
            n_cells = max(_LEAST_CELLS, _CELLS_PER_TEXT * n_sequences)
            models = replace(models, n_ctx=n_cells + (sized.n_ctx or 0))
        chat = chat.decided(models.target or hub.default_model())
        of_target = LoadOptions(n_seq_max=n_sequences, chat_template=chat.template)
        of_drafts = LoadOptions(n_seq_max=n_sequences + 1)
        context, drafter = models.open_pair(names, console, of_target, of_drafts)
        params = text.without_eog(params, context.model)
        start = chat.prompt_tokens(context.model, prompt)
        branch = lb.Branch.start(
            context, start, sampling=params, grammar=grammar, on_prompt_progress=console.reading
        )
        with InterruptHandler([context, *drafter.contexts]) as interrupts:

            def on_step(stats: SearchStats) -> bool:
                console.progress(
                    f"{stats.steps} steps, {stats.decodes} decodes, {stats.elapsed_s:.1f} s"
                )
                return interrupts.requested

            drafting = {"drafter": drafter} if names[1] and method.method in DRAFTED else {}
            try:
                result = searching(branch, on_step=on_step, **drafting)
            finally:
                console.progress("")
        before = prompt + "\n" * chat.is_on if console.out.is_terminal else ""
        _print(console, prompt, before, result, method)
        record = {"prompt": prompt, "method": method.method, "seed": branch.seed}
        details = result.as_dict(tree=method.tree)
        console.answer({**record, **details, "interrupted": interrupts.requested})
        if interrupts.requested:
            console.note("interrupted: the best so far")
            raise typer.Exit(EXIT_INTERRUPTED)
        if not result.hypotheses:
            message = f"the search has found no text that ends within {text.max_tokens} tokens"
            raise lb.LlamaBranchError(message, hint=_NONE_HINT)


def _reward(command: str, text: str) -> float:
    """Run ``command`` on a text and return the number it prints."""
    # The reward runs in its own session, so that Ctrl-C ends only the search.
    done = subprocess.run(
        command, shell=True, input=text, capture_output=True, encoding="utf-8", check=False,
        start_new_session=True,
    )  # fmt: skip
    with contextlib.suppress(ValueError):
        if done.returncode == 0:
            return float(done.stdout)
    printed = text_lines((done.stderr or done.stdout).strip())
    raise ConfigError(
        f"the reward {command!r} printed no number (exit code {done.returncode})",
        hint=printed[-1] or None,
    )


def _print(
    console: Console, prompt: str, before: str, result: SearchResult, method: MethodFlags
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
