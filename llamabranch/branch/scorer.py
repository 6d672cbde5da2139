"""Scores of texts: ``score``, and ``read`` for callers that need the rows of logits themselves.

All texts become one tree of tokens, so a common beginning is decoded once. The tree is processed
depth first, in groups that fit into the free cells and sequences. If sequences can share cells, a
group is decoded as a tree: a token belongs to the sequences of all texts that contain it. In other
memory a group is decoded level by level, and the sequences of each level are copied. The last token
of a text is not decoded. Each row is read as soon as it is computed. Existing texts do not change,
and nothing is left in the cache. In an exact context the numbers do not depend, to the
bit, on which texts are scored together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..arguments import choice
from ..context import Context
from ..context.logits import LogitsRow, TokenScore
from ..context.prefix_cache import n_common
from ..context.runner import Batch
from ..errors import BranchStateError, ConfigError
from ..generation.text import Text
from ..model import Model, TokenIds, token_list

__all__ = [
    "Cost",
    "Visit",
    "Wanted",
    "continuation",
    "log_likelihood",
    "perplexity",
    "read",
    "score",
]

# A group fills at most this many decodes. A larger group leaves fewer decodes half empty, but needs
# more cells.
_DECODES = 4
# If sharing takes a decode of its own, a common beginning of fewer tokens is not worth it.
_LEAST_SHARED = 8

# Called with the number of a text, the index of one of its tokens, and the logits before that token,
# which are valid until it returns.
Visit = Callable[[int, int, LogitsRow], None]


class Wanted(NamedTuple):
    """A text to score.

    Attributes:
        after: the text that it continues, which is not empty; None = it stands alone.
        tokens: valid ids.
        first: the index of the first token to score; at least 1 if it stands alone.
    """

    after: Text | None
    tokens: Sequence[int]
    first: int = 0


class Cost(NamedTuple):
    """How many tokens were decoded, and in how many sequences at a time.

    The sequences of `Wanted.after` do not count.
    """

    n_tokens: int
    n_sequences: int


def continuation(model: Model, text: str | TokenIds) -> list[int]:
    """Return the token ids of a text to score; a string is tokenized by itself.

    Raises:
        ConfigError: there are no tokens. TokenizeError: a bad id, or text that cannot be tokenized.
    """
    tokens = token_list(model.tokenize(text, add_special=False) if isinstance(text, str) else text)
    if not tokens:
        raise ConfigError("nothing to score: no tokens")
    model.check_tokens(tokens)
    return tokens


def perplexity(text: Text, since: str) -> float:
    """Return the perplexity of the generated tokens of a text; see `Branch`."""
    surprisals = _surprisals(text, since)
    if not surprisals:
        raise BranchStateError(
            f"no token was generated since the {since}: there is no perplexity",
            hint="generate or extend first; log_likelihood() is 0 there",
        )
    try:
        return math.exp(math.fsum(surprisals) / len(surprisals))
    except OverflowError:
        return math.inf


def log_likelihood(text: Text, since: str) -> float:
    """Return the log-likelihood of the generated tokens of a text, nats; see `Branch`."""
    try:
        return math.fsum(-surprisal for surprisal in _surprisals(text, since))
    except OverflowError:
        return -math.inf


def _surprisals(text: Text, since: str) -> list[float]:
    choice("since", since, ("fork", "prompt"))
    start = text.fork_position if since == "fork" else 0
    positions = text.generated_positions(max(start, 1))  # nothing predicts the very first token
    surprisals = [text.surprisals[position - text.n_prompt] for position in positions]
    if any(map(math.isnan, surprisals)):
        # Tokens of ``append_unscored`` have NaN, which would make any comparison false.
        raise BranchStateError(
            f"{sum(map(math.isnan, surprisals))} of {len(surprisals)} tokens have no surprisal",
            hint="they were appended without their logits; extend a new branch with them",
        )
    return surprisals


def score(ctx: Context, wanted: Sequence[Wanted], *, top: int = 0) -> list[list[TokenScore]]:
    """Return for each text the scores of its tokens, with the ``top`` most probable ones.

    Hold the lock if a text continues another one. Raises the errors of `read`.
    """
    scores: list[list[TokenScore]] = [[] for _ in wanted]

    def visit(number: int, i: int, row: LogitsRow) -> None:
        scores[number].append(row.score(wanted[number].tokens[i], ctx.model, top))

    read(ctx, wanted, visit)
    return scores


def read(
    ctx: Context,
    wanted: Sequence[Wanted],
    visit: Visit,
    done: Callable[[int], None] | None = None,
) -> Cost:
    """Call ``visit`` with the logits before each token to score, in the order of each text.

    ``done`` is called with the number of a text after all its tokens were visited, between two decodes.
    Hold the lock if a text continues another one.

    Raises:
        CacheFullError: a text is longer than the free cells. SequencesExhaustedError: this memory needs a
            free sequence. BranchStateError, DecodeError, and errors of ``visit`` and ``done``:
            all sequences are returned.
    """
    reading = _Reading(ctx, wanted, visit, done)
    reading.run()
    return Cost(reading.n_tokens, reading.n_sequences)


class _Base(NamedTuple):
    """A sequence with the tokens that texts continue; -1 for texts that stand alone."""

    seq_id: int = -1
    tokens: Sequence[int] = ()


class _Text:
    """A text with the tokens before it; ``next`` is the index of the next token to score."""

    def __init__(self, number: int, wanted: Wanted) -> None:
        after = self.after = wanted.after
        self.number = number
        self.base = _Base() if after is None else _Base(after.seq_id, after.shown)
        self.start = len(self.base.tokens)
        self.tokens = [*self.base.tokens, *wanted.tokens]
        self.next = self.start + wanted.first

    @property
    def is_done(self) -> bool:
        return self.next >= len(self.tokens)


class _Path:
    """Tokens to decode: its longest text without the last token.

    The tokens of its other texts, without their final ones, are prefixes of these.
    """

    def __init__(self, text: _Text, n_shared: int) -> None:
        self.tokens = text.tokens[:-1]
        self.texts = [text]
        self.n_shared = n_shared  # tokens shared with the path before it


class _Stretch(NamedTuple):
    """Tokens [start, end) that the paths [low, high) have in common; ``base`` comes before them."""

    base: _Base
    low: int
    high: int
    start: int
    end: int


class _Reading:
    """One call of ``read``."""

    def __init__(
        self,
        ctx: Context,
        wanted: Sequence[Wanted],
        visit: Visit,
        done: Callable[[int], None] | None,
    ) -> None:
        self.n_tokens = self.n_sequences = 0
        self._ctx = ctx
        self._visit = visit
        self._done = done
        self._can_draft = ctx.kv_cache.can_draft
        self._is_tree = self._can_draft and not ctx.kv_cache.forks_copy
        self._least = 1 if self._is_tree else _LEAST_SHARED
        self._texts = [_Text(i, text) for i, text in enumerate(wanted)]
        self._paths: list[_Path] = []
        self._n_held = 0
        self._finished = [text.number for text in self._texts if text.is_done]

    def run(self) -> None:
        """Read everything."""
        by_base: dict[int, list[_Text]] = {}
        for text in self._texts:
            by_base.setdefault(text.base.seq_id, []).append(text)
        roots: list[_Stretch] = []
        for texts in by_base.values():
            base, after, start = texts[0].base, texts[0].after, texts[0].start
            if after is not None:  # the logits after it are known
                after.check_usable()
                after.settle()
                row = after.logits_row()
                for text in texts:
                    self._show(text, start, row)
            low = len(self._paths)
            self._add_paths(start, [text for text in texts if not text.is_done])
            roots += self._nodes(base, low, len(self._paths), start)
        self._report()
        self._walk(roots)

    def _add_paths(self, start: int, texts: Sequence[_Text]) -> None:
        """Add the paths of texts with the same base, which has ``start`` tokens."""
        last: _Path | None = None
        for text in sorted(texts, key=lambda text: text.tokens[:-1]):
            tokens = text.tokens[:-1]
            n = start if last is None else n_common(last.tokens, tokens)
            if last is not None and n == len(last.tokens):  # this one continues it
                last.tokens = tokens
                last.texts.append(text)
            else:
                last = _Path(text, n)
                self._paths.append(last)

    def _nodes(self, base: _Base, low: int, high: int, start: int) -> list[_Stretch]:
        """Return the nodes of the paths [low, high), beginning at ``start``."""
        paths, least = self._paths, start + self._least
        cuts = [i for i in range(low, high) if i == low or paths[i].n_shared < least]
        stretches = []
        for a, b in pairwise([*cuts, high]):
            shared = (paths[i].n_shared for i in range(a + 1, b))
            stretches.append(_Stretch(base, a, b, start, min(shared, default=len(paths[a].tokens))))
        return stretches

    def _below(self, node: _Stretch, base: _Base) -> list[_Stretch]:
        if node.high - node.low == 1:
            return []
        return self._nodes(base, node.low, node.high, node.end)

    # -- groups ------------------------------------------------------------------------------------

    def _walk(self, nodes: Sequence[_Stretch]) -> None:
        """Read all nodes at and below ``nodes``, in groups that fit."""
        for group in self._groups(nodes):
            node = group[0]
            if len(group) > 1 or node.high - node.low == 1 or self._fits(group):
                self._read_group(group)
            elif self._n_free() >= (1 if self._can_draft else 2):
                self._read_prefix(node)
            else:  # no sequence is left for the shared part, so it is decoded again
                for i in range(node.low, node.high):
                    end = len(self._paths[i].tokens)
                    self._read_group([_Stretch(node.base, i, i + 1, node.start, end)])

    def _groups(self, nodes: Sequence[_Stretch]) -> Iterator[list[_Stretch]]:
        group: list[_Stretch] = []
        for node in nodes:
            if group and not self._fits([*group, node]):
                yield group
                group = []
            group.append(node)
        if group:
            yield group

    def _fits(self, group: Sequence[_Stretch]) -> bool:
        cells = min(self._ctx.kv_cache.n_free, _DECODES * self._ctx.n_batch)
        n_in_place = len({node.base.seq_id for node in group} - {-1}) if self._can_draft else 0
        n_leaves = sum(node.high - node.low for node in group)
        return self._n_needed(group) <= cells and n_leaves <= self._n_free() + n_in_place

    def _n_free(self) -> int:
        return self._ctx.sequences.count_free()

    def _n_needed(self, group: Sequence[_Stretch]) -> int:
        """Return the most tokens that may be decoded; short shared parts may be decoded twice."""
        n = 0
        for node in group:
            for i in range(node.low, node.high):
                path = self._paths[i]
                shared = path.n_shared - self._least + 1 if i > node.low else 0
                n += len(path.tokens) - max(node.start, shared)
        return n

    def _read_prefix(self, node: _Stretch) -> None:
        """Read a node by itself into its own sequence, and then everything below it."""
        ctx = self._ctx
        with ctx.lock:
            self._make_room(node.end - node.start)
            seq_id = ctx.sequences.allocate(self)
            self._n_held += 1
        try:
            with ctx.lock:
                self._share(node.base, seq_id)
                self._decode([node], {node.low: seq_id})
            self._report()
            prefix = _Base(seq_id, self._paths[node.low].tokens[: node.end])
            self._walk(self._below(node, prefix))
        finally:
            self._n_held -= 1
            ctx.sequences.free(seq_id)

    def _read_group(self, group: Sequence[_Stretch]) -> None:
        """Read nodes and all below them.

        If the memory allows it, the first path after a base uses the base's own sequence.
        """
        ctx, seqs = self._ctx, dict[int, int]()
        as_tree = self._is_tree and any(node.high - node.low > 1 for node in group)
        in_place: dict[int, int] = {}
        with ctx.lock:
            self._make_room(self._n_needed(group))
            try:
                for node, i in [
                    (stretch, i) for stretch in group for i in range(stretch.low, stretch.high)
                ]:
                    seq_id = node.base.seq_id
                    if self._can_draft and seq_id not in (-1, *in_place):
                        seqs[i], in_place[seq_id] = seq_id, len(node.base.tokens)
                        ctx.kv_cache.prepare(seq_id, len(self._paths[i].tokens))
                        continue
                    seqs[i] = ctx.sequences.allocate(self)
                    if as_tree or i == node.low:
                        self._share(node.base, seqs[i])
                n_allocated = len(seqs) - len(in_place) + self._n_held
                self.n_sequences = max(self.n_sequences, n_allocated)
                self._decode_all(group, seqs, as_tree=as_tree)
            finally:
                for seq_id in seqs.values():
                    if seq_id in in_place:
                        ctx.kv_cache.cut(seq_id, in_place[seq_id])
                    else:
                        ctx.sequences.free(seq_id)
        self._report()

    def _decode_all(
        self, group: Sequence[_Stretch], seqs: dict[int, int], *, as_tree: bool
    ) -> None:
        """Decode nodes and all below them: as a tree, or level by level."""
        if as_tree:
            nodes, waiting = [], [*reversed(group)]
            while waiting:
                nodes.append(waiting.pop())
                waiting += reversed(self._below(nodes[-1], nodes[-1].base))
            self._decode(nodes, seqs, as_tree=True)
            return
        level = [*group]
        while level:
            self._decode(level, seqs)
            above, level = level, []
            for node in above:
                for child in self._below(node, node.base):
                    if child.low != node.low:
                        self._ctx.kv_cache.fork(seqs[node.low], seqs[child.low])
                    level.append(child)

    def _decode(
        self, nodes: Sequence[_Stretch], seqs: dict[int, int], *, as_tree: bool = False
    ) -> None:
        """Decode the tokens of ``nodes``.

        Each node is decoded in the sequence of its first path; with ``as_tree`` in the sequences
        of all its paths.
        """
        batch, shown = Batch(), list[tuple[list[_Text], int]]()
        for node in nodes:
            paths = self._paths[node.low : node.high]
            texts = [text for path in paths for text in path.texts if not text.is_done]
            first = min((text.next - 1 for text in texts), default=node.end)
            first = min(max(node.start, first), node.end)  # the position of the first row
            tokens = paths[0].tokens[node.start : node.end]
            if as_tree:
                members = [seqs[i] for i in range(node.low, node.high)]
                batch.add(
                    members[0], tokens, first - node.start, position=node.start, members=members
                )
            else:
                batch.add(seqs[node.low], tokens, first - node.start)
            shown += [(texts, position) for position in range(first, node.end)]

        def show(n_before: int, rows: list[LogitsRow]) -> None:
            targets = shown[n_before : n_before + len(rows)]
            for (texts, position), row in zip(targets, rows, strict=True):
                for text in texts:
                    self._show(text, position + 1, row)

        batch.decode(self._ctx.decoder, read=show)
        self.n_tokens += len(batch.entries)

    def _show(self, text: _Text, i: int, row: LogitsRow) -> None:
        """Visit ``row``, the logits before token ``i``, if this token of ``text`` is next."""
        if text.next == i < len(text.tokens):
            self._visit(text.number, i - text.start, row)
            text.next = i + 1
            if text.is_done:
                self._finished.append(text.number)

    def _report(self) -> None:
        while self._finished:
            number = self._finished.pop(0)
            if self._done is not None:
                self._done(number)

    def _share(self, base: _Base, seq_id: int) -> None:
        if base.seq_id >= 0:
            self._ctx.kv_cache.fork(base.seq_id, seq_id, len(base.tokens))

    def _make_room(self, n: int) -> None:
        self._ctx.decoder.make_room(min(n, self._ctx.kv_cache.n_free))
