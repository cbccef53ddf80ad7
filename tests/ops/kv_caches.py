"""Caches carved out of guarded storage, paths, and a gather in plain Python: what the compaction tests share."""

import torch
from torch import Tensor

from specdec_kernels.testing import random_parents

GUARD_BYTES = 64
# Layout -> the order in memory of the dimensions (outer, inner, head, width), and padding elements behind each row.
LAYOUTS = {
    "bshd": ((0, 1, 2, 3), 0),
    "bhsd": ((0, 2, 1, 3), 0),
    "sbhd": ((1, 0, 2, 3), 0),
    "padded": ((0, 1, 2, 3), 3),
}


def make_storage(shape: tuple[int, ...], dtype: torch.dtype, layout: str, shift: int) -> Tensor:
    """Return random bytes, enough for `carve` with guards before and behind; every bit pattern occurs."""
    padding = LAYOUTS[layout][1]
    rows = torch.Size(shape[:3]).numel()
    num_bytes = rows * (shape[3] + padding) * dtype.itemsize + shift * dtype.itemsize + 2 * GUARD_BYTES
    return torch.randint(0, 256, (-(-num_bytes // 8) * 8,), dtype=torch.uint8)


def carve(storage: Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: str, shift: int) -> Tensor:
    """View storage as a cache ``shape`` whose first element lies ``shift`` elements off a 64-byte border."""
    order, padding = LAYOUTS[layout]
    strides = [0] * 4
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim] + (padding if dim == 3 else 0)
    offset = GUARD_BYTES // dtype.itemsize + shift
    return storage.view(dtype).as_strided(shape, strides, offset)


def bits(tensor: Tensor) -> Tensor:
    """View a tensor's bit patterns, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def gather_rows(cache: Tensor, accepted: Tensor, num_accepted: Tensor, prefix_len: Tensor) -> None:
    """Compact a dense cache by copying it and indexing the copy."""
    before = cache.clone()
    for row in range(len(accepted)):
        for i in range(int(num_accepted[row])):
            start = int(prefix_len[row])
            cache[row, start + 1 + i] = before[row, start + int(accepted[row, i])]


def gather_pages(
    cache: Tensor, block_table: Tensor, accepted: Tensor, num_accepted: Tensor, prefix_len: Tensor
) -> None:
    """Compact a paged cache by copying it and indexing the copy."""
    before, page_size = cache.clone(), cache.shape[1]
    for row in range(len(accepted)):
        for i in range(int(num_accepted[row])):
            target = int(prefix_len[row]) + 1 + i
            source = int(prefix_len[row]) + int(accepted[row, i])
            page = before[int(block_table[row, source // page_size])]
            cache[int(block_table[row, target // page_size]), target % page_size] = page[source % page_size]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pad_paths(paths: list[list[int]], width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return ``accepted`` padded with −1, and ``num_accepted``."""
    width = max(map(len, paths), default=0) if width is None else width
    accepted = torch.full((len(paths), width), -1, dtype=torch.int32)
    for row, path in enumerate(paths):
        accepted[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return accepted, int32(*map(len, paths))


def random_path(num_nodes: int, seed: int) -> list[int]:
    """Return the nodes below the root on the way to a random node of a random topological tree."""
    parents = random_parents(num_nodes, seed)
    node = int(torch.randint(num_nodes, (), generator=torch.Generator().manual_seed(seed + 1)))
    path = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def random_step(batch: int, num_nodes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``accepted`` and ``num_accepted`` of a batch whose rows accept different paths of different trees."""
    return pad_paths([random_path(num_nodes, seed * 100 + row) for row in range(batch)])


def shuffled_table(batch: int, max_pages: int, seed: int) -> Tensor:
    """Return a block table in which every row owns its pages, in random order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(batch * max_pages, generator=generator).view(batch, max_pages).to(torch.int32)
