"""KV-cache compaction after a partially accepted draft tree."""

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._ops import ops
from .._registry import define_op
from .._validate import (
    check_device,
    check_dtype,
    check_kind,
    check_last_stride,
    check_no_grad,
    check_shape,
    check_tensor,
    share_elements,
    values_readable,
)
from ..reference.kv_compact import kv_compact_ref, paged_kv_compact_ref

_ELEMENT_SIZES = (1, 2, 4, 8)
_INT32 = (torch.int32,)


def kv_compact_(
    caches: Sequence[Tensor] | Tensor,
    accepted: Tensor,
    num_accepted: Tensor,
    prefix_len: Tensor,
    *,
    new_len: Tensor | None = None,
) -> None:
    """Move the K/V rows of the accepted draft nodes to the end of the prefix, in place, in all caches at once.

    A tree step leaves the rows of its nodes at ``prefix_len + node``. After verification the accepted path must lie
    densely behind the prefix; the root (node 0) already does::

        node        0  1  2  3  4  5                     accepted = [2, 5]
        before  ... r  a  b  c  d  e      row prefix_len + accepted[i]  ->  row prefix_len + 1 + i
        after   ... r  b  e  c  d  e      (c, d, e: leftovers, overwritten by the next step)

    Args:
        caches: one tensor for each buffer of each layer, ``(B, S, H, D)``, ``(B, S, C)`` or ``(B, S)``: keys, values,
            hidden states, token ids, per-token scales. Elements of 1, 2, 4 or 8 bytes of any dtype. Any strides; with
            more than two dimensions the last must be contiguous. ``(B, H, S, D)`` comes as ``.transpose(1, 2)``,
            without a copy. ``S``, ``H``, ``D`` and the dtype may differ between buffers; S is the capacity, not the
            length.
            Or one stacked tensor ``(2L, B, H, S, D)``.
        accepted: ``(B, N) int32``; node ids of the accepted path below the root, strictly increasing from 1 up;
            entries from ``num_accepted`` on (−1 by convention) are not looked at. As `Verification` has it.
        num_accepted: ``(B,) int32``, each in ``[0, N]``; 0 moves nothing in that row.
        prefix_len: ``(B,) int32``, rows before the draft block; ``prefix_len + accepted[i] < S``.
        new_len: ``(B,) int32`` that receives ``prefix_len + 1 + num_accepted``, the next step's ``prefix_len``, in the
            same launch. Memory of its own: on a GPU ``prefix_len`` is still being read, so let two tensors take turns.

    Rows already in place are not touched, and no byte outside the destination rows is written.

    Not checked: on a GPU, and under compilation, no value is read; there an entry that would move a row upwards
    (``accepted[i] <= i``, which an increasing path never has), that leaves the cache, or that follows a negative prefix
    is skipped; ``new_len`` is ``prefix_len`` where ``num_accepted`` or ``prefix_len`` is negative. Buffers that share
    memory (one listed twice) are the caller's mistake and give wrong rows.

    Raises:
        TypeError: an argument is no dense tensor (or ``caches`` no list or tuple of them), an index tensor is not
            int32, or a cache has a dtype with a quantizer (``torch.qint8``).
        ValueError: a shape, device, stride or element size does not fit, or ``new_len`` shares an element with another
            index tensor; on CPU also a path that does not increase, a count above N, or a move outside the capacity.
        RuntimeError: a cache requires grad while grad is on.

    Example:
        >>> import torch
        >>> from specdec_kernels import kv_compact_
        >>> cache = torch.arange(8.0).view(1, 8, 1, 1)           # two rows of prefix, then nodes 0..5
        >>> one = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> kv_compact_([cache], one(2, 5)[None], one(2), one(2))
        >>> cache.flatten().tolist()
        [0.0, 1.0, 2.0, 4.0, 7.0, 5.0, 6.0, 7.0]

    Why in place is safe: destinations never pass sources, since ``accepted[i] >= i + 1``; see docs/kv_compaction.md.
    """
    op = "kv_compact_"
    _check_indices(op, accepted, num_accepted, prefix_len)
    if new_len is not None:
        _check_new_len(op, new_len, prefix_len, num_accepted=num_accepted, accepted=accepted)
    batch = accepted.shape[0]
    if isinstance(caches, Tensor):
        check_shape(op, "caches", caches, ("2L", batch, "H", "S", "D"))
        _check_memory(op, "caches", caches, accepted.device)
        caches = [caches.transpose(2, 3)]
        shapes = [caches[0].shape[1:]]
    else:
        shapes = _check_caches(op, caches, (batch, "S", "H", "D"), accepted.device)
    if not caches and new_len is None:
        return
    if shapes and values_readable(accepted, num_accepted, prefix_len):
        capacity = min([shape[1] for shape in shapes])
        for row, prefix, last in _moving_rows(op, accepted, num_accepted, prefix_len):
            if prefix + last >= capacity:
                raise ValueError(
                    f"{op}: prefix_len + accepted must be below the capacity {capacity}, "
                    f"got {prefix} + {last} in row {row}"
                )
    ops.kv_compact_.default(caches, accepted, num_accepted, prefix_len, new_len=new_len)


def paged_kv_compact_(
    caches: Sequence[Tensor] | Tensor,
    block_table: Tensor,
    accepted: Tensor,
    num_accepted: Tensor,
    prefix_len: Tensor,
    *,
    new_len: Tensor | None = None,
) -> None:
    """Do what `kv_compact_` does in paged caches: position ``p`` of row ``b`` is slot ``p % page`` of page
    ``block_table[b, p // page]``.

    Args:
        caches: one tensor for each buffer of each layer, ``(pages, page, H, D)``, ``(pages, page, C)`` or
            ``(pages, page)``; elements, dtypes and strides as in `kv_compact_`, so a pool ``(pages, H, page, D)`` comes
            as ``.transpose(1, 2)``. All have the same page size (any, 1 included); ``pages`` may differ.
            Or one stacked pool ``(2L, pages, page, H, D)``.
        block_table: ``(B, max_pages) int32``; entries that cover positions ``prefix_len + 1`` to
            ``prefix_len + accepted[num_accepted - 1]`` must be pages of every cache. Others (−1) are not looked at.
        accepted, num_accepted, prefix_len, new_len: as in `kv_compact_`.

    Not checked: as in `kv_compact_`; on a GPU, and under compilation, a move from or to a page outside the table or the
    cache is skipped. Pages that several rows share (a common prompt) may be sources of reads, never destinations: copy
    a shared page before drafting into it.

    Raises:
        TypeError: as in `kv_compact_`.
        ValueError: as in `kv_compact_`, and for page sizes that differ, or a needed table entry that is no page.
        RuntimeError: a cache requires grad while grad is on.

    Example:
        >>> import torch
        >>> from specdec_kernels import paged_kv_compact_
        >>> pool = torch.arange(8.0).view(4, 2, 1, 1)            # four pages of two slots
        >>> one = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> paged_kv_compact_([pool], one(3, 0, 1)[None], one(2, 3)[None], one(2), one(1))
        >>> pool.flatten().tolist()                              # positions 0..5 lie at 6 7 0 1 2 3
        [1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    op = "paged_kv_compact_"
    _check_indices(op, accepted, num_accepted, prefix_len)
    check_kind(op, "block_table", block_table, (accepted.shape[0], "max_pages"), _INT32, accepted.device)
    if new_len is not None:
        _check_new_len(op, new_len, prefix_len, num_accepted=num_accepted, accepted=accepted, block_table=block_table)
    if isinstance(caches, Tensor):
        check_shape(op, "caches", caches, ("2L", "pages", "page", "H", "D"))
        _check_memory(op, "caches", caches, accepted.device)
        caches = [caches]
        shapes = [caches[0].shape[1:]]
    else:
        shapes = _check_caches(op, caches, ("pages", "page", "H", "D"), accepted.device)
    if not caches and new_len is None:
        return
    if shapes:
        num_pages, page_size = min([shape[0] for shape in shapes]), shapes[0][1]
        if page_size < 1 or any(shape[1] != page_size for shape in shapes):
            sizes = [shape[1] for shape in shapes]
            raise ValueError(f"{op}: caches must have one page size of at least 1, got {sizes}")
        if values_readable(block_table, accepted, num_accepted, prefix_len):
            for row, prefix, last in _moving_rows(op, accepted, num_accepted, prefix_len):
                _check_pages(op, block_table, row, (prefix + 1, prefix + last), page_size, num_pages)
    ops.paged_kv_compact_.default(caches, block_table, accepted, num_accepted, prefix_len, new_len=new_len)


def _check_indices(op: str, accepted: Tensor, num_accepted: Tensor, prefix_len: Tensor) -> None:
    check_shape(op, "accepted", accepted, ("B", "N"))
    batch, device = accepted.shape[0], accepted.device
    check_dtype(op, "accepted", accepted, _INT32)
    check_kind(op, "num_accepted", num_accepted, (batch,), _INT32, device)
    check_kind(op, "prefix_len", prefix_len, (batch,), _INT32, device)


def _check_new_len(op: str, new_len: Tensor, prefix_len: Tensor, **others: Tensor) -> None:
    check_kind(op, "new_len", new_len, tuple(prefix_len.shape), _INT32, prefix_len.device)
    if len(prefix_len) > 1 and new_len.stride(0) == 0:
        raise ValueError(f"{op}: new_len must not be expanded, got strides {new_len.stride()}")
    for name, tensor in {"prefix_len": prefix_len, **others}.items():
        if share_elements(new_len, tensor):
            raise ValueError(f"{op}: new_len must have memory of its own, got that of {name}")


def _check_caches(
    op: str, caches: Sequence[Tensor], shape: tuple[int | str, ...], device: torch.device
) -> list[torch.Size]:
    """Check every cache and return the distinct shapes; a layout like the one before costs one comparison."""
    if not isinstance(caches, (list, tuple)):
        raise TypeError(f"{op}: caches must be a list or tuple of tensors, or one tensor, got {type(caches).__name__}")
    known = None
    shapes: list[torch.Size] = []
    for index, cache in enumerate(caches):
        if not isinstance(cache, Tensor):
            check_tensor(op, f"caches[{index}]", cache)
        layout = (cache.shape, cache.stride(), cache.dtype, cache.device, cache.requires_grad)
        if layout != known:
            name = f"caches[{index}]"
            if not 2 <= cache.dim() <= 4:
                raise ValueError(f"{op}: {name} must have 2, 3 or 4 dimensions, got shape {tuple(cache.shape)}")
            check_shape(op, name, cache, shape[: cache.dim()])
            _check_memory(op, name, cache, device)
            known = layout
            shapes.append(cache.shape)
    return shapes


def _check_memory(op: str, name: str, cache: Tensor, device: torch.device) -> None:
    """Check where and how a cache, or a stack of caches, lies in memory."""
    check_device(op, name, cache, device)
    if cache.requires_grad:
        check_no_grad(op, **{name: cache})
    if cache.is_quantized:
        raise TypeError(f"{op}: {name} must not be a tensor with a quantizer, got {cache.dtype}; pass its int_repr()")
    if cache.element_size() not in _ELEMENT_SIZES:
        raise ValueError(f"{op}: {name} must have elements of 1, 2, 4 or 8 bytes, got {cache.dtype}")
    if cache.dim() > 2:
        check_last_stride(op, name, cache)
    strides = cache.stride()
    if 0 in strides and cache.numel() and any(n > 1 and s == 0 for n, s in zip(cache.shape, strides, strict=True)):
        raise ValueError(f"{op}: {name} must not be expanded (rows would share memory), got strides {strides}")


def _moving_rows(op: str, accepted: Tensor, num_accepted: Tensor, prefix_len: Tensor) -> Iterator[tuple[int, int, int]]:
    """Check the paths; yield (row, prefix length, last accepted node) of each row that accepts something."""
    longest = accepted.shape[1]
    rows = zip(accepted.tolist(), num_accepted.tolist(), prefix_len.tolist(), strict=True)
    for row, (path, count, prefix) in enumerate(rows):
        if not 0 <= count <= longest:
            raise ValueError(f"{op}: num_accepted must be in [0, {longest}], got {count} in row {row}")
        if count:
            path = path[:count]
            if path[0] < 1 or any(map(operator.ge, path, path[1:])):
                raise ValueError(f"{op}: accepted must increase strictly from 1 up, got {path} in row {row}")
            if prefix < 0:
                raise ValueError(f"{op}: prefix_len must be at least 0, got {prefix} in row {row}")
            yield row, prefix, path[-1]


def _check_pages(
    op: str, block_table: Tensor, row: int, positions: tuple[int, int], page_size: int, num_pages: int
) -> None:
    first, last = (position // page_size for position in positions)
    if last >= block_table.shape[1]:
        raise ValueError(
            f"{op}: block_table must have more than {last} columns to cover position {positions[1]} of row {row}, "
            f"got {block_table.shape[1]}"
        )
    pages = block_table[row, first : last + 1].tolist()
    if min(pages) < 0 or max(pages) >= num_pages:
        raise ValueError(f"{op}: block_table must hold pages in [0, {num_pages - 1}], got {pages} in row {row}")


def _nothing(*args, **kwargs) -> None:
    """Stand in for the ops under tracing: they return nothing."""


define_op(
    "kv_compact_(Tensor(a!)[] caches, Tensor accepted, Tensor num_accepted, Tensor prefix_len, *, "
    "Tensor(b!)? new_len=None) -> ()",
    reference=kv_compact_ref,
    fake=_nothing,
    native=("cpu", "cuda"),
)
define_op(
    "paged_kv_compact_(Tensor(a!)[] caches, Tensor block_table, Tensor accepted, Tensor num_accepted, "
    "Tensor prefix_len, *, Tensor(b!)? new_len=None) -> ()",
    reference=paged_kv_compact_ref,
    fake=_nothing,
    native=("cpu", "cuda"),
)
