"""Draft trees on the host: build, convert, mask, optimise, draw. No device code."""

from .build import DraftTree, load_metadata
from .draw import draw_svg, draw_text
from .mask import depths_from_mask, mask_from_parents, pack_mask, unpack_mask
from .optimize import expected_tokens, optimize_tree
from .presets import preset, preset_names, preset_source

__all__ = [
    "DraftTree",
    "depths_from_mask",
    "draw_svg",
    "draw_text",
    "expected_tokens",
    "load_metadata",
    "mask_from_parents",
    "optimize_tree",
    "pack_mask",
    "preset",
    "preset_names",
    "preset_source",
    "unpack_mask",
]
