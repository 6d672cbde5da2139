"""The public names of the package, by the packages that have them: the only list of them."""

# ruff: isort: skip_file

from . import chat as chat
from . import eval as eval
from . import hub as hub
from . import model as model
from . import scale as scale
from . import search as search
from . import serve as serve
from . import speculative as speculative
from . import theory as theory
from .branch import (
    Branch as Branch,
    BranchStore as BranchStore,
    Produced as Produced,
    Snapshot as Snapshot,
)
from .chat import (
    Chat as Chat,
)
from .context import (
    Capabilities as Capabilities,
    Context as Context,
    ContextParams as ContextParams,
    TokenScore as TokenScore,
    Usage as Usage,
)
from .engine import (
    AsyncEngine as AsyncEngine,
    Engine as Engine,
    EngineStats as EngineStats,
    Event as Event,
    Request as Request,
    Result as Result,
)
from .errors import (
    BranchStateError as BranchStateError,
    CacheFullError as CacheFullError,
    CapacityError as CapacityError,
    ClosedError as ClosedError,
    ConfigError as ConfigError,
    ContextLengthWarning as ContextLengthWarning,
    DecodeError as DecodeError,
    DecodeInterruptedError as DecodeInterruptedError,
    DownloadError as DownloadError,
    ExactnessWarning as ExactnessWarning,
    GrammarError as GrammarError,
    JobError as JobError,
    LlamaBranchError as LlamaBranchError,
    LlamaBranchWarning as LlamaBranchWarning,
    ModelLoadError as ModelLoadError,
    ParseError as ParseError,
    PerformanceWarning as PerformanceWarning,
    QueueFullError as QueueFullError,
    SequencesExhaustedError as SequencesExhaustedError,
    SnapshotError as SnapshotError,
    TokenizeError as TokenizeError,
    UnsupportedError as UnsupportedError,
    UsageError as UsageError,
    VocabularyMismatchError as VocabularyMismatchError,
)
from .hub import (
    fetch as fetch,
    resolve as resolve,
)
from .loading import (
    load as load,
)
from .model import (
    Model as Model,
)
from .native import (
    set_log_level as set_log_level,
    system_info as system_info,
)
from .sampling import (
    Distribution as Distribution,
    Sampler as Sampler,
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
    Generation as Generation,
    GrammarDrafter as GrammarDrafter,
    InferenceSession as InferenceSession,
    ModelDrafter as ModelDrafter,
    MTPDrafter as MTPDrafter,
    NullDrafter as NullDrafter,
    PromptLookupDrafter as PromptLookupDrafter,
    SpeculativeConfig as SpeculativeConfig,
    SpeculativeStats as SpeculativeStats,
    Speculator as Speculator,
    SuffixDrafter as SuffixDrafter,
)

__all__: list[str]
__version__: str
