"""Drafters: what proposes the trees."""

from .draft_model import DraftModelDrafter
from .kangaroo import KangarooDrafter
from .layer_skip import LayerSkipDrafter
from .medusa import MedusaDrafter
from .merged import MergedDrafter
from .ngram import NGramDrafter
from .plain import PlainDrafter

__all__ = [
    "DraftModelDrafter",
    "KangarooDrafter",
    "LayerSkipDrafter",
    "MedusaDrafter",
    "MergedDrafter",
    "NGramDrafter",
    "PlainDrafter",
]
