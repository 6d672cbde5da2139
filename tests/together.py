"""Several branches in one decode, as the loop of an engine decodes them: for tests of logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llamabranch import Branch, Produced
from llamabranch.context import Context
from llamabranch.context.logits import LogitsRow
from llamabranch.context.runner import Batch


def _decode(ctx: Context, texts: Mapping[Branch, Sequence[int]]) -> list[LogitsRow]:
    """Decode tokens after each branch; return the row of each branch's last token."""
    batch = Batch()
    for branch, tokens in texts.items():
        batch.add(branch.seq_id, tokens)
    return [rows[-1] for rows in ctx.decoder.decode(batch)]


def prefill(ctx: Context, prompts: Mapping[Branch, Sequence[int]]) -> None:
    """Prefill all branches, or none if an error is raised."""
    with ctx.lock:
        for branch, tokens in prompts.items():
            branch.sequence.check_read(tokens, as_prompt=True)
        for (branch, tokens), row in zip(prompts.items(), _decode(ctx, prompts), strict=True):
            branch.sequence.append_prompt(tokens, row)


def commit(ctx: Context, tokens: Mapping[Branch, int]) -> None:
    """Append one token to each branch, or none if an error is raised."""
    with ctx.lock:
        surprisals = {branch: branch.sequence.check_commit(t) for branch, t in tokens.items()}
        rows = _decode(ctx, {branch: [token] for branch, token in tokens.items()})
        for (branch, token), row in zip(tokens.items(), rows, strict=True):
            branch.sequence.append(token, surprisals[branch], row)


def step(ctx: Context, branches: Iterable[Branch]) -> dict[Branch, Produced]:
    """Draw and append one token of each branch; one that drew an EOG token does not change."""
    with ctx.lock:
        produced = {branch: branch.produce() for branch in branches}
        commit(ctx, {branch: p.token for branch, p in produced.items() if not p.is_stop})
        for branch, token in produced.items():
            if token.is_stop:
                branch.sequence.finish_reason = "stop"
        return produced
