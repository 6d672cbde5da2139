from .distribution import Distribution as Distribution
from .grammar import Grammar as Grammar
from .params import SamplingParams as SamplingParams
from .params import SamplingSettings as SamplingSettings
from .sampler import Sampler as Sampler

__all__: list[str]
