"""Trainable drafters as ``nn.Module``s in plain torch."""

from .kangaroo import KangarooAdapter
from .medusa import MedusaHeads

__all__ = ["KangarooAdapter", "MedusaHeads"]
