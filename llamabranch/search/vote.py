"""Sample several texts and let their answers vote (self-consistency), until the vote is decided."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from statistics import fmean

from ..arguments import function, real, whole
from ..branch import Branch
from ..errors import ConfigError, LlamaBranchWarning, warn
from ..model import stop_strings
from ..model.thoughts import answer_in
from ..request.result import EngineStats, Result
from ..sampling.noise import uniform
from .result import Hypothesis, SearchResult
from .samples import hypothesis, logprobs, sample
from .start import MOST_TEXTS, check_start, first_seed, token_limit

Answer = str | float  # bool is a number

_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)?(\.\d*)?([eE][+-]?\d+)?")
_WIDTH = 4  # texts at a time, if a vote may be decided early


def vote(
    branch: Branch,
    answer: Callable[[str], Answer | None],
    n: int = 16,
    max_tokens: int | None = 256,
    *,
    confidence: float | None = None,
    width: int | None = None,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
) -> SearchResult:
    """Sample ``n`` texts and let their answers vote (self-consistency, Wang et al. 2022, 2203.11171).

    Args:
        branch: a branch that has read the prompt; it does not change.
        answer: a function that gets a text, without the thought at its beginning, and returns its
            answer as text, number or bool. If it returns None or raises an exception, the text does not
            vote.
        n: how many texts.
        max_tokens: the maximum number of tokens of each.
        confidence: 1.0 = stop when the remaining texts cannot change the leading answer, so the answer is
            the same as with all ``n`` texts. None = count all texts. No other values are allowed.
        width: how many texts are generated at a time; None = 4 with ``confidence``, otherwise as many
            as there are sequences. It does not change the texts.
        stop, seed: as for ``best_of_n``.

    Returns:
        all texts. Those with the most frequent answer come first, ordered by probability. ``answer`` is
        the most frequent answer, and ``votes`` has the counts. ``score`` is the share of counted texts
        with the same answer. If several answers are equally frequent, the seed decides. Equal numbers,
        such as 1 and 1.00, count as one answer, in its shortest form. With ``confidence``, only texts
        that have begun are returned; those that did not vote because the vote was already decided come
        last, as "decided".

    Raises:
        ConfigError: a value is out of range. BranchStateError, CapacityError, DecodeError: all
            sequences have been freed.

    Warns:
        LlamaBranchWarning: no text has an answer, or ``answer`` raised an exception.
    """
    n = whole("n", n, 1, MOST_TEXTS)
    max_tokens = token_limit(max_tokens)
    function("answer", answer)
    if width is not None:
        width = whole("width", width, 1, MOST_TEXTS)
    elif confidence is not None:
        width = _WIDTH
    if confidence is not None and real("confidence", confidence) != 1:
        raise ConfigError(
            f"confidence must be 1.0 or None, not {confidence!r}",
            hint="1.0 stops when the remaining texts cannot change the answer",
        )
    stop = stop_strings(stop)
    ballot = _Ballot(lambda text: answer(answer_in(branch.ctx.model, text)), n)

    def is_decided(ended: Sequence[Result]) -> bool:
        return confidence is not None and any(map(ballot.count, ended))

    check_start(branch)
    seed, stats = first_seed(branch, seed), EngineStats()
    texts = sample(branch, stats, n, seed, max_tokens, stop, parallel=width, is_decided=is_decided)
    for text in texts if confidence is None else ():
        ballot.count(text)
    hypotheses, votes = ballot.ranked(texts, seed)
    for text in texts:
        if text.sample not in ballot.given and text.emitted:
            hypotheses.append(hypothesis(replace(text, finish_reason="decided"), 0.0))
    return SearchResult(hypotheses, stats, votes=votes)


class _Ballot:
    """The answers of ``n`` texts; ``given`` has those counted so far, by the text's number."""

    def __init__(self, answer: Callable[[str], Answer | None], n: int) -> None:
        self._answer, self._n = answer, n
        self._tally: Counter[Decimal | str] = Counter()
        self._errors: list[Exception] = []
        self.given: dict[int, Answer | None] = {}

    def count(self, text: Result) -> bool:
        """Count a text; return whether the remaining texts can no longer change the result."""
        answer = None
        try:
            answer = _checked(self._answer(text.text))
        except Exception as error:  # any error: the texts took time and must not be lost
            self._errors.append(error)
        self.given[text.sample] = answer
        if answer is not None:
            self._tally[_value(answer)] += 1
        first, second = [*(n for _, n in self._tally.most_common(2)), 0, 0][:2]
        # The last text decides nothing early, because no others are left.
        return 0 < self._n - len(self.given) < first - second

    def ranked(
        self, texts: Sequence[Result], seed: int
    ) -> tuple[list[Hypothesis], dict[Answer, int]]:
        """Return the texts that were counted, best first, and the votes for each answer."""
        known = [answer for answer in self.given.values() if answer is not None]
        if self._errors:
            failed = f"answer() failed for {len(self._errors)} of {len(self.given)} texts"
            warn(f"{failed}, which do not vote: {self._errors[0]!r}", LlamaBranchWarning)
        elif not known:
            warn("no text has an answer: answer() returned None", LlamaBranchWarning)
        names: dict[Decimal | str, Answer] = {}  # the shortest form of equal numbers
        for answer in sorted(known, key=lambda answer: (len(str(answer)), str(answer))):
            names.setdefault(_value(answer), answer)
        # The order of texts must not decide between equal counts, because earlier texts are not better.
        luck = {value: uniform(seed, self._n, index=i) for i, value in enumerate(names)}
        values = sorted(names, key=lambda value: (-self._tally[value], luck[value]))
        rank = {value: i for i, value in enumerate(values)}
        place = {
            number: len(values) if answer is None else rank[_value(answer)]
            for number, answer in self.given.items()
        }
        shares = [*(self._tally[value] / len(place) for value in values), 0.0]
        counted = [text for text in texts if text.sample in place]
        counted.sort(key=lambda text: (place[text.sample], -fmean(logprobs(text) or [0.0])))
        hypotheses = [hypothesis(text, shares[place[text.sample]]) for text in counted]
        return hypotheses, {names[value]: self._tally[value] for value in values}


def _checked(answer: object) -> Answer | None:
    """Check that an answer is a text, a number or None; turn numbers into Python's types."""
    if answer is None or isinstance(answer, (str, bool)):
        return answer
    return real("what answer returns, if it is not a text or None,", answer)


def _value(answer: Answer) -> Decimal | str:
    """Return an answer as a number if it is one, otherwise as text."""
    text = str(answer)
    text = {"True": "1", "False": "0"}.get(text, text)  # True is 1, as a key too
    number = text.strip()
    if not _NUMBER.fullmatch(number):
        return text
    try:
        return Decimal(number.replace(",", ""))
    except InvalidOperation:  # no digits, or an exponent of 20 digits
        return text
