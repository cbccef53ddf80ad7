"""Drafters: what proposes the trees."""

from .medusa import MedusaDrafter

__all__ = ["MedusaDrafter"]
