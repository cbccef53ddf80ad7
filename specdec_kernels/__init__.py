"""Kernels for speculative decoding: tree attention, Medusa heads, lossless verification, KV-cache compaction."""

from . import _native
from .ops.decoder import rms_norm, rotary_cache_write_
from .ops.kv_compact import kv_compact_, paged_kv_compact_
from .ops.layers import decoder_layers_
from .ops.linear import gated_linear, linear
from .ops.medusa_project import medusa_project, medusa_project_topk
from .ops.tree_attention import paged_tree_attention, tree_attention
from .ops.verify import philox_uniforms, verify_chain, verify_tree, verify_tree_greedy, verify_tree_typical
from .tree import DraftTree
from .types import Verification

__version__ = "0.1.0"

_native.load_native()

__all__ = [
    "DraftTree",
    "Verification",
    "decoder_layers_",
    "gated_linear",
    "kv_compact_",
    "linear",
    "medusa_project",
    "medusa_project_topk",
    "paged_kv_compact_",
    "paged_tree_attention",
    "philox_uniforms",
    "rms_norm",
    "rotary_cache_write_",
    "tree_attention",
    "verify_chain",
    "verify_tree",
    "verify_tree_greedy",
    "verify_tree_typical",
]
