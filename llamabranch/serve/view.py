"""The requests of a server, and why each has read tokens: as JSON, and on the page at ``/``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import HttpError
from .messages import reply
from .page import Files, Page
from .security import Guard
from .service import Service
from .settings import ServeSettings

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Scope

PATH = "/requests"
FILES = Files("llamabranch.serve", pages={"/": "view.html"})


def check_of(page: Page, settings: ServeSettings) -> Callable[[Scope], None]:
    """Return the check that raises HttpError for refused requests, by the rules of page and API."""
    guard = Guard(settings)

    def check(scope: Scope) -> None:
        path = scope["path"]
        is_page = path in (PATH, "/session") or page.files.at(path) is not None
        (page if is_page else guard).check(scope)

    return check


async def requests(call: Request, service: Service) -> Response:
    """List the last requests; with ``after=N`` those with a greater number, and those that still run."""
    try:
        after = int(call.query_params.get("after", -1))
    except ValueError:
        raise HttpError(400, "after must be an integer", param="after") from None
    found = service.ctx.requests
    causes: Counter[str] = Counter()
    for record in found:
        for cause in record.causes:
            causes[cause.kind] += cause.n_tokens
    is_all = not found or found[0].number == 0
    totals = {
        name: sum(getattr(record, name) for record in found)
        for name in ("num_prompt_tokens", "cached", "evaluated", "reread", "generated")
    } | {
        "since": service.created if is_all else found[0].time,
        "causes": causes,
    }
    shown = [each for each in found if each.number > after or not each.finish_reason]
    return reply({"totals": totals, "requests": shown})
