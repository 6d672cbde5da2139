"""A text in chunks: what is checked of it, and the losses of as many chunks as fit into a decode."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from ..branch import Branch, BranchStore
from ..context import Context
from ..context.context import text_context
from ..context.logits import LogitsRow
from ..errors import CacheFullError, ConfigError
from ..model import Model, TokenIds, token_list

__all__ = ["about", "check_room", "check_same", "read_chunks", "text_tokens", "with_bos"]

Floats = npt.NDArray[np.float64]
# Called with the index of a chunk, that of one of its tokens, and the logits after it, which are valid
# until it returns.
Visit = Callable[[int, int, LogitsRow], None]


def text_tokens(ctx: Context, text: str | TokenIds, window: int) -> list[int]:
    """Return the tokens of a text as llama-perplexity has them, control tokens in it read as text.

    Raises:
        ConfigError: there are none.
        CacheFullError: ``ctx`` has no room for a window.
        TokenizeError: an id that is not in the vocabulary.
    """
    model = text_context("ctx", ctx).model
    check_room(ctx, window)
    if isinstance(text, str):
        tokens = model.tokenize(text) if text else []
    else:
        tokens = token_list(text)
        model.check_tokens(tokens)
    if not tokens:
        raise ConfigError("the text is empty: there is nothing to score")
    return tokens


def with_bos(model: Model, chunks: Sequence[list[int]]) -> Sequence[list[int]]:
    """Return chunks whose first token is replaced by BOS, if the model begins every text with it."""
    begin = model.tokenize("")[:1]
    return [[*begin, *chunk[1:]] for chunk in chunks] if begin == [model.bos] else chunks


def check_room(ctx: Context, window: int) -> None:
    """Raise CacheFullError if a sequence of ``ctx`` has no room for a window."""
    if window - 1 > ctx.n_ctx_seq:
        raise CacheFullError(
            f"a window of {window} tokens does not fit into a context of {ctx.n_ctx_seq}",
            hint="open the context with a larger n_ctx, or choose a smaller window",
        )


def check_same(found: object, given: object, names: Sequence[str]) -> None:
    """Raise ConfigError unless ``given``, which is to be resumed, has the same attributes."""
    for name in names:
        ours, theirs = getattr(found, name), getattr(given, name)
        if ours != theirs:
            raise ConfigError(
                f"what is to be resumed has another {name}: {theirs}, not {ours}",
                hint="resume with the same text, model and settings",
            )


def about(ctx: Context, tokens: Sequence[int]) -> tuple[str, str]:
    """Return what a number is of: a hash of the text, and the model's fingerprint with the K/V type."""
    text = hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()[:16]
    return text, f"{ctx.model.fingerprint} {ctx.kv_type}"


def read_chunks(
    ctx: Context,
    chunks: Sequence[list[int]],
    firsts: Sequence[int],
    start: int,
    visit: Visit | None,
) -> list[Floats]:
    """Return the losses, -log p of tokens in nats, of as many chunks as fit into a decode.

    They are read from empty sequences, and nothing is left.

    Args:
        ctx: has room for a chunk, see `check_room`.
        chunks: token ids; none is longer than those before it.
        firsts: for each chunk the index of the token before the first one that is scored.
        start: the index of the chunk to begin with.
        visit: called for each token that is scored.
    """
    size = len(chunks[start])
    n = min(ctx.n_seq_free, ctx.usage().cells_free // size, ctx.n_batch // size)
    if not ctx.kv_cache.is_placement_exact:
        n = 1  # what is computed in f16 depends on which cells a text has
    group = range(start, min(start + max(1, n), len(chunks)))
    losses = {i: np.empty(len(chunks[i]) - 1 - firsts[i]) for i in group}
    with ExitStack() as stack:
        numbers = {stack.enter_context(Branch.create(ctx)): i for i in group}

        def show(branch: Branch, i: int, row: LogitsRow) -> None:
            number = numbers[branch]
            losses[number][i - firsts[number]] = -row.logprob(chunks[number][i + 1])
            if visit is not None:
                visit(number, i, row)

        texts = {branch: chunks[i][:-1] for branch, i in numbers.items()}
        BranchStore(ctx).read(texts, show, {branch: firsts[i] for branch, i in numbers.items()})
    return list(losses.values())
