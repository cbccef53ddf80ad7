"""Drafters: what proposes the trees."""

from .layer_skip import LayerSkipDrafter
from .medusa import MedusaDrafter
from .plain import PlainDrafter

__all__ = ["LayerSkipDrafter", "MedusaDrafter", "PlainDrafter"]
