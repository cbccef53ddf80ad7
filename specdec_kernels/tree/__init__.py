"""Draft trees on the host: build, convert, mask, optimise, draw. No device code."""

from .build import DraftTree, load_metadata
from .mask import depths_from_mask, mask_from_parents, pack_mask, unpack_mask

__all__ = ["DraftTree", "depths_from_mask", "load_metadata", "mask_from_parents", "pack_mask", "unpack_mask"]
