"""Make docs/page.png, the first picture of the README, and docs/draft.png, a draft being judged.

python -m benchmarks.record_page [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .page import begin, open_page, ready

DOCS = Path(__file__).parents[1] / "docs"
PROMPT = "The best thing about the sea is"
MOST_BYTES = 300_000


def main() -> None:
    """Take both pictures."""
    with open_page(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m:Q8_0", scale=1.5) as page:
        _fork(page)
    with open_page("tale-target") as page:
        _draft(page)


def _fork(page: Any) -> None:
    """Continue a prompt and fork at a token."""
    begin(page, PROMPT)
    page.locator(".shoot").nth(1).click()
    ready(page)
    page.locator("#text").press("End")
    for _ in range(6):
        page.locator("#text").press("ArrowLeft")
    page.locator("[data-alternative]:not([aria-current])").first.click()
    _take(page, "page.png")


def _draft(page: Any) -> None:
    """Do what the card says: a small model drafts, the bundled model judges."""
    page.locator("[data-card=draft]").click()
    page.locator(".round").nth(4).wait_for()
    ready(page)
    page.locator("#text").press("x")  # shows rejected tokens, too
    _take(page, "draft.png")


def _take(page: Any, name: str) -> None:
    ready(page)
    page.wait_for_timeout(500)
    path = DOCS / name
    page.screenshot(path=path)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{name} has {size:,} bytes; the limit is {MOST_BYTES:,}")
    print(f"{name}: {size:,} bytes")


if __name__ == "__main__":
    main()
