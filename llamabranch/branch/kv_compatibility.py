"""What the K/V of a sequence depends on besides its tokens: do two contexts compute the same K/V?"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..context import Context
from ..errors import SnapshotError

__all__ = ["KVCompatibility"]


@dataclass(frozen=True)
class KVCompatibility:
    """What the K/V of a sequence depends on besides its tokens."""

    fingerprint: str
    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    kv_type: str
    flash_attention: bool | None
    rope: str
    model: str = ""  # its file's name, for messages

    @classmethod
    def of(cls, ctx: Context) -> KVCompatibility:
        """Return the context's own.

        Raises:
            SnapshotError: the model's file is gone.
        """
        layout = ctx.kv_cache.state_layout
        model = ctx.model
        try:
            fingerprint = model.fingerprint
        except OSError as error:
            raise SnapshotError(f"the model's file cannot be read any more: {error}") from error
        return cls(
            fingerprint=fingerprint,
            architecture=model.architecture,
            n_layer=model.n_layer,
            n_embd=model.n_embd,
            n_vocab=model.n_vocab,
            kv_type=ctx.kv_type,
            flash_attention=None if layout is None else layout.flash_attention,
            rope=_rope(ctx),
            model=model.path.name,
        )

    def check(self, ctx: Context) -> None:
        """Raise SnapshotError unless ``ctx`` computes the same K/V."""
        ours = asdict(KVCompatibility.of(ctx))
        for name, theirs in asdict(self).items():
            if name != "model" and theirs != ours[name]:
                setting = name if name in ("kv_type", "flash_attention", "rope") else None
                if name == "fingerprint":
                    name, theirs = "model", self.model or "its name was not saved"
                raise SnapshotError(
                    f"the snapshot is of another {name}: {theirs!s:.80}, this context has {ours[name]}",
                    setting=setting,
                    hint="create the context with the model and settings it was saved with",
                )


def _rope(ctx: Context) -> str:
    """Return the RoPE settings: stored keys are already rotated by them."""
    options = ctx.params.native()  # in llama.cpp's numbers
    parts = [f"{k}={v:g}" for k, v in options.items() if k.startswith(("rope_", "yarn_"))]
    scaling = f"{ctx.model.architecture}.rope.scaling."
    trained = ctx.model.metadata.get(f"{scaling}original_context_length", "")
    if trained.isdigit() and ctx.model.metadata.get(f"{scaling}type") != "yarn":
        parts.append(f"long={ctx.n_ctx_seq > int(trained)}")  # LongRoPE has factors for each side
    return " ".join(parts)
