"""Drafters: what proposes the trees."""

from .kangaroo import KangarooDrafter
from .layer_skip import LayerSkipDrafter
from .medusa import MedusaDrafter
from .plain import PlainDrafter

__all__ = ["KangarooDrafter", "LayerSkipDrafter", "MedusaDrafter", "PlainDrafter"]
