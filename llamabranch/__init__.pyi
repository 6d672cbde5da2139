"""The public names of the package, by the rooms that have them: the only list of them."""

# ruff: isort: skip_file

from . import eval as eval
from . import scale as scale
from . import search as search
from . import theory as theory
from .branch import (
    Branch as Branch,
    BranchStore as BranchStore,
    Produced as Produced,
    Snapshot as Snapshot,
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
    GrammarError as GrammarError,
    JobError as JobError,
    LlamaBranchError as LlamaBranchError,
    LlamaBranchWarning as LlamaBranchWarning,
    ModelLoadError as ModelLoadError,
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
    CatalogueEntry as CatalogueEntry,
    catalogue as catalogue,
    fetch as fetch,
    resolve as resolve,
)
from .loading import (
    load as load,
)
from .model import (
    Model as Model,
    TextDecoder as TextDecoder,
    VocabularyReport as VocabularyReport,
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
    Acceptance as Acceptance,
    ChainDrafter as ChainDrafter,
    Divergence as Divergence,
    Draft as Draft,
    Drafter as Drafter,
    DraftLength as DraftLength,
    DraftState as DraftState,
    EagleDrafter as EagleDrafter,
    FunctionDrafter as FunctionDrafter,
    Generation as Generation,
    GrammarDrafter as GrammarDrafter,
    InferenceSession as InferenceSession,
    ModelDrafter as ModelDrafter,
    MTPDrafter as MTPDrafter,
    NullDrafter as NullDrafter,
    PromptLookupDrafter as PromptLookupDrafter,
    RandomSource as RandomSource,
    SpeculativeConfig as SpeculativeConfig,
    SpeculativeStats as SpeculativeStats,
    Speculator as Speculator,
    SuffixDrafter as SuffixDrafter,
    block_rule as block_rule,
    enumerate_outcomes as enumerate_outcomes,
    first_divergence as first_divergence,
    rule_error as rule_error,
    token_rule as token_rule,
)

__all__: list[str]
__version__: str
