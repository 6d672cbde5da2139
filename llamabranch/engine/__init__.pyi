from ..request.record import Cause as Cause
from ..request.record import Record as Record
from ..request.request import Request as Request
from ..request.result import EngineStats as EngineStats
from ..request.result import Event as Event
from ..request.result import Result as Result
from ..run.job import Job as Job
from .async_engine import AsyncEngine as AsyncEngine
from .context import Context as Context
from .engine import Engine as Engine

__all__: list[str]
