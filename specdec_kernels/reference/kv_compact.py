"""KV-cache compaction as a gather: read every source row, then write every target row.

This is the law the kernels follow. A move of path entry ``i`` goes from ``prefix_len + accepted[i]`` to
``prefix_len + 1 + i`` and happens iff ``i < num_accepted``, ``accepted[i] > i + 1`` (an increasing path that is not in
place yet), ``prefix_len >= 0`` and the source lies inside the cache. A tensor of five dimensions among the caches is a
stack of caches.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Rows are moved as bits: a NaN payload survives, and fp8 needs no index kernel of its own.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Where a row lies: (batch row, position) in a dense cache, (page, slot) in a paged one.
_Cells = tuple[Tensor, Tensor]


def kv_compact_ref(
    caches: Sequence[Tensor],
    accepted: Tensor,
    num_accepted: Tensor,
    prefix_len: Tensor,
    *,
    new_len: Tensor | None = None,
) -> None:
    """Compact caches ``(B, S, ...)`` in place; see `specdec_kernels.kv_compact_`."""
    _write_new_len(new_len, accepted, num_accepted, prefix_len)
    source, target, moves = _path_moves(accepted, num_accepted, prefix_len)
    rows = torch.arange(len(accepted), device=accepted.device).unsqueeze(1).expand_as(source)
    plans: dict[int, tuple[_Cells, _Cells]] = {}
    for cache in _unstack(caches):
        capacity = cache.shape[1]
        if cache.numel() == 0 or accepted.numel() == 0:
            continue
        if capacity not in plans:
            plans[capacity] = _fixed_shape(moves & (source < capacity), (rows, source), (rows, target))
        _move_rows(cache, *plans[capacity])


def paged_kv_compact_ref(
    caches: Sequence[Tensor],
    block_table: Tensor,
    accepted: Tensor,
    num_accepted: Tensor,
    prefix_len: Tensor,
    *,
    new_len: Tensor | None = None,
) -> None:
    """Compact paged caches ``(pages, page, ...)`` in place; see `specdec_kernels.paged_kv_compact_`."""
    _write_new_len(new_len, accepted, num_accepted, prefix_len)
    source, target, moves = _path_moves(accepted, num_accepted, prefix_len)
    plans: dict[int, tuple[_Cells, _Cells]] = {}
    for cache in _unstack(caches):
        num_pages, page_size = cache.shape[:2]
        if cache.numel() == 0 or accepted.numel() == 0 or block_table.numel() == 0:
            continue
        if num_pages not in plans:
            inside = moves & (source < block_table.shape[1] * page_size)
            source_cells = _page_cells(block_table, page_size, torch.where(inside, source, 0))
            target_cells = _page_cells(block_table, page_size, torch.where(inside, target, 0))
            for page, _ in (source_cells, target_cells):
                inside = inside & (page >= 0) & (page < num_pages)
            plans[num_pages] = _fixed_shape(inside, source_cells, target_cells)
        _move_rows(cache, *plans[num_pages])


def _write_new_len(new_len: Tensor | None, accepted: Tensor, num_accepted: Tensor, prefix_len: Tensor) -> None:
    """Add the root and the accepted nodes to each prefix; nothing where one of the two numbers is negative."""
    if new_len is not None:
        count = num_accepted.clamp(max=accepted.shape[1])
        new_len.copy_(prefix_len + torch.where((prefix_len >= 0) & (count >= 0), count + 1, 0))


def _unstack(caches: Sequence[Tensor]) -> Iterator[Tensor]:
    for cache in caches:
        if cache.is_quantized:
            raise TypeError("kv_compact: torch cannot move the rows of a tensor with a quantizer")
        yield from cache if cache.dim() == 5 else (cache,)


def _path_moves(accepted: Tensor, num_accepted: Tensor, prefix_len: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return source and target positions ``(B, N) int64``, and which of the entries are moves."""
    step = torch.arange(1, accepted.shape[1] + 1, device=accepted.device)
    prefix = prefix_len.long().unsqueeze(1)
    moves = (step <= num_accepted.unsqueeze(1)) & (accepted > step) & (prefix >= 0)
    return prefix + accepted, prefix + step, moves


def _page_cells(block_table: Tensor, page_size: int, position: Tensor) -> _Cells:
    page = block_table.long().gather(1, position // page_size)
    return page, position % page_size


def _fixed_shape(moves: Tensor, source: _Cells, target: _Cells) -> tuple[_Cells, _Cells]:
    """Let every entry that is no move repeat one that is, so that shapes do not depend on data.

    Where nothing moves at all, all entries rewrite the cache's first row with itself.
    """
    any_move = moves.flatten().int().argmax(keepdim=True)

    def fill(cells: _Cells) -> _Cells:
        masked = [torch.where(moves, index, 0) for index in cells]
        major, minor = (torch.where(moves, index, index.flatten().index_select(0, any_move)) for index in masked)
        return major, minor

    return fill(source), fill(target)


def _move_rows(cache: Tensor, source: _Cells, target: _Cells) -> None:
    bits = cache.view(_BITS[cache.element_size()])
    bits.index_put_(target, bits[source])
