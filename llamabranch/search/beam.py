"""Beam search, token for token as Hugging Face's ``generate(num_beams=...)`` does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..arguments import bounded, whole
from ..branch import Branch
from ..errors import ConfigError, DecodeInterruptedError
from ..model import stop_strings
from .beams import Beams, Candidate
from .checks import MOST_TEXTS, check_start, token_limit
from .node import SearchNode
from .result import Hypothesis, SearchResult
from .scores import BestScores, Scored
from .sequences import OnStep, SearchSequences
from .texts import completes_stop, hypothesis

__all__ = ["beam_search"]


def beam_search(
    branch: Branch,
    beams: int = 4,
    max_tokens: int = 64,
    *,
    n: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    groups: int = 1,
    diversity_penalty: float = 0.0,
    stop: str | Sequence[str] = (),
    on_step: OnStep | None = None,
) -> SearchResult:
    """Return the most probable continuations that a beam search finds.

    A beam's score is the sum of the model's log-probabilities, after the branch's logit bias, grammar and
    penalties, not normalised again; temperature and truncation play no role. The final score is that sum
    divided by (number of tokens, EOG token included) ** ``length_penalty``. Each token costs one decode,
    whatever the number of beams, as long as there are as many sequences; the first costs none.

    Args:
        branch: has read the prompt; it is left as it is.
        beams: the number of beams.
        max_tokens: the most tokens of a text, an EOG token included; beams that reach it are finished.
        n: how many hypotheses to return, at most ``beams``.
        length_penalty: above 0 it favours long texts, below 0 short ones; from -32 to 32.
        early_stopping: True = end when ``beams`` texts are finished; False = also when the best running
            beam, divided by its present length, is no better than the worst of them; "never" = only when
            no running beam can become better. Textbook beam search is "never" with ``length_penalty`` 0.
        groups: of how many groups the beams consist (diverse beam search, Vijayakumar et al. 2016,
            1610.02424). Each group is a beam search of its own, over the same decodes.
        diversity_penalty: in nats; taken from the score of a token for each beam of an earlier group that
            chose it in the same step. It remains part of the beam's score, not of ``logprob``.
        stop: strings that end a text, as an EOG token does.
        on_step: called after each token with the statistics so far; a true result ends the search with
            the best so far, running beams included as "cancelled".

    Raises:
        ConfigError: a value out of range. BranchStateError, SequencesExhaustedError, CacheFullError,
        DecodeError: all sequences are returned.
    """
    check_start(branch, on_step)
    beams = whole("beams", beams, 1, MOST_TEXTS)
    max_tokens = whole("max_tokens", token_limit(max_tokens), 1)
    n = whole("n", n, 1, beams)
    groups = whole("groups", groups, 1, beams)
    # So that no power of a length overflows, or is 0.
    length_penalty = bounded("length_penalty", length_penalty, -32, 32)
    diversity_penalty = bounded("diversity_penalty", diversity_penalty, 0, 1e4)
    if beams % groups:
        raise ConfigError(f"{beams} beams cannot be divided into {groups} equal groups")
    if diversity_penalty and groups == 1:
        raise ConfigError(
            "diversity_penalty needs several groups", hint="for example beams=4, groups=2"
        )
    if not isinstance(early_stopping, (bool, str)) or early_stopping not in (True, False, "never"):
        raise ConfigError(f"early_stopping must be True, False or 'never', not {early_stopping!r}")
    stop = stop_strings(stop)
    with SearchSequences(branch, on_step) as sequences:
        n_eog = len(sequences.ctx.model.eog_tokens)
        search = _Search(
            sequences,
            [
                Beams(beams // groups, n_eog, max_tokens, length_penalty, early_stopping)
                for _ in range(groups)
            ],
            length_penalty,
            diversity_penalty,
            max_tokens,
            stop,
        )
        search.run()
        found = search.hypotheses()[:n]
    for node in sequences.root.walk():
        if node.status == "finished" and all(h.node is not node for h in found):
            node.status = "pruned"
    sequences.root.prune_open()
    return SearchResult(found, sequences.stats, sequences.root)


class _Search:
    """The groups of one beam search over the same sequences."""

    def __init__(
        self,
        sequences: SearchSequences,
        groups: list[Beams],
        length_penalty: float,
        diversity_penalty: float,
        max_tokens: int,
        stop: Sequence[str],
    ) -> None:
        self._sequences = sequences
        self._groups = groups
        self._length_penalty = length_penalty
        self._penalty = diversity_penalty
        self._max_tokens = max_tokens
        self._stop = stop
        # With a diversity penalty a token may fall behind as many others as there are other beams.
        self._best_scores = BestScores(
            groups[0].n_kept + (len(groups) * groups[0].width if diversity_penalty else 0)
        )
        self._running: list[list[SearchNode]] = [[sequences.root] for _ in groups]
        self._reasons: dict[SearchNode, str] = {}

    def run(self) -> None:
        sequences = self._sequences
        with sequences.ctx.lock:
            root = self._best_scores(sequences.branch.sequence)
        continuations: list[list[Scored]] = [[root] for _ in self._groups]
        for n_tokens in range(1, self._max_tokens + 1):
            self._choose(continuations, n_tokens)
            if sequences.end_step() or not any(self._running):
                return
            nodes = [node for group in self._running for node in group]
            try:
                read = iter(
                    sequences.advance(nodes, lambda _, sequence: self._best_scores(sequence))
                )
            except DecodeInterruptedError as error:
                sequences.was_cancelled(error)
                return
            continuations = [[next(read) for _ in group] for group in self._running]

    def _choose(self, continuations: Sequence[Sequence[Scored]], n_tokens: int) -> None:
        """Let each group choose its next beams, one group after another."""
        taken: Counter[int] = Counter()
        for i, group in enumerate(self._groups):
            if group.is_done or not self._running[i]:
                self._running[i] = []
                continue
            offered = [scored.best for scored in continuations[i]]
            if self._penalty:
                offered = [
                    [(token, score - self._penalty * taken[token]) for token, score in best]
                    for best in offered
                ]
            chosen = group.choose(offered)
            nodes = self._nodes(self._running[i], continuations[i], chosen, n_tokens)
            stops = [self._stops(node, n_tokens) for node in nodes]
            running = group.advance(chosen, stops, nodes)
            kept = [nodes[j] for j in running]
            self._running[i] = [] if group.is_done else kept
            taken.update(chosen[j].token for j in running)

    def _nodes(
        self,
        parents: Sequence[SearchNode],
        continuations: Sequence[Scored],
        chosen: Sequence[Candidate],
        n_tokens: int,
    ) -> list[SearchNode]:
        nodes = []
        for score, beam, token in chosen:
            logprob = continuations[beam].logprobs[token]
            nodes.append(self._sequences.child(parents[beam], [token], [logprob]))
            nodes[-1].score = score / n_tokens**self._length_penalty
        return nodes

    def _stops(self, node: SearchNode, n_tokens: int) -> bool:
        """Return whether the text ends at ``node``, and remember why."""
        if self._sequences.ctx.model.is_eog(node.tokens[0]) or completes_stop(node, self._stop):
            self._reasons[node] = "stop"
        elif n_tokens == self._max_tokens:
            self._reasons[node] = "length"
        return node in self._reasons

    def hypotheses(self) -> list[Hypothesis]:
        """Return all finished beams, best first; and those still running, if the search was cancelled."""
        ended: list[tuple[float, SearchNode]] = []
        for group in self._groups:
            ended += [(f.final, f.key) for f in group.finished if isinstance(f.key, SearchNode)]
        ended.sort(key=lambda pair: -pair[0])
        if self._sequences.is_cancelled:
            running = [
                (node.score, node) for group in self._running for node in group if node.tokens
            ]
            ended += sorted(running, key=lambda pair: -pair[0])
        model = self._sequences.ctx.model
        return [
            hypothesis(model, node, self._stop, score, self._reasons.get(node, "cancelled"))
            for score, node in ended
        ]
