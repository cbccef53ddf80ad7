"""Drafters: what proposes the trees."""

from .layer_skip import LayerSkipDrafter
from .medusa import MedusaDrafter

__all__ = ["LayerSkipDrafter", "MedusaDrafter"]
