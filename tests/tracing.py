"""Acts once at a given line of the package, whenever Python passes it: a trace function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType

Place = tuple[str, int]  # file, line


class Tracer:
    """Calls ``act`` once at line ``target`` of a file in ``folder``; notes the lines until then."""

    def __init__(
        self, folder: Path, act: Callable[[], object], target: Place | None = None
    ) -> None:
        self.folder, self.act, self.target = str(folder), act, target
        self.passed: dict[Place, None] = {}
        self.done = False

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Tracer | None:
        if self.done or not frame.f_code.co_filename.startswith(self.folder):
            return None
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.passed[place] = None
            if place == self.target and not self.done:
                self.done = True
                self.act()
        return self
