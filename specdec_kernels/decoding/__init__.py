"""Decode with any target and drafter: the loop, its seams, the rules of acceptance."""

from .acceptance import Acceptance, GreedyAcceptance, RejectionAcceptance, TypicalAcceptance
from .loop import Step, decode
from .protocols import Draft, Drafter, Target, TargetOutput
from .stats import DecodeStats

__all__ = [
    "Acceptance",
    "DecodeStats",
    "Draft",
    "Drafter",
    "GreedyAcceptance",
    "RejectionAcceptance",
    "Step",
    "Target",
    "TargetOutput",
    "TypicalAcceptance",
    "decode",
]
