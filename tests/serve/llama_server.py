"""Accepts the options of ``llama-server`` and runs ``llamabranch serve``, for llama.cpp's own tests.

The model is always the bundled one.
"""

from __future__ import annotations

import sys

from llamabranch.cli import app
from llamabranch.hub import BUNDLED_TARGET

# The name of each option here, with {} for its value. All others are dropped.
OPTIONS = {
    **{
        name: (name, "{}")
        for name in (
            "--port", "--temp", "--seed", "--ctx-size", "--parallel", "--n-predict", "--api-key",
            "--host",
        )
    },
    "--alias": ("--limit", "alias={}"),
    "--chat-template": ("-S", "chat_template={}"),
    "--chat-template-file": ("-S", "chat_template={}"),
    "--batch-size": ("-S", "n_batch={}"),
    "--ubatch-size": ("-S", "n_ubatch={}"),
    "--cors-origins": ("--allow-origin", "{}"),
    "--metrics": ("--limit", "metrics=true"),
    "--slots": ("--limit", "slots=true"),
    "--no-slots": ("--limit", "slots=false"),
    "--kv-unified": ("-S", "kv_unified=true"),
}  # fmt: skip
WITHOUT_VALUE = {
    "--offline", "--cont-batching", "--embedding", "--reranking", "--swa-full", "--verbose",
    "--context-shift", "--no-ui", "--no-models-autoload", "--jinja", "--no-jinja", "--no-mmproj",
    "--no-cache-idle-slots", "--ui-mcp-proxy", "--backend_sampling", "--metrics", "--slots", "--no-slots",
    "--kv-unified",
}  # fmt: skip


def mapped(arguments: list[str]) -> list[str]:
    """Return the arguments of ``llamabranch`` for those of ``llama-server``."""
    options = ["serve", "-m", BUNDLED_TARGET, "--threads", "1", "--draft", "none"]
    options += ["--limit", "shutdown_timeout_s=0"]
    left = list(arguments)
    while left:
        name = left.pop(0)
        value = "" if name in WITHOUT_VALUE else left.pop(0)
        if name == "--host":
            value = value.split(",")[0]
        options += [part.format(value) for part in OPTIONS.get(name, ())]
    # The defaults of llama-server.
    for prefix, default in (
        ("metrics=", ["--limit", "metrics=false"]),
        ("--allow-origin", ["--allow-origin", "*"]),
        ("chat_template=", ["-S", "chat_template=chatml"]),
    ):
        if not any(option.startswith(prefix) for option in options):
            options += default
    return options


if __name__ == "__main__":
    app(mapped(sys.argv[1:]))
