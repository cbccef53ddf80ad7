"""Ancestor masks as bits: one row of ``W = ceil(T/64)`` int64 words for each node.

Bit ``j % 64`` of word ``j // 64`` of row *i* is set iff node *j* is *i* itself or an ancestor of *i*. Bit 63 is the
sign of its word, so words may be negative.

    parents [-1, 0, 0, 1]        dense        packed (W = 1)
          0                      1 . . .      0b0001
        ┌─┴─┐                    1 1 . .      0b0011
        1   2                    1 . 1 .      0b0101
        3                        1 1 . 1      0b1011
"""

import torch
from torch import Tensor

from .._validate import check_dtype, check_tensor, check_values, values_readable

WORD_BITS = 64
# Up to so many nodes, all trees together, a loop over Python numbers is faster than torch's dispatch on the CPU.
HOST_NODES = 512


def num_words(num_nodes: int) -> int:
    """Return ``W``, the int64 words that hold a mask row of ``num_nodes`` bits."""
    return -(-num_nodes // WORD_BITS)


def pack_mask(dense: Tensor) -> Tensor:
    """Pack dense masks into bits; the inverse of `unpack_mask`.

    Args:
        dense: ``(..., T, T) bool``, ``T >= 1``, any strides. Whether it is the mask of a tree is not checked here:
            `DraftTree.from_dense_mask` does that for one tree.

    Returns:
        ``(..., T, W) int64``; unused high bits of the last word are 0.

    Raises:
        TypeError: not a bool tensor.
        ValueError: the last two dimensions differ, or ``T`` is 0.

    Example:
        >>> pack_mask(torch.tensor([[True, False], [True, True]])).tolist()
        [[1], [3]]
    """
    check_tensor("pack_mask", "dense", dense)
    check_dtype("pack_mask", "dense", dense, (torch.bool,))
    if dense.dim() < 2 or dense.shape[-1] != dense.shape[-2] or dense.shape[-1] == 0:
        raise ValueError(f"pack_mask: dense must have shape (..., T, T) with T >= 1, got {tuple(dense.shape)}")
    num_nodes = dense.shape[-1]
    padding = num_words(num_nodes) * WORD_BITS - num_nodes
    bits = torch.nn.functional.pad(dense, (0, padding)).unflatten(-1, (-1, WORD_BITS)).to(torch.int64)
    # The bits are disjoint, so their sum is their union; bit 63 enters as −2^63 and cannot overflow.
    return (bits << torch.arange(WORD_BITS, device=dense.device)).sum(-1)


def unpack_mask(packed: Tensor, num_nodes: int) -> Tensor:
    """Unpack bit masks; the inverse of `pack_mask`.

    Args:
        packed: ``(..., T, W) int64`` with ``T = num_nodes`` and ``W = ceil(T/64)``. Bits at or past ``T`` are ignored.
        num_nodes: ``T >= 1``.

    Returns:
        ``(..., T, T) bool``.

    Raises:
        TypeError: not an int64 tensor.
        ValueError: the shape does not belong to ``num_nodes``.

    Example:
        >>> unpack_mask(torch.tensor([[1], [3]]), 2).tolist()
        [[True, False], [True, True]]
    """
    check_tensor("unpack_mask", "packed", packed)
    check_dtype("unpack_mask", "packed", packed, (torch.int64,))
    expected = (num_nodes, num_words(num_nodes))
    if num_nodes < 1 or packed.dim() < 2 or tuple(packed.shape[-2:]) != expected:
        raise ValueError(
            f"unpack_mask: packed must have shape (..., {expected[0]}, {expected[1]}) for num_nodes={num_nodes} >= 1, "
            f"got {tuple(packed.shape)}"
        )
    bits = (packed.unsqueeze(-1) >> torch.arange(WORD_BITS, device=packed.device)) & 1
    return bits.flatten(-2)[..., :num_nodes].bool()


def mask_from_parents(parents: Tensor) -> Tensor:
    """Build the packed masks of trees given as parent pointers, on their device, without waiting for it.

    Pointer doubling: after round *r* a row holds its nearest ``2^r`` path nodes, so ``ceil(log2 T)`` rounds suffice.

    Args:
        parents: ``(B, T)`` or ``(T,)``, int32 or int64, ``T >= 1``, one tree for each row: ``parents[0] == -1`` and
            ``parents[i] < i``. A −1 at ``i > 0`` marks padding, which sees itself only. Values are checked on CPU
            tensors outside compilation; elsewhere reading them would wait for the device, and an entry ``>= T`` is
            taken as −1.

    Returns:
        ``(B, T, W)`` or ``(T, W)``, int64.

    Raises:
        TypeError: not an integer tensor.
        ValueError: a wrong shape; on the CPU also a row that is not a topological tree.

    Example:
        >>> mask_from_parents(torch.tensor([-1, 0, 0, 1], dtype=torch.int32)).flatten().tolist()
        [1, 3, 5, 11]
    """
    check_tensor("mask_from_parents", "parents", parents)
    check_dtype("mask_from_parents", "parents", parents, (torch.int32, torch.int64))
    if parents.dim() not in (1, 2) or parents.shape[-1] == 0:
        raise ValueError(
            f"mask_from_parents: parents must have shape (B, T) or (T,), T >= 1, got {tuple(parents.shape)}"
        )
    if values_readable(parents):
        if 0 < parents.numel() <= HOST_NODES and parents.shape[-1] <= WORD_BITS:
            trees = [ancestor_words(row) for row in parents.reshape(-1, parents.shape[-1]).tolist()]
            if all(trees):
                return torch.tensor(trees, device=parents.device).view(*parents.shape, 1)
        _check_topological(parents)
    rows = parents.reshape(-1, parents.shape[-1]).long()
    num_nodes, device = rows.shape[-1], rows.device

    # Row T is the "no parent" node: it points to itself and sees nothing, so no step needs a condition.
    nowhere = rows.new_full((rows.shape[0], 1), num_nodes)
    pointers = torch.cat([torch.where((rows < 0) | (rows >= num_nodes), num_nodes, rows), nowhere], dim=1)
    nodes = torch.arange(num_nodes + 1, device=device)
    words = torch.arange(num_words(num_nodes), device=device)
    own_bit = torch.where(nodes[:, None] // WORD_BITS == words, 1 << (nodes % WORD_BITS)[:, None], 0)
    own_bit = torch.where(nodes[:, None] < num_nodes, own_bit, 0)

    masks = own_bit.expand(rows.shape[0], -1, -1)
    reach = 1
    while reach < num_nodes:
        masks = masks | masks.gather(1, pointers[:, :, None].expand_as(masks))
        pointers = pointers.gather(1, pointers)
        reach *= 2
    return masks[:, :num_nodes].reshape(*parents.shape, words.shape[0]).contiguous()


def ancestor_words(parents: list[int]) -> list[int]:
    """Return the words of a tree of at most 64 nodes; none for what is no topological tree."""
    words: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            return []
        words.append(1 << node | (words[parent] if parent >= 0 else 0))
    if len(words) == WORD_BITS:
        words[-1] -= 1 << WORD_BITS
    return words


def mask_behind(packed: Tensor, first_node: int) -> Tensor | None:
    """Return the mask of the nodes from ``first_node`` on, to which all earlier nodes are what a longer prefix is.

    That they are where every later node descends from all earlier ones, which are a chain then::

        prefix ─ 0 ─ 1 ─ 2 ┬ 3          first_node = 2:      prefix, 2 rows longer ─ 0 ┬ 1
                           └ 4                                                        └ 2

    Args:
        packed: ``(..., T, W) int64`` ancestor masks (not checked).
        first_node: 0 … T − 1.

    Returns:
        ``(..., T − first_node, 1)``; None where a node does not descend from all earlier ones, for ``T > 63``, and
        where the values cannot be read without waiting for a device.

    Example:
        >>> chain_and_fork = mask_from_parents(torch.tensor([-1, 0, 1, 2, 2]))
        >>> mask_behind(chain_and_fork, 2).flatten().tolist(), mask_behind(chain_and_fork, 4)
        ([1, 3, 5], None)
    """
    if packed.shape[-2] >= WORD_BITS or not values_readable(packed):
        return None
    rows = packed[..., first_node:, 0]
    words, chain = rows.flatten().tolist(), (1 << first_node) - 1
    if any(word & chain != chain for word in words):
        return None
    return torch.tensor([word >> first_node for word in words], dtype=torch.int64).view(*rows.shape, 1)


def depths_from_mask(packed: Tensor) -> Tensor:
    """Return every node's depth, ``popcount(row) − 1``: 0 for the root.

    Args:
        packed: ``(..., T, W) int64`` ancestor masks.

    Returns:
        ``(..., T) int32``.

    Raises:
        TypeError: not an int64 tensor.
        ValueError: fewer than two dimensions.

    Example:
        >>> depths_from_mask(torch.tensor([[1], [3], [5], [11]])).tolist()
        [0, 1, 1, 2]
    """
    check_tensor("depths_from_mask", "packed", packed)
    check_dtype("depths_from_mask", "packed", packed, (torch.int64,))
    if packed.dim() < 2:
        raise ValueError(f"depths_from_mask: packed must have shape (..., T, W), got {tuple(packed.shape)}")
    if packed.shape[-1] == 1 and 0 < packed.numel() <= HOST_NODES and values_readable(packed):
        counts = [(word & 2**WORD_BITS - 1).bit_count() - 1 for word in packed.flatten().tolist()]
        return torch.tensor(counts, dtype=torch.int32, device=packed.device).view(packed.shape[:-1])
    return (_popcount(packed).sum(-1) - 1).to(torch.int32)


def _popcount(words: Tensor) -> Tensor:
    # Counts in fields of 2, 4, 8 bits, then the fields are added. int64 shifts copy the sign bit downwards; in the
    # first two steps the masks clear the copies, afterwards the sign is 0. No step overflows.
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    for shift in (8, 16, 32):
        words = words + (words >> shift)
    return words & 0x7F


def _check_topological(parents: Tensor) -> None:
    if parents.numel():
        check_values("mask_from_parents", "parents[..., 0]", parents[..., 0], -1, -1)
        too_late = parents >= torch.arange(parents.shape[-1])
        bad = (too_late | (parents < -1)).nonzero()
        if bad.shape[0]:
            where = tuple(bad[0].tolist())
            raise ValueError(
                f"mask_from_parents: parents[{', '.join(map(str, where))}] must be in [-1, {where[-1] - 1}], "
                f"got {int(parents[where])}"
            )
