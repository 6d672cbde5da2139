"""Several sampled texts whose answers vote (self-consistency), until the vote is decided."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from ..arguments import flag, function, real, whole
from ..branch import Branch
from ..errors import ConfigError, LlamaBranchWarning, warn
from ..model import stop_strings
from ..model.thoughts import answer_in
from ..sampling.noise import uniform
from ..speculative import Drafter
from .checks import MOST_TEXTS, check_start, common_noise, first_seed, token_limit
from .continuations import Continuation, Continuations, numbered
from .result import Hypothesis, SearchResult
from .sequences import OnStep, SearchSequences

__all__ = ["chance_to_stay", "last_match", "vote"]

Answer = str | float  # bool is a number

_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)?(\.\d*)?([eE][+-]?\d+)?")
_WIDTH = 4  # texts at a time, where a vote may be decided early
_N_CONFIDENCE = 20  # tokens whose log-probabilities tell how confident the model is


def vote(
    branch: Branch,
    answer: Callable[[str], Answer | None],
    n: int = 16,
    max_tokens: int | None = 256,
    *,
    adaptive: bool = False,
    agreement: float = 0.75,
    confidence: float | None = None,
    width: int | None = None,
    keep: float = 1.0,
    entropy: float = 0.0,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    drafter: Drafter | None = None,
    on_step: OnStep | None = None,
) -> SearchResult:
    """Sample ``n`` texts and let their answers vote (self-consistency, Wang et al. 2022, 2203.11171).

    Args:
        branch: has read the prompt; it is left as it is.
        answer: a function that returns the answer in a text, as text, number or bool; None = it has none
            and does not vote. A text for which it raises does not vote either. It gets a text without
            the thought that it begins with.
        n: how many texts.
        max_tokens: the most tokens of each.
        adaptive: begin with two texts and double their number until the leading answer has
            ``agreement`` of them, or there are ``n``.
        agreement: that share, above 0, at most 1.
        confidence: stop as soon as the leading answer is known. 1.0 = when the texts that are left cannot
            change it, so the answer is that of all ``n``; below 1, above 0.5 = when it will stay in the
            lead with this probability, if the texts that are left choose between the two leading answers
            as those before did (for large ``n`` the rule of Aggarwal et al. 2023, 2305.11860).
        width: the most texts that are generated at a time, those that are equal so far counted once;
            None = 4 with ``confidence``, else as many as there are sequences for. It changes no text.
        keep: below 1, give up a text where the model is less confident than in this share of a quarter
            of the texts, at least two, which come first (DeepConf, Fu et al. 2025, 2508.15260; the
            lowest mean of 16 tokens counts). A text that is given up does not vote; it comes last, as
            "uncertain".
        entropy, stop, seed, drafter, on_step: as for ``best_of_n``.

    Returns:
        all texts, those with the most frequent answer first, the most probable of them at the front;
        ``answer`` is the most frequent one, ``votes`` counts them; ``score`` is the share of the texts
        counted that have the same one. Of equally frequent answers the seed decides which comes first.
        Numbers that are equal, such as 1 and 1.00, are one answer; ``answer_forms`` has the texts in
        which it was given. With ``confidence``: the texts that were begun; those that did not vote
        because the vote was decided come last, as "decided".

    Raises:
        ConfigError: a value out of range. BranchStateError, CapacityError, DecodeError: all sequences
            are returned.

    Warns:
        LlamaBranchWarning: no text has an answer, or ``answer`` has raised something.
    """
    check_start(branch, on_step, drafter)
    n = whole("n", n, 1, MOST_TEXTS)
    max_tokens = token_limit(max_tokens)
    function("answer", answer)
    if width is not None:
        width = whole("width", width, 1, MOST_TEXTS)
    elif confidence is not None:
        width = _WIDTH
    stop, seed = stop_strings(stop), first_seed(branch, seed)
    common = common_noise(entropy, seed, drafter)
    rule = _StopRule.of(n, adaptive, agreement, confidence, keep, common is not None)
    ballot = _Ballot(lambda text: answer(answer_in(branch.ctx.model, text)), n, confidence)
    lines: list[Continuation] = []
    lowest = -math.inf  # confidence, below which a text is given up

    def is_over() -> bool:
        texts.break_off("uncertain", lambda line: line.is_less_confident(lowest))
        return sequences.end_step() or ballot.decides(lines)

    n_top = _N_CONFIDENCE if keep < 1 else 0
    with (
        SearchSequences(branch, on_step) as sequences,
        Continuations(sequences, drafter, common, n_top) as texts,
    ):
        if width is not None:
            sequences.capacity = min(sequences.capacity, width)
        wanted = rule.first
        while True:
            new = numbered(sequences.root, range(len(lines), wanted), max_tokens, stop, seed)
            lines += new
            texts.run(new, after=is_over)
            if not ballot.decides(new):
                ballot.count(line for line in new if line.output.finish_reason != "uncertain")
            leads = adaptive and ballot.leaders()[0] >= rule.agreement * len(lines)
            if wanted == n or sequences.is_cancelled or leads:
                break
            lowest = rule.lowest(lines)
            wanted = min(n, 2 * wanted) if adaptive else n
    return _result(sequences, ballot, lines, seed)


class _StopRule(NamedTuple):
    """When a vote, or one of its texts, ends early; see ``vote``.

    Attributes:
        first: how many texts are generated before others begin.
        agreement, keep: as ``vote`` has them.
    """

    first: int
    agreement: float
    keep: float

    @classmethod
    def of(
        cls,
        n: int,
        adaptive: bool,
        agreement: float,
        confidence: float | None,
        keep: float,
        shares_draws: bool,
    ) -> _StopRule:
        """Return the rule of checked arguments.

        Raises:
            ConfigError: one is out of range, or two do not go together.
        """
        flag("adaptive", adaptive)
        for name, share in (("agreement", agreement), ("keep", keep)):
            if not 0 < real(name, share) <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, not {share!r}")
        if confidence is not None and not 0.5 < real("confidence", confidence) <= 1:
            raise ConfigError(
                f"confidence must be above 0.5 and at most 1, not {confidence!r}",
                hint="1.0 stops when the answer of all texts is known, 0.95 when it is likely",
            )
        if adaptive + (confidence is not None) + (keep < 1) > 1:
            raise ConfigError("give one of adaptive, confidence and keep: all end a vote early")
        if shares_draws and confidence is not None and confidence < 1.0:
            raise ConfigError(
                "confidence below 1 counts on independent texts, which those with entropy are not",
                hint="confidence=1.0 does not",
            )
        first = min(n, 2 if adaptive else max(2, n // 4) if keep < 1 else n)
        return cls(first, agreement, keep)

    def lowest(self, lines: Sequence[Continuation]) -> float:
        """Return the lowest confidence that ``keep`` of the first texts have, nats."""
        if self.keep == 1:
            return -math.inf
        each = (line.lowest_group for line in lines)
        known = sorted((lowest for lowest in each if not math.isnan(lowest)), reverse=True)
        if not known:
            return -math.inf
        return known[max(1, min(len(known), round(self.keep * (len(known) + 1)))) - 1]


def _result(
    sequences: SearchSequences, ballot: _Ballot, lines: Sequence[Continuation], seed: int
) -> SearchResult:
    """Return the texts that were counted, then the others."""
    hypotheses, votes, forms = ballot.ranked(seed)
    for line in lines:
        if line not in ballot.given and line.node is not sequences.root:
            if line.output.finish_reason != "uncertain":
                line.output.break_off("decided")
            hypotheses.append(line.hypothesis(0.0))
            line.node.status = "pruned"
    sequences.root.prune_open()
    return SearchResult(
        hypotheses, sequences.stats, sequences.root, votes=votes, answer_forms=forms
    )


def chance_to_stay(first: int, second: int, n_left: int) -> float:
    """Return the probability that the first of two answers leads when all texts have voted.

    Each text that is left votes for one of the two, for the first one with an unknown probability whose
    prior is uniform: a beta-binomial. A tie counts half.

    Args:
        first, second: their votes so far, ``first`` at least ``second``.
        n_left: how many texts have not voted.
    """
    if first > second + n_left:
        return 1.0
    a, b = first + 1, second + 1
    total = 0.0
    for k in range(n_left + 1):
        ahead = first + k - (second + n_left - k)
        if ahead >= 0:
            log_ways = -math.log(n_left + 1) - _log_beta(k + 1, n_left - k + 1)
            log_p = log_ways + _log_beta(k + a, n_left - k + b) - _log_beta(a, b)
            total += math.exp(log_p) * (0.5 if ahead == 0 else 1.0)
    return total


def _log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


class _Ballot:
    """The answers of texts that have ended, and whether they decide the vote.

    Args:
        answer: the user's.
        n: how many texts there will be.
        confidence: see ``vote``; None = only all texts decide.

    Attributes:
        given: the answer in each text that was counted, None if it has none.
        is_decided: True once the texts that are left need not be counted.
    """

    def __init__(
        self, answer: Callable[[str], Answer | None], n: int, confidence: float | None
    ) -> None:
        self._answer = answer
        self._n = n
        self._confidence = confidence
        self._tally: Counter[Decimal | str] = Counter()
        self._errors: list[Exception] = []
        self.given: dict[Continuation, Answer | None] = {}
        self.is_decided = False

    def count(self, lines: Iterable[Continuation]) -> None:
        """Count texts, whether or not they have ended, once each."""
        for line in lines:
            if line in self.given:
                continue
            try:
                found = _checked(self._answer(line.output.text))
            except Exception as error:  # whatever it raises: the texts have taken time
                self._errors.append(error)
                found = None
            self.given[line] = found
            if found is not None:
                self._tally[_value(found)] += 1

    def leaders(self) -> tuple[int, int]:
        """Return the votes of the two most frequent answers, 0 where there is none."""
        first, second = [*(votes for _, votes in self._tally.most_common(2)), 0, 0][:2]
        return first, second

    def decides(self, lines: Sequence[Continuation]) -> bool:
        """Count the texts that have ended meanwhile; return whether the vote is decided."""
        confidence = self._confidence
        if confidence is None or self.is_decided:
            return self.is_decided
        for line in lines:
            if line in self.given:
                continue
            if line.is_finished:
                self.count([line])
                n_left = self._n - len(self.given)
                stays = chance_to_stay(*self.leaders(), n_left)
                # No vote is decided by the last text: it has ended anyway.
                self.is_decided = n_left > 0 and stays >= confidence
                if self.is_decided:
                    return True
            elif confidence < 1.0:
                return False  # in the order of their numbers: short texts must not decide
        return False

    def ranked(
        self, seed: int
    ) -> tuple[list[Hypothesis], dict[Answer, int], dict[Answer, Counter[str]]]:
        """Return the texts that were counted, best first, the votes for each answer, and its forms."""
        found = self.given
        forms = _forms(given for given in found.values() if given is not None)
        votes = {name: seen.total() for name, seen in forms.items()}
        if self._errors:
            failed = f"answer() has failed for {len(self._errors)} of {len(found)} texts"
            warn(f"{failed}, which do not vote: {self._errors[0]!r}", LlamaBranchWarning)
        elif not votes:
            warn("no text has an answer: answer() has returned None", LlamaBranchWarning)
        # The order of first appearance must not decide between equals: early texts are not better.
        luck = {
            given: uniform(seed, self._n, index=i) for i, given in enumerate(sorted(votes, key=str))
        }
        names = sorted(votes, key=lambda given: (-votes[given], luck[given]))
        rank = {form: i for i, name in enumerate(names) for form in forms[name]}
        place = {line: len(names) if a is None else rank[str(a)] for line, a in found.items()}
        hypotheses = []
        for line in sorted(found, key=lambda line: (place[line], -line.mean_logprob)):
            at = place[line]
            share = votes[names[at]] / len(found) if at < len(names) else 0.0
            hypotheses.append(line.hypothesis(share))
            line.node.status = "finished" if names and at == 0 else "pruned"
        return hypotheses, {a: votes[a] for a in names}, {a: forms[a] for a in names}


def last_match(pattern: str) -> Callable[[str], str | None]:
    """Return what finds the last match of a pattern in a text; of it the first group, if it has one.

    Raises:
        ConfigError: no regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"answer is no regular expression: {error}") from None

    def answer(text: str) -> str | None:
        found = [*compiled.finditer(text)]
        if not found:
            return None
        last = found[-1]
        return last[1] if compiled.groups and last[1] is not None else last[0]

    return answer


def _checked(answer: object) -> Answer | None:
    """Return an answer if it is a text, a number or None; numbers as Python's."""
    if answer is None or isinstance(answer, (str, bool)):
        return answer
    return real("what answer returns, if it is not a text or None,", answer)


def _forms(answers: Iterable[Answer]) -> dict[Answer, Counter[str]]:
    """Return the different answers, each with the texts in which it was given and how often.

    Numbers that are equal are one answer: 1, 1.00 and 1e0, and 1,000 and 1000. It is the one of the most
    frequent text; of equally frequent ones of the shortest, then of the first in the alphabet.
    """
    groups: dict[Decimal | str, Counter[str]] = {}
    given: dict[str, Answer] = {}
    for answer in answers:
        text = str(answer)
        given.setdefault(text, answer)
        groups.setdefault(_value(answer), Counter())[text] += 1
    named = (
        (given[min(seen, key=lambda text: (-seen[text], len(text), text))], seen)
        for seen in groups.values()
    )
    return dict(named)


def _value(answer: Answer) -> Decimal | str:
    """Return the number that an answer is, or else its text."""
    text = str(answer)
    text = {"True": "1", "False": "0"}.get(text, text)  # True is 1, as a key too
    number = text.strip()
    if not _NUMBER.fullmatch(number):
        return text
    try:
        return Decimal(number.replace(",", ""))
    except InvalidOperation:  # no digits, or an exponent of 20
        return text
