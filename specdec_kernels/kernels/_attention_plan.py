"""Launch parameters of one tree attention call: which tile, how many splits, and every number the kernels are given."""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from . import _common

# Named although it is Triton's default, because that is changing.
MERGE_OPTIONS = {"enable_fp_fusion": True}
# Values of partial results that the merge takes at once: 32 rows of 128 dims. With twice as many, 256 dims spill.
_MERGED_AT_ONCE = 32 * 128


@dataclass(frozen=True, eq=False)  # compared and hashed by identity
class Plan:
    """Launch parameters of one call: chosen by shapes, dtypes and the device, never by data or the batch size."""

    block_m: int
    block_n: int
    min_split_len: int
    target_programs: int
    precision: str  # of tl.dot
    block_d: int  # dims of q and k that are multiplied at a time: all, unless the tile says fewer
    block_dv: int
    v_dim: int
    compile_options: dict  # num_warps, num_stages, and maxnreg where ptxas needs to be told

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """Return the last constants of the attention kernel."""
        return self.block_m, self.block_n, self.block_d, self.block_dv

    @property
    def merge_arguments(self) -> tuple[int, int, int, int]:
        """Return the last arguments of the kernel that merges splits."""
        return self.block_n, self.v_dim, min(32, _MERGED_AT_ONCE // self.block_dv), self.block_dv

    def num_splits(self, max_keys: int, num_tiles: int) -> int:
        """Return into how many ranges the keys of one batch row may be split.

        As many as let a batch of one fill the device in one go, none shorter than ``min_split_len``, or five times that
        where there are less than 1024 keys. Bounded by the most keys that fit, so that a captured graph can be
        replayed with any prefix; the batch size is left out, so that it does not change a row's bits.
        """
        shortest = self.min_split_len * (5 if max_keys < 1024 else 1)
        return max(1, min(self.target_programs // num_tiles, max_keys // shortest))


@cache
def choose_plan(
    device: _common.Device,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    v_dim: int,
    num_rows: int,
    precision: str = "ieee",
    aligned: bool = True,
) -> Plan | None:
    """Choose the launch parameters for ``num_rows = T · Hq / Hk`` packed rows; None when the file has no entry.

    ``aligned`` says that dims, strides and addresses let tiles be read 16 bytes at a time. The file's own ``rule`` says
    why its entries are what they are.
    """
    kinds = {cache_dtype: "fp16", torch.float32: "fp32", torch.float64: "fp64"}  # of q
    kind = kinds.get(q_dtype, "quantised")
    parameters = _common.launch_parameters("tree_attention", device.names)
    dims = str(_common.block(max(head_dim, v_dim, 64)))
    if precision == "tf32" and aligned and dims in parameters["tf32"]:
        kind = "tf32"
    else:
        precision = "ieee"
    special = {} if aligned else parameters.get("unaligned", {}).get(kind, {})
    tiles = special.get(dims) or parameters.get(kind, {}).get(dims)
    if tiles is None:
        return None
    tile = fitting_tile(tiles, num_rows, v_dim)
    options = {n: tile[n] for n in ("num_warps", "num_stages", "maxnreg") if n in tile} | MERGE_OPTIONS
    rows = min(num_rows, tile["block_m"])
    min_split_len = max(tile["block_n"], _worthwhile_len(rows, head_dim, v_dim, cache_dtype.itemsize))
    block_d, block_dv = _common.block(head_dim), _common.block(v_dim)
    blocks = min(block_d, tile.get("block_d", block_d)), block_dv
    limits = min_split_len, device.num_multiprocessors
    return Plan(tile["block_m"], tile["block_n"], *limits, precision, *blocks, v_dim, options)


def fitting_tile(tiles: list[dict], num_rows: int, v_dim: int) -> dict:
    """Return the first tile of an entry of the launch parameters that may serve so many rows and values so long."""
    limits = {"max_rows": num_rows, "max_v_dim": v_dim}
    return next(tile for tile in tiles if all(size <= tile.get(name, size) for name, size in limits.items()))


def _worthwhile_len(num_rows: int, head_dim: int, v_dim: int, itemsize: int) -> int:
    """Return how many keys make a split whose partial results are half as many bytes as its keys and values.

    A row's partial result is written and read in fp32; a key and a value are read once for all rows of a tile.
    """
    return -(-2 * 8 * num_rows * v_dim // ((head_dim + v_dim) * itemsize))


@dataclass(frozen=True, eq=False)
class Geometry:
    """What the kernels are told of a call's shapes and strides: worked out once, looked up in each layer of a model."""

    partial_shape: tuple[int, int, int, int, int]
    grid: tuple[int, int, int]
    merge_grid: tuple[int, int, int]
    num_splits: int
    scale: float  # where the caller has none
    sizes: tuple[int, int, int]  # num_nodes, num_splits, min_split_len
    rest: tuple  # the attention kernel's arguments from group_size on, but for the strides of the scales
    constants: tuple
    facts: tuple  # of all these, what the choice of a binary follows from


@lru_cache(4096)  # a cache that grows at every step has other strides in each
def geometry(
    plan: Plan,
    q: tuple[tuple[int, ...], tuple[int, ...]],  # shape and strides
    k_strides: tuple[int, ...],
    v: tuple[tuple[int, ...], tuple[int, ...]],
    table: tuple[tuple[int, ...], tuple[int, ...]] | None,
    mask_is_shared: bool,
    window: int | None,
) -> Geometry:
    """Work out the numbers of a call."""
    (batch, num_nodes, num_q_heads, head_dim), q_strides = q
    (_, page_size, num_kv_heads, v_dim), v_strides = v
    group_size = num_q_heads // num_kv_heads
    num_row_tiles = -(-num_nodes * group_size // plan.block_m)
    max_keys = page_size if table is None else table[0][1] * page_size
    if window is not None:
        max_keys = min(max_keys, window + num_nodes + plan.block_n)
    num_splits = plan.num_splits(max_keys, num_row_tiles * num_kv_heads)
    page_size = 0 if table is None else page_size
    strides = (*q_strides[:3], *k_strides[:3], *v_strides[:3])
    mask_stride = 0 if mask_is_shared else num_nodes * ((num_nodes + 63) // 64)
    return Geometry(
        partial_shape=(batch, num_splits, num_nodes, num_q_heads, v_dim),
        grid=(num_row_tiles * num_splits, num_kv_heads, batch),
        merge_grid=(num_nodes * num_q_heads, batch, 1),
        num_splits=num_splits,
        scale=head_dim**-0.5,
        sizes=(num_nodes, num_splits, plan.min_split_len),
        rest=(group_size, *strides, 0 if table is None else table[1][0], mask_stride),
        constants=(head_dim, v_dim, page_size, plan.precision, *plan.blocks),
        facts=(plan, page_size, *strides),
    )
