"""Tree attention over contiguous and paged caches: schemas, contracts, checks."""

from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from .._registry import define_op
from .._validate import (
    check_device,
    check_dtype,
    check_last_stride,
    check_no_grad,
    check_number,
    check_shape,
    check_tensor,
    check_values,
    values_readable,
)
from ..reference.tree_attention import paged_tree_attention_ref, tree_attention_ref

# With defaults: to hand over six times None costs a call 4 µs.
_OPTIONS = "*, float? scale=None, float? softcap=None, int? window=None, Tensor? sinks=None, "
_OPTIONS += "Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor, Tensor)"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_QUANTISED = (torch.float8_e4m3fn, torch.int8)


def _fake(q, k_cache, v_cache, *_, **__):
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v_cache.shape[-1]), q.new_empty(q.shape[:3], dtype=lse_dtype)


define_op(
    f"tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor tree_mask, Tensor prefix_len, {_OPTIONS}",
    reference=tree_attention_ref,
    fake=_fake,
    triton="kernels.tree_attention:tree_attention_triton",
    native=("cpu",),
)
define_op(
    "paged_tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor tree_mask, "
    f"Tensor prefix_len, {_OPTIONS}",
    reference=paged_tree_attention_ref,
    fake=_fake,
    triton="kernels.tree_attention:paged_tree_attention_triton",
    native=("cpu",),
)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tree_mask: Tensor,
    prefix_len: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend every node of a draft tree to the committed prefix and to its own ancestors.

    The K/V of node *i* of row *b* lie in cache row ``prefix_len[b] + i``; the caller has written them there::

        cache row      0 … P−1     P  P+1 P+2 P+3        tree      0
        node 0        ■ … ■       ■   ·   ·   ·                  / \\
        node 1        ■ … ■       ■   ■   ·   ·                 1   2
        node 2        ■ … ■       ■   ·   ■   ·                 |
        node 3        ■ … ■       ■   ■   ·   ■                 3

    ``out_i = Σ_j w_ij v_j``, ``w_ij = exp(s_ij − lse_i)``, ``s_ij = scale · q_i·k_j``, ``lse_i = ln Σ_j exp s_ij``
    over the keys *j* that node *i* sees. A plain decode step is a tree of one node, a prefill a chain with ``P = 0``.

    Args:
        q: ``(B, T, Hq, D)`` fp16, bf16, fp32 or fp64, one row for each node, ``T ≥ 1``.
        k_cache: ``(B, S, Hk, D)``, ``Hq`` a multiple of ``Hk``; query head *h* reads KV head ``h // (Hq/Hk)``. In q's
            dtype, or float8_e4m3fn or int8.
        v_cache: ``(B, S, Hk, Dv)`` in k_cache's dtype. ``Dv`` may differ from ``D``.
        tree_mask: ``(B or 1, T, ceil(T/64)) int64``; bit ``j % 64`` of word ``j // 64`` of row *i* is set iff *j* is
            *i* or its ancestor. A row of zeros is padding: it sees nothing, its out is 0 and its lse −inf (the sink,
            when there is one).
        prefix_len: ``(B,) int32``, ``0 ≤ prefix_len ≤ S − T``.
        scale: factor of the scores; default ``D ** −0.5``.
        softcap: ``c`` > 0: ``s ← c · tanh(s / c)`` (Gemma-2).
        window: ≥ 1: a key is seen only when ``position(query) − position(key) < window``; a prefix row's position is
            its index, a node's is ``prefix_len + depth``, never its row index.
        sinks: ``(Hq,)`` finite: an extra logit of each head that takes part in the softmax and has no value (GPT-OSS).
        k_scale, v_scale: scalar or ``(Hk,)``: stored × scale = value, for quantised caches.

    q and the caches may have any strides but 1 in the last dimension: a ``(B, H, S, D)`` cache is given as
    ``.transpose(1, 2)``. Cache rows that no node of the batch row sees (unused rows, padding) may hold anything, NaN
    included; a NaN that one node sees may reach the others of its batch row. On the CPU the cost follows the longest
    prefix, not ``S``.

    Not checked on a GPU, because it would wait for the device: the values of ``prefix_len``. Not checked anywhere: that
    the mask is a tree.

    Returns:
        ``out (B, T, Hq, Dv)`` in q's dtype, and ``lse (B, T, Hq)`` fp32 (fp64 for fp64), the natural logarithm, with
        the sink when there is one. Sums are at least fp32.

    Raises:
        TypeError: a dtype is not supported, an option is of another kind.
        ValueError: shapes, devices or strides disagree; a value is out of range.
        RuntimeError: an input requires grad while grad is on.

    Example:
        >>> import torch
        >>> from specdec_kernels import tree_attention
        >>> q, k, v = torch.randn(1, 3, 4, 8), torch.randn(1, 16, 2, 8), torch.randn(1, 16, 2, 8)
        >>> mask = torch.tensor([[[0b001], [0b011], [0b101]]])  # a root and its two children
        >>> out, lse = tree_attention(q, k, v, mask, torch.tensor([13], dtype=torch.int32))
        >>> out.shape, lse.shape
        (torch.Size([1, 3, 4, 8]), torch.Size([1, 3, 4]))

    Source: tree attention, Miao et al. 2023 (SpecInfer, arXiv 2305.09781, §4.2) and Cai et al. 2024 (Medusa, arXiv
    2401.10774, §2.1.2).
    """
    op = "tree_attention"
    if not _is_right(q, k_cache, v_cache, tree_mask, prefix_len):
        check_shape(op, "q", q, ("B", "T", "Hq", "D"))
        check_shape(op, "k_cache", k_cache, (q.shape[0], "S", "Hk", q.shape[-1]))
        _check_attention(op, q, k_cache, v_cache, tree_mask, prefix_len)
    options = _checked_options(op, q, k_cache, scale, softcap, window, sinks, k_scale, v_scale)
    num_rows, num_nodes = k_cache.shape[1], q.shape[1]
    if num_rows < num_nodes:
        raise ValueError(f"{op}: k_cache must have at least T = {num_nodes} rows, got {num_rows}")
    if values_readable(prefix_len):
        check_values(op, "prefix_len", prefix_len, 0, num_rows - num_nodes)
    return ops.tree_attention.default(q, k_cache, v_cache, tree_mask, prefix_len, **options)


def paged_tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    tree_mask: Tensor,
    prefix_len: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend every node of a draft tree as `tree_attention` does, over a cache kept in pages.

    Row *p* of batch row *b* is row ``p % page`` of page ``block_table[b, p // page]``.

    Args:
        q: ``(B, T, Hq, D)``.
        k_cache: ``(pages, page, Hk, D)`` with any strides: NHD as it is, HND as ``.transpose(1, 2)``.
        v_cache: ``(pages, page, Hk, Dv)``.
        block_table: ``(B, max_pages) int32`` page ids, long enough for ``prefix_len + T`` rows. Entries beyond the
            pages that a row needs are never used and may be anything.
        tree_mask, prefix_len: as in `tree_attention`; ``prefix_len + T ≤ max_pages · page``.
        scale, softcap, window, sinks, k_scale, v_scale: as in `tree_attention`.

    Not checked on a GPU: the values of ``prefix_len`` and ``block_table``.

    Returns:
        ``out (B, T, Hq, Dv)`` and ``lse (B, T, Hq)``, as `tree_attention`.

    Raises:
        TypeError, ValueError, RuntimeError: as `tree_attention`; ValueError when a needed page id is not in
            ``[0, pages)``.

    Example:
        >>> import torch
        >>> from specdec_kernels import paged_tree_attention
        >>> q, k, v = torch.randn(1, 1, 4, 8), torch.randn(9, 16, 2, 8), torch.randn(9, 16, 2, 8)
        >>> table = torch.tensor([[7, 2, -1]], dtype=torch.int32)  # 20 rows committed: two pages
        >>> mask, length = torch.ones(1, 1, 1, dtype=torch.int64), torch.tensor([20], dtype=torch.int32)
        >>> paged_tree_attention(q, k, v, table, mask, length)[0].shape
        torch.Size([1, 1, 4, 8])
    """
    op = "paged_tree_attention"
    if not _is_right(q, k_cache, v_cache, tree_mask, prefix_len, block_table):
        check_shape(op, "q", q, ("B", "T", "Hq", "D"))
        check_shape(op, "k_cache", k_cache, ("pages", "page", "Hk", q.shape[-1]))
        _check_attention(op, q, k_cache, v_cache, tree_mask, prefix_len)
        check_shape(op, "block_table", block_table, (q.shape[0], "max_pages"))
        check_dtype(op, "block_table", block_table, (torch.int32,))
        check_device(op, "block_table", block_table, q.device)
    options = _checked_options(op, q, k_cache, scale, softcap, window, sinks, k_scale, v_scale)
    if k_cache.shape[1] < 1:
        raise ValueError(f"{op}: k_cache must have pages of at least one row, got {tuple(k_cache.shape)}")
    if values_readable(prefix_len, block_table):
        _check_pages(op, k_cache, block_table, prefix_len, q.shape[1])
    return ops.paged_tree_attention.default(q, k_cache, v_cache, block_table, tree_mask, prefix_len, **options)


def _is_right(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tree_mask: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
) -> bool:
    """Say whether the usual arguments of the ops are right, in a third of the time that the checks take.

    What this does not vouch for goes through the checks, which are the contract; this must never say more than they do.
    """
    if torch.compiler.is_compiling():
        return False
    strided, shapes = torch.strided, []
    for tensor in (q, k_cache, v_cache, tree_mask, prefix_len, prefix_len if block_table is None else block_table):
        if type(tensor) is not Tensor or tensor.layout is not strided:
            return False
        shapes.append(tensor.shape)
    if [len(shape) for shape in shapes] != [4, 4, 4, 3, 1, 1 if block_table is None else 2]:
        return False
    batch, num_nodes, num_q_heads, head_dim = shapes[0]
    k_batch, num_rows, num_kv_heads, k_dim = shapes[1]
    v_batch, v_rows, v_heads, v_dim = shapes[2]
    mask_batch, mask_nodes, num_words = shapes[3]
    return (
        (k_batch == v_batch and v_rows == num_rows and v_heads == num_kv_heads)
        and ((k_batch if block_table is None else shapes[5][0]) == batch == shapes[4][0])
        and (num_nodes >= 1 and num_kv_heads >= 1 and num_q_heads % num_kv_heads == 0)
        and (head_dim >= 1 and v_dim >= 1 and k_dim == head_dim)
        and (mask_nodes == num_nodes and num_words == (num_nodes + 63) // 64 and mask_batch in (1, batch))
        and (q.dtype in _FLOATS and k_cache.dtype is v_cache.dtype)
        and (k_cache.dtype is q.dtype or k_cache.dtype in _QUANTISED)
        and (tree_mask.dtype is torch.int64 and prefix_len.dtype is torch.int32)
        and (block_table is None or (block_table.dtype is torch.int32 and block_table.device == q.device))
        and (q.stride(3) == 1 and k_cache.stride(3) == 1 and v_cache.stride(3) == 1)
        and (k_cache.device == v_cache.device == tree_mask.device == prefix_len.device == q.device)
        and not (torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad))
    )


def _check_attention(op: str, q, k_cache, v_cache, tree_mask, prefix_len) -> None:
    batch, num_nodes, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    check_shape(op, "v_cache", v_cache, (*k_cache.shape[:3], "Dv"))
    if num_nodes < 1 or head_dim < 1 or v_cache.shape[-1] < 1:
        raise ValueError(f"{op}: q and v_cache must not be empty, got {tuple(q.shape)} and {tuple(v_cache.shape)}")
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"{op}: q must have a multiple of k_cache's {num_kv_heads} heads, got {num_q_heads}")
    mask_batch = batch if isinstance(tree_mask, Tensor) and tree_mask.shape[:1] != (1,) else 1
    check_shape(op, "tree_mask", tree_mask, (mask_batch, num_nodes, (num_nodes + 63) // 64))
    check_shape(op, "prefix_len", prefix_len, (batch,))
    check_dtype(op, "q", q, _FLOATS)
    check_dtype(op, "k_cache", k_cache, (q.dtype, *_QUANTISED))
    check_dtype(op, "v_cache", v_cache, (k_cache.dtype,))
    check_dtype(op, "tree_mask", tree_mask, (torch.int64,))
    check_dtype(op, "prefix_len", prefix_len, (torch.int32,))
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_last_stride(op, name, tensor)
    for name, tensor in (
        *(("k_cache", k_cache), ("v_cache", v_cache)),
        *(("tree_mask", tree_mask), ("prefix_len", prefix_len)),
    ):
        check_device(op, name, tensor, q.device)
    check_no_grad(op, q=q, k_cache=k_cache, v_cache=v_cache)


def _checked_options(op: str, q: Tensor, k_cache: Tensor, *values) -> dict[str, Any]:
    """Return the options that are given, after checking them."""
    names = ("scale", "softcap", "window", "sinks", "k_scale", "v_scale")
    given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    if given:
        _check_numbers(op, *values[:3])
        _check_tensors(op, q, k_cache, *values[3:])
    return given


def _check_numbers(op: str, scale, softcap, window) -> None:
    if scale is not None:
        check_number(op, "scale", scale)
    if softcap is not None:
        check_number(op, "softcap", softcap)
        if not softcap > 0:
            raise ValueError(f"{op}: softcap must be > 0, got {softcap}")
    if window is not None:
        check_number(op, "window", window, whole=True)
        if window < 1:
            raise ValueError(f"{op}: window must be >= 1, got {window}")


def _check_tensors(op: str, q, k_cache, sinks, k_scale, v_scale) -> None:
    if sinks is not None and not _is_right_vector(sinks, q, (q.shape[2],)):
        check_shape(op, "sinks", sinks, (q.shape[2],))
        check_dtype(op, "sinks", sinks, _FLOATS)
        check_device(op, "sinks", sinks, q.device)
        check_no_grad(op, sinks=sinks)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and not _is_right_vector(scale, q, (), (k_cache.shape[2],)):
            check_tensor(op, name, scale)
            check_shape(op, name, scale, () if scale.dim() == 0 else (k_cache.shape[2],))
            check_dtype(op, name, scale, _FLOATS)
            check_device(op, name, scale, q.device)
            check_no_grad(op, **{name: scale})


def _is_right_vector(vector: Tensor, q: Tensor, *shapes: tuple[int, ...]) -> bool:
    """Say of sinks or a scale what `_is_right` says of the rest."""
    return (
        (not torch.compiler.is_compiling() and type(vector) is Tensor)
        and (vector.shape in shapes and vector.dtype in _FLOATS and vector.device == q.device)
        and not vector.requires_grad
    )


def _check_pages(op: str, k_cache: Tensor, block_table: Tensor, prefix_len: Tensor, num_nodes: int) -> None:
    num_pages, page_size = k_cache.shape[:2]
    max_pages = block_table.shape[1]
    check_values(op, "prefix_len", prefix_len, 0, max_pages * page_size - num_nodes)
    needed = torch.arange(max_pages) * page_size < prefix_len[:, None] + num_nodes
    check_values(op, "block_table", block_table[needed], 0, num_pages - 1)
