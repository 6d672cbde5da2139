"""Several sampled texts, of which the best counts: ``best_of_n`` and ``vote``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal, InvalidOperation

from ..arguments import flag, function, real, whole
from ..branch import Branch
from ..errors import ConfigError, LlamaBranchWarning, warn
from ..model import stop_strings
from ..sampling.noise import uniform
from ..speculative import Drafter
from .checks import MOST_TEXTS, check_start, first_seed, token_limit
from .continuations import Boundary, Continuation, Continuations, slot_seed
from .result import Hypothesis, SearchResult
from .sequences import OnStep, SearchSequences

__all__ = ["best_of_n", "vote"]

Answer = str | float  # bool is a number

_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)?(\.\d*)?([eE][+-]?\d+)?")


def best_of_n(
    branch: Branch,
    n: int = 8,
    max_tokens: int | None = 128,
    *,
    score: str | Callable[[Hypothesis], float] = "mean",
    reward: Callable[[str], float] | None = None,
    reject_every: int | None = None,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    drafter: Drafter | None = None,
    on_step: OnStep | None = None,
) -> SearchResult:
    """Sample ``n`` texts with the settings of ``branch`` and return all of them, best first.

    They share the prompt and every decode. The first is the text that ``branch.generate`` would give; all
    depend on the seed and their number alone.

    Args:
        branch: has read the prompt; it is left as it is.
        n: how many texts.
        max_tokens: the most tokens of each; None = until the model ends it or the cache is full.
        score: "mean" = mean log-probability of the tokens, "sum" = that of the text; or a function of a
            hypothesis. Log-probabilities are the model's own, before sampling settings.
        reward: a function of the text, instead of ``score``.
        reject_every: after each so many tokens, drop the worse half of the unfinished texts, until
            one is left. They are returned after all others, as "rejected".
        stop: strings that end a text.
        seed: of the draws; None = that of the branch.
        drafter: proposes tokens; it changes no text.
        on_step: called after each decode with the statistics so far; a true result ends the search, and
            unfinished texts are "cancelled".

    Raises:
        ConfigError: a value out of range. What ``score`` or ``reward`` raises; BranchStateError,
        CapacityError, DecodeError: all sequences are returned.
    """
    check_start(branch, on_step, drafter)
    n = whole("n", n, 1, MOST_TEXTS)
    max_tokens = token_limit(max_tokens)
    if not callable(score) and not (isinstance(score, str) and score in ("mean", "sum")):
        raise ConfigError(f"score must be 'mean', 'sum' or a function, not {score!r:.40}")
    if reward is not None:
        function("reward", reward)
        if score != "mean":
            raise ConfigError("give either score or reward")
    if reject_every is not None:
        reject_every = whole("reject_every", reject_every, 1)
    stop, seed = stop_strings(stop), first_seed(branch, seed)

    def score_of(line: Continuation) -> float:
        if reward is not None:
            return _number(reward(line.output.text), "reward")
        if callable(score):
            return _number(score(line.hypothesis(float("nan"))), "score")
        return line.mean_logprob if score == "mean" else line.node.logprob

    with SearchSequences(branch, on_step) as sequences, Continuations(sequences, drafter) as texts:
        all_lines = _start(sequences, range(n), max_tokens, stop, seed)
        if reject_every is None:
            texts.run(all_lines)
        else:
            running = all_lines
            while running:
                texts.run(running, Boundary(n_tokens=reject_every))
                running = [line for line in running if not line.is_finished]
                ranked = sorted(running, key=score_of, reverse=True)
                for line in ranked[(len(ranked) + 1) // 2 :]:
                    line.output.break_off("rejected")
                    sequences.release(line.node)
                running = [line for line in running if not line.is_finished]
        found = [line.hypothesis(score_of(line)) for line in all_lines]
    # Of equals, the earlier text comes first.
    found.sort(key=lambda h: (h.finish_reason == "rejected", -h.score))
    for hypothesis in found:
        rejected = hypothesis.finish_reason == "rejected"
        hypothesis.node.status = "pruned" if rejected else "finished"
    sequences.root.prune_open()
    return SearchResult(found, sequences.stats, sequences.root)


def vote(
    branch: Branch,
    answer: Callable[[str], Answer | None],
    n: int = 16,
    max_tokens: int | None = 256,
    *,
    adaptive: bool = False,
    agreement: float = 0.75,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    drafter: Drafter | None = None,
    on_step: OnStep | None = None,
) -> SearchResult:
    """Sample ``n`` texts and let their answers vote (self-consistency, Wang et al. 2022, 2203.11171).

    Args:
        branch: has read the prompt; it is left as it is.
        answer: a function that returns the answer in a text, as text, number or bool; None = it has none
            and does not vote. A text for which it raises does not vote either.
        n: how many texts.
        max_tokens: the most tokens of each.
        adaptive: begin with two texts and double their number until the leading answer has
            ``agreement`` of them, or there are ``n``.
        agreement: that share, above 0, at most 1.
        stop, seed, drafter, on_step: as for ``best_of_n``.

    Returns:
        all texts, those with the most frequent answer first, the most probable of them at the front;
        ``answer`` is the most frequent one, ``votes`` counts them; ``score`` is the share of all texts
        that have the same one. Of equally frequent answers the seed decides which comes first. Numbers
        that are equal, such as 1 and 1.00, are one answer; ``answer_forms`` has the texts in which it
        was given.

    Raises:
        ConfigError: a value out of range. BranchStateError, CapacityError, DecodeError: all sequences
            are returned.

    Warns:
        LlamaBranchWarning: no text has an answer, or ``answer`` has raised something.
    """
    check_start(branch, on_step, drafter)
    n = whole("n", n, 1, MOST_TEXTS)
    max_tokens = token_limit(max_tokens)
    flag("adaptive", adaptive)
    agreement = real("agreement", agreement)
    if not 0 < agreement <= 1:
        raise ConfigError(f"agreement must be above 0 and at most 1, not {agreement!r}")
    function("answer", answer)
    stop, seed = stop_strings(stop), first_seed(branch, seed)
    found: list[tuple[Continuation, Answer | None]] = []
    errors: list[Exception] = []

    def answer_in(text: str) -> Answer | None:
        try:
            return _checked(answer(text))
        except Exception as error:  # whatever it raises: the texts have taken time
            errors.append(error)
            return None

    with SearchSequences(branch, on_step) as sequences, Continuations(sequences, drafter) as texts:
        wanted = min(2, n) if adaptive else n
        while True:
            new = _start(sequences, range(len(found), wanted), max_tokens, stop, seed)
            texts.run(new)
            found += [(line, answer_in(line.output.text)) for line in new]
            forms = _forms(given for _, given in found if given is not None)
            votes = {name: seen.total() for name, seen in forms.items()}
            most = max(votes.values(), default=0)
            if wanted == n or sequences.is_cancelled or most >= agreement * len(found):
                break
            wanted = min(n, 2 * wanted)
    if errors:
        failed = f"answer() has failed for {len(errors)} of {len(found)} texts, which do not vote"
        warn(f"{failed}: {errors[0]!r}", LlamaBranchWarning)
    elif not votes:
        warn("no text has an answer: answer() has returned None", LlamaBranchWarning)
    names = {form: name for name, seen in forms.items() for form in seen}
    answered = [(line, None if given is None else names[str(given)]) for line, given in found]
    # The order of first appearance must not decide between equals: early texts are not better.
    luck = {given: uniform(seed, n, index=i) for i, given in enumerate(sorted(votes, key=str))}
    ranked = sorted(votes, key=lambda given: (-votes[given], luck[given]))
    rank = {given: i for i, given in enumerate(ranked)}
    hypotheses = []
    order = sorted(
        answered,
        key=lambda pair: (
            len(rank) if pair[1] is None else rank[pair[1]],
            -pair[0].mean_logprob,
        ),
    )
    for line, given in order:
        share = votes[given] / len(found) if given is not None else 0.0
        hypotheses.append(line.hypothesis(share))
        is_first = bool(ranked) and given == ranked[0]
        line.node.status = "finished" if is_first else "pruned"
    sequences.root.prune_open()
    tally = {given: votes[given] for given in ranked}
    answers = {given: forms[given] for given in ranked}
    return SearchResult(
        hypotheses, sequences.stats, sequences.root, votes=tally, answer_forms=answers
    )


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
        value = _value({"True": "1", "False": "0"}.get(text, text))  # True is 1, as a key too
        groups.setdefault(value, Counter())[text] += 1
    named = (
        (given[min(seen, key=lambda text: (-seen[text], len(text), text))], seen)
        for seen in groups.values()
    )
    return dict(named)


def _value(text: str) -> Decimal | str:
    """Return the number that ``text`` is, or else ``text``."""
    number = text.strip()
    if not _NUMBER.fullmatch(number):
        return text
    try:
        return Decimal(number.replace(",", ""))
    except InvalidOperation:  # no digits, or an exponent of 20
        return text


def _start(
    sequences: SearchSequences,
    numbers: Sequence[int],
    max_tokens: int | None,
    stop: Sequence[str],
    seed: int,
) -> list[Continuation]:
    """Return continuations of the root, one for each number."""
    return [Continuation(sequences.root, slot_seed(seed, i), max_tokens, stop) for i in numbers]


def _number(value: object, what: str) -> float:
    """Return what a function of the user's has returned, if it can be compared."""
    found = real(f"what {what} returns", value)
    if found != found:
        raise ConfigError(f"{what} has returned NaN")
    return found
