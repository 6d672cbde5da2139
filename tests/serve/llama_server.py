"""Takes the options of ``llama-server`` and runs ``llamabranch serve``, for llama.cpp's own tests.

The model is the bundled one, whatever is asked for.
"""

from __future__ import annotations

import sys

from llamabranch.cli import main

__all__ = ["mapped"]

SAME = {
    "--port", "--temp", "--seed", "--batch-size", "--ubatch-size", "--alias", "--ctx-size",
    "--parallel", "--n-predict", "--api-key", "--chat-template", "--chat-template-file",
}  # fmt: skip
FLAGS = {"--metrics", "--slots", "--no-slots", "--kv-unified"}
RENAMED = {"--cors-origins": "--allow-origin"}
WITHOUT_VALUE = {
    "--offline", "--cont-batching", "--embedding", "--reranking", "--swa-full", "--verbose",
    "--context-shift", "--no-ui", "--no-models-autoload", "--jinja", "--no-jinja", "--no-mmproj",
    "--no-cache-idle-slots", "--ui-mcp-proxy", "--backend_sampling",
}  # fmt: skip


def mapped(arguments: list[str]) -> list[str]:
    """Return the arguments of ``llamabranch`` for those of ``llama-server``."""
    found = ["serve", "--threads", "1", "--draft", "none", "--shutdown-timeout", "0"]
    left = list(arguments)
    while left:
        name = left.pop(0)
        if name in FLAGS:
            found.append(name)
        elif name not in WITHOUT_VALUE:
            value = left.pop(0)
            if name == "--host":
                value = value.split(",")[0]
            if name in SAME or name == "--host":
                found += [name, value]
            elif name in RENAMED:
                found += [RENAMED[name], value]
    # What llama-server does unless it is told otherwise.
    for given, default in (
        ("--metrics", ["--no-metrics"]),
        ("--kv-unified", ["--no-kv-unified"]),
        ("--allow-origin", ["--allow-origin", "*"]),
        ("--chat-template", ["--chat-template", "chatml"]),
    ):
        if not any(each.startswith(given) for each in found):
            found += default
    return found


if __name__ == "__main__":
    sys.argv[1:] = mapped(sys.argv[1:])
    main()
