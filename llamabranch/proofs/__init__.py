"""What shows that a rule is right, or why two texts differ.

enumeration.py  every outcome of a random program, with its probability
rule_error.py   the proof that an acceptance rule is lossless
divergence.py   where two texts that should be equal first differ, and whether rounding explains it
"""

from .divergence import Divergence, first_divergence
from .enumeration import enumerate_outcomes
from .rule_error import rule_error

__all__ = ["Divergence", "enumerate_outcomes", "first_divergence", "rule_error"]
