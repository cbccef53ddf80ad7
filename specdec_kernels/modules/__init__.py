"""Trainable drafters as ``nn.Module``s in plain torch."""

from .medusa import MedusaHeads

__all__ = ["MedusaHeads"]
