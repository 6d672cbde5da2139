"""Make docs/page.png, the picture with which the README opens: the page over texts of SmolLM2.

python -m benchmarks.record_page [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from .page import begin, open_page, ready

PICTURE = Path(__file__).parents[1] / "docs" / "page.png"
PROMPT = "The best thing about the sea is"
MOST_BYTES = 300_000


def main() -> None:
    """Continue a prompt, fork at a token, take the picture."""
    with open_page(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m:Q8_0", scale=1.5) as page:
        begin(page, PROMPT)
        page.locator(".shoot").nth(1).click()
        ready(page)
        page.locator("#text").press("End")
        for _ in range(6):
            page.locator("#text").press("ArrowLeft")
        page.locator("[data-alternative]").nth(1).click()
        ready(page)
        page.wait_for_timeout(500)
        page.screenshot(path=PICTURE)
    size = PICTURE.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{PICTURE.name} has {size:,} bytes; at most {MOST_BYTES:,} are wanted")
    print(f"{PICTURE.name}: {size:,} bytes")


if __name__ == "__main__":
    main()
