"""Decode with any target and drafter: the loop, its seams, the rules of acceptance."""

from .acceptance import Acceptance, GreedyAcceptance, RejectionAcceptance, TypicalAcceptance
from .drafting import DraftContext
from .dynamic_tree import DynamicTree
from .exits import ExitRule
from .loop import Step, decode
from .protocols import Draft, Drafter, LayeredTarget, LayerPlan, Target, TargetOutput
from .stats import DecodeStats

__all__ = [
    "Acceptance",
    "DecodeStats",
    "Draft",
    "DraftContext",
    "Drafter",
    "DynamicTree",
    "ExitRule",
    "GreedyAcceptance",
    "LayerPlan",
    "LayeredTarget",
    "RejectionAcceptance",
    "Step",
    "Target",
    "TargetOutput",
    "TypicalAcceptance",
    "decode",
]
