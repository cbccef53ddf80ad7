"""All Medusa heads in one call: residual blocks, vocabulary projection, top-k."""

import torch
from torch import Tensor

from .._ops import ops
from .._registry import define_op
from .._validate import (
    check_kind,
    check_no_grad,
    check_number,
    check_range,
    check_rows,
    check_tensor,
)
from ..reference.medusa_project import medusa_project_ref, medusa_project_topk_ref

MAX_TOP_K = 64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _fake_project(hidden, w_res, b_res, w_out, *, include_base=False, root=None, w_root=None, b_root=None):
    return hidden.new_empty(hidden.shape[0], w_res.shape[0] + include_base, w_out.shape[-2])


def _fake_topk(hidden, w_res, b_res, w_out, k, *, vocab_map, include_base=False, root=None, w_root=None, b_root=None):
    shape = (hidden.shape[0], w_res.shape[0] + include_base)
    values = hidden.new_empty(*shape, k, dtype=torch.float32)
    return values, torch.empty_like(values, dtype=torch.int64), hidden.new_empty(shape, dtype=torch.float32)


define_op(
    "medusa_project(Tensor hidden, Tensor w_res, Tensor? b_res, Tensor w_out, *, bool include_base=False, "
    "Tensor? root=None, Tensor? w_root=None, Tensor? b_root=None) -> Tensor",
    reference=medusa_project_ref,
    fake=_fake_project,
    triton="kernels.medusa_project:medusa_project_triton",
    native=("cpu",),
)
define_op(
    "medusa_project_topk(Tensor hidden, Tensor w_res, Tensor? b_res, Tensor w_out, int k, *, Tensor? vocab_map, "
    "bool include_base=False, Tensor? root=None, Tensor? w_root=None, Tensor? b_root=None) -> (Tensor, Tensor, Tensor)",
    reference=medusa_project_topk_ref,
    fake=_fake_topk,
    triton="kernels.medusa_project:medusa_project_topk_triton",
    native=("cpu",),
)


def medusa_project(
    hidden: Tensor,
    w_res: Tensor,
    b_res: Tensor | None,
    w_out: Tensor,
    *,
    include_base: bool = False,
    root: Tensor | None = None,
    w_root: Tensor | None = None,
    b_root: Tensor | None = None,
) -> Tensor:
    """Return the logits of all Medusa heads.

    ``x ← x + SiLU(x Wᵀ + b)`` for each of a head's ``R`` residual layers, starting from the hidden state, then
    ``logits = x W_outᵀ``. Heads that are conditioned on the pending token begin one block later, with
    ``h + SiLU([h; e / rms(e)] W_rootᵀ + b_root)``, where *h* is the hidden state and *e* that token's embedding.

    Args:
        hidden: ``(B, C)`` fp16, bf16, fp32 or fp64: final hidden states of the base model, after its last norm.
        w_res: ``(M, R, C, C)``, ``M ≥ 1``, ``R ≥ 0``, as ``nn.Linear`` stores it: ``(out, in)``.
        b_res: ``(M, R, C)``, or None for layers without bias.
        w_out: ``(M, V, C)``, each head its own; or ``(V, C)``, shared by all (the base model's ``lm_head`` weight, or
            the rows of a reduced vocabulary).
        include_base: put the base model's own prediction, ``hidden @ w_out.T``, before the heads': it shares their
            reading of the weight. Needs a shared ``w_out``.
        root: ``(B, C)``, embeddings of the pending tokens; ``rms(e)² = mean(e²) + 10⁻⁶``.
        w_root: ``(C, 2C)``, given if and only if ``root`` is.
        b_root: ``(C,)``, or None for a block without bias.

    All in hidden's dtype, any strides but 1 in the last dimension. Each product is summed in fp32 or better; the
    state after each layer and the logits are rounded to the dtype. Outside the CPU so is what goes into SiLU: where
    that leaves the range of fp16, the state is NaN.

    Returns:
        ``(B, M, V)`` in hidden's dtype. Head *i*, counted from 0, predicts the token *i + 2* places after the position
        of ``hidden``. With ``include_base`` ``(B, 1 + M, V)``: the base row, then the heads.

    Raises:
        TypeError: a dtype is not supported or differs from hidden's.
        ValueError: shapes, devices or strides disagree, or ``include_base`` is asked of own projections.
        RuntimeError: an input requires grad while grad is on; `MedusaHeads.forward` is the differentiable form.

    Example:
        >>> import torch
        >>> from specdec_kernels import medusa_project
        >>> hidden, lm_head = torch.randn(2, 8), torch.randn(100, 8)
        >>> medusa_project(hidden, torch.zeros(4, 1, 8, 8), torch.zeros(4, 1, 8), lm_head).shape
        torch.Size([2, 4, 100])

    Source: Cai et al. 2024 (Medusa, arXiv 2401.10774, eq. 1); the token that is known, Ankner et al. 2024 (Hydra, arXiv
    2402.05109).
    """
    op = "medusa_project"
    _check_heads(op, hidden, w_res, b_res, w_out, include_base)
    _check_root(op, hidden, root, w_root, b_root)
    options = {"include_base": include_base, "root": root, "w_root": w_root, "b_root": b_root}
    return ops.medusa_project.default(hidden, w_res, b_res, w_out, **options)


def medusa_project_topk(
    hidden: Tensor,
    w_res: Tensor,
    b_res: Tensor | None,
    w_out: Tensor,
    k: int,
    *,
    vocab_map: Tensor | None = None,
    include_base: bool = False,
    root: Tensor | None = None,
    w_root: Tensor | None = None,
    b_root: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k best tokens of every Medusa head, and what is needed to turn their logits into probabilities.

    The logits are those of `medusa_project`, rounded as there and compared in fp32: ``values`` descends, equal logits
    stand by ascending row of ``w_out``, and NaN comes after everything else. ``values − lse`` are log-probabilities.

    Args:
        hidden, w_res, b_res, w_out: as in `medusa_project`.
        k: candidates of each head, ``1 ≤ k ≤ min(64, V)``.
        vocab_map: ``(V,) int64``, the id in the full vocabulary of each row of ``w_out``, when that holds only part of
            it (FR-Spec, truncated Medusa). ``lse`` is then over those rows.
        include_base: as in `medusa_project`; the base row comes first, and M below is then one more.
        root, w_root, b_root: as in `medusa_project`.

    Not checked: that ``vocab_map`` has no negative id, which would read all of it in every call; such an id comes back.

    Returns:
        ``values (B, M, K) fp32``, ``ids (B, M, K) int64`` (mapped by ``vocab_map``), and ``lse (B, M) fp32``, the
        natural log-sum-exp over all rows, NaN when one logit is.

    Raises:
        TypeError, RuntimeError: as `medusa_project`; TypeError for a k that is no int.
        ValueError: as `medusa_project`; ``k`` or ``vocab_map`` is out of range.

    Example:
        >>> import torch
        >>> from specdec_kernels import medusa_project_topk
        >>> hidden, lm_head = torch.randn(2, 8), torch.randn(100, 8)
        >>> values, ids, lse = medusa_project_topk(hidden, torch.zeros(4, 1, 8, 8), None, lm_head, 10)
        >>> values.shape, ids.shape, lse.shape
        (torch.Size([2, 4, 10]), torch.Size([2, 4, 10]), torch.Size([2, 4]))

    Source: Cai et al. 2024 (Medusa, arXiv 2401.10774, eq. 1); the reduced vocabulary, Zhao et al. 2025 (FR-Spec, arXiv
    2502.14856).
    """
    op = "medusa_project_topk"
    _check_heads(op, hidden, w_res, b_res, w_out, include_base)
    num_rows = w_out.shape[-2]
    check_number(op, "k", k, whole=True)
    check_range(op, "k", k, 1, min(MAX_TOP_K, num_rows))
    if vocab_map is not None:
        check_kind(op, "vocab_map", vocab_map, (num_rows,), (torch.int64,), hidden.device)
    _check_root(op, hidden, root, w_root, b_root)
    options = {"include_base": include_base, "root": root, "w_root": w_root, "b_root": b_root}
    return ops.medusa_project_topk.default(hidden, w_res, b_res, w_out, k, vocab_map=vocab_map, **options)


def _check_heads(
    op: str, hidden: Tensor, w_res: Tensor, b_res: Tensor | None, w_out: Tensor, include_base: bool
) -> None:
    check_tensor(op, "hidden", hidden)
    check_rows(op, "hidden", hidden, ("B", "C"), _FLOATS, hidden.device)
    kind, size = ((hidden.dtype,), hidden.device), hidden.shape[1]
    check_rows(op, "w_res", w_res, ("M", "R", size, size), *kind)
    num_heads, num_layers = w_res.shape[:2]
    check_tensor(op, "w_out", w_out)
    own = w_out.dim() == 3
    check_rows(op, "w_out", w_out, (num_heads, "V", size) if own else ("V", size), *kind)
    if not isinstance(include_base, bool):
        raise TypeError(f"{op}: include_base must be a bool, got {type(include_base).__name__}")
    if include_base and own:
        raise ValueError(f"{op}: include_base must be False with own projections, got w_out {tuple(w_out.shape)}")
    if b_res is not None:
        check_rows(op, "b_res", b_res, (num_heads, num_layers, size), *kind)
    if num_heads < 1 or size < 1 or w_out.shape[-2] < 1:
        raise ValueError(f"{op}: w_res and w_out must not be empty, got {tuple(w_res.shape)} and {tuple(w_out.shape)}")
    check_no_grad(op, hidden=hidden, w_res=w_res, w_out=w_out, b_res=b_res)


def _check_root(op: str, hidden: Tensor, root: Tensor | None, w_root: Tensor | None, b_root: Tensor | None) -> None:
    if root is None and w_root is None and b_root is None:
        return
    if root is None or w_root is None:
        raise ValueError(f"{op}: root and w_root must be given together, and with b_root")
    size = hidden.shape[1]
    shapes = {"root": hidden.shape, "w_root": (size, 2 * size), "b_root": (size,)}
    for (name, shape), tensor in zip(shapes.items(), (root, w_root, b_root), strict=True):
        if tensor is not None:
            check_rows(op, name, tensor, shape, (hidden.dtype,), hidden.device)
    check_no_grad(op, root=root, w_root=w_root, b_root=b_root)
