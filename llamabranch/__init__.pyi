"""The public names of the package, by the packages that have them: the only list of them."""

# ruff: isort: skip_file

from . import agents as agents
from . import chat as chat
from . import context as context
from . import engine as engine
from . import errors as errors
from . import eval as eval
from . import hub as hub
from . import model as model
from . import sampling as sampling
from . import ray_data as ray_data
from . import search as search
from . import serve as serve
from . import speculative as speculative
from .agents import (
    Agent as Agent,
)
from .branch import (
    Branch as Branch,
    Produced as Produced,
    Snapshot as Snapshot,
)
from .chat import (
    Chat as Chat,
)
from .context import (
    ContextParams as ContextParams,
)
from .engine import (
    AsyncEngine as AsyncEngine,
    Context as Context,
    Engine as Engine,
    Event as Event,
    Request as Request,
    Result as Result,
)
from .errors import (
    CacheFullError as CacheFullError,
    CapacityError as CapacityError,
    ConfigError as ConfigError,
    DecodeInterruptedError as DecodeInterruptedError,
    GrammarError as GrammarError,
    LlamaBranchError as LlamaBranchError,
    ParseError as ParseError,
    ToolError as ToolError,
)
from .hub import fetch as fetch
from .loading import (
    load as load,
)
from .model import (
    Model as Model,
)
from .native.library import (
    set_log_level as set_log_level,
    system_info as system_info,
)
from .sampling import (
    Distribution as Distribution,
    SamplingParams as SamplingParams,
)
from .sampling.grammar import (
    Grammar as Grammar,
)
from .speculative import (
    ChainDrafter as ChainDrafter,
    Drafter as Drafter,
    EagleDrafter as EagleDrafter,
    FunctionDrafter as FunctionDrafter,
    GrammarDrafter as GrammarDrafter,
    InferenceSession as InferenceSession,
    ModelDrafter as ModelDrafter,
    MTPDrafter as MTPDrafter,
    SpeculativeConfig as SpeculativeConfig,
    Speculator as Speculator,
    SuffixDrafter as SuffixDrafter,
)

__all__: list[str]
__version__: str
