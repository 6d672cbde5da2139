from .async_engine import AsyncEngine as AsyncEngine
from .context import Context as Context
from .engine import Engine as Engine
from .request import EngineStats as EngineStats
from .request import Event as Event
from .request import Request as Request
from .request import Result as Result

__all__: list[str]
