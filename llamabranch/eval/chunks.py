"""A text cut into chunks of one length, as llama-perplexity cuts it, and their logits one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..branch import Branch, BranchStore
from ..context import Context
from ..context.logits import LogitsRow
from ..errors import CacheFullError, ConfigError
from ..model import Model, TokenIds, token_list

__all__ = ["bos_of", "check_room", "check_same", "cut", "digest", "read_chunks", "text_tokens"]


def text_tokens(model: Model, text: str | TokenIds) -> list[int]:
    """Return the tokens of a text as llama-perplexity has them, control tokens in it read as text.

    Raises:
        ConfigError: there are none.
        TokenizeError: an id that is not in the vocabulary.
    """
    if isinstance(text, str):
        tokens = model.tokenize(text) if text else []
    else:
        tokens = token_list(text)
        model.check_tokens(tokens)
    if not tokens:
        raise ConfigError("the text is empty: there is nothing to score")
    return tokens


def bos_of(model: Model) -> int | None:
    """Return the BOS token if the model begins every text with it, else None."""
    begins = model.tokenize("")
    return model.bos if begins and begins[0] == model.bos else None


def cut(tokens: Sequence[int], window: int, chunks: int | None) -> list[list[int]]:
    """Return the first ``chunks`` chunks of ``window`` tokens; what is left at the end is not used.

    Raises:
        ConfigError: fewer tokens than two windows hold.
    """
    if len(tokens) < 2 * window:
        raise ConfigError(
            f"a text of {len(tokens)} tokens is too short: a window of {window} needs {2 * window}",
            hint="give a longer text, or a smaller window",
        )
    n = len(tokens) // window
    n = n if chunks is None else min(n, chunks)
    return [list(tokens[i * window : (i + 1) * window]) for i in range(n)]


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


def digest(tokens: Sequence[int]) -> str:
    """Return a short hash of token ids, by which a text is recognised."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()[:16]


def read_chunks(
    ctx: Context,
    chunks: Sequence[Sequence[int]],
    first: int,
    visit: Callable[[int, int, LogitsRow], None],
) -> Iterator[int]:
    """Decode chunks and show the logits of their tokens from ``first`` on, but for their last token.

    As many chunks as fit into a decode share it. They are read from empty sequences, and nothing is left.

    Args:
        ctx: has room for a chunk, see `check_room`.
        chunks: token ids.
        first: the index of the first token whose logits are shown.
        visit: called with the index of a chunk, that of one of its tokens, and the logits after it, which
            are valid until it returns.

    Yields:
        how many chunks are done, after each decode or so.
    """
    store = BranchStore(ctx)
    done = 0
    while done < len(chunks):
        size = len(chunks[done])
        free = max(1, min(ctx.n_seq_free, ctx.usage().cells_free // size))
        n = min(free, max(1, ctx.n_batch // size), len(chunks) - done)
        branches: dict[Branch, int] = {}
        try:
            for number in range(done, done + n):
                branches[Branch.create(ctx)] = number

            def show(
                branch: Branch, i: int, row: LogitsRow, at: dict[Branch, int] = branches
            ) -> None:
                visit(at[branch], i, row)

            store.read(
                {branch: chunks[number][:-1] for branch, number in branches.items()},
                show,
                dict.fromkeys(branches, first),
            )
        finally:
            for branch in branches:
                branch.prune()
        done += n
        yield done
