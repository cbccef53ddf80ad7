"""Draft trees on the host: build, convert, mask, optimise, draw. No device code."""

from .build import DraftTree, load_metadata
from .draw import draw_svg, draw_text
from .mask import depths_from_mask, mask_behind, mask_from_parents, pack_mask, unpack_mask
from .optimize import SizedTree, expected_tokens, fastest_tree, grow_tree, node_gains, optimize_tree
from .presets import preset, preset_names, preset_source

__all__ = [
    "DraftTree",
    "SizedTree",
    "depths_from_mask",
    "draw_svg",
    "draw_text",
    "expected_tokens",
    "fastest_tree",
    "grow_tree",
    "load_metadata",
    "mask_behind",
    "mask_from_parents",
    "node_gains",
    "optimize_tree",
    "pack_mask",
    "preset",
    "preset_names",
    "preset_source",
    "unpack_mask",
]
