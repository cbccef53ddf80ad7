"""Medusa heads in plain torch: residual blocks, vocabulary projection, top-k.

Letters: ``B`` rows, ``M`` heads, ``R`` residual layers of a head, ``C`` hidden size, ``V`` vocabulary rows,
``K`` top-k.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT_EPS = 1e-6  # under the root mean square of an embedding, which may be a row of zeros


def root_block(hidden: Tensor, root: Tensor, w_root: Tensor, b_root: Tensor | None) -> Tensor:
    """Put the pending token's embedding into the states: ``(…, C) → (…, C)``. Differentiable.

    ``h + SiLU([h; e / rms(e)] W_rootᵀ + b_root)``
    """
    wide = root.to(torch.promote_types(root.dtype, torch.float32))
    normed = F.rms_norm(wide, root.shape[-1:], eps=ROOT_EPS).to(hidden.dtype)
    return hidden + F.silu(F.linear(torch.cat([hidden, normed], dim=-1), w_root, b_root))


def residual_blocks(hidden: Tensor, w_res: Tensor, b_res: Tensor | None) -> Tensor:
    """Run every head's residual blocks, ``x ← x + SiLU(x Wᵀ + b)``: ``(B, C) → (M, B, C)``. Differentiable."""
    num_heads, num_layers = w_res.shape[:2]
    x = hidden.expand(num_heads, *hidden.shape)
    for layer in range(num_layers):
        weight = w_res[:, layer].transpose(1, 2)
        y = torch.bmm(x, weight) if b_res is None else torch.baddbmm(b_res[:, layer, None], x, weight)
        x = x + F.silu(y)
    return x


def project(x: Tensor, w_out: Tensor) -> Tensor:
    """Project ``(M, B, C)`` to logits ``(B, M, V)`` by own weights ``(M, V, C)`` or shared ones ``(V, C)``."""
    if w_out.dim() == 3:
        return torch.bmm(x, w_out.transpose(1, 2)).transpose(0, 1)
    # Two dimensions: of a strided three-dimensional input, `linear` makes a batched product and copies the weight.
    return F.linear(x.transpose(0, 1).flatten(0, 1), w_out).unflatten(0, (x.shape[1], len(x)))


def _projected_rows(
    hidden: Tensor, w_res: Tensor, b_res: Tensor | None, include_base: bool, root: Tensor | None, *block: Tensor | None
) -> Tensor:
    """Return what is projected: the heads' states, the hidden state itself before them if asked, ``(M, B, C)``."""
    w_root, b_root = block
    seen = hidden if root is None or w_root is None else root_block(hidden, root, w_root, b_root)
    x = residual_blocks(seen, w_res, b_res)
    return torch.cat([hidden.unsqueeze(0), x]) if include_base else x


def medusa_project_ref(
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
    """Return the heads' logits ``(B, M, V)``; see `specdec_kernels.medusa_project`."""
    return project(_projected_rows(hidden, w_res, b_res, include_base, root, w_root, b_root), w_out).contiguous()


def medusa_project_topk_ref(
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
    """Return ``(values, ids, lse)``; see `specdec_kernels.medusa_project_topk`."""
    logits = project(_projected_rows(hidden, w_res, b_res, include_base, root, w_root, b_root), w_out).float()
    values, rows = topk_lowest_id(logits, k)
    # Finite even where the largest logit is not, so that ∞ − ∞ is never formed.
    finite = torch.finfo(logits.dtype)
    shift = logits.amax(-1, keepdim=True).clamp_(finite.min, finite.max)
    lse = (logits - shift).exp_().sum(-1).log_() + shift.squeeze(-1)
    return values, rows if vocab_map is None else vocab_map[rows], lse


def topk_lowest_id(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row in descending order, equal ones by ascending id, NaN after everything else.

    `torch.topk` does not say which of several equal values it returns, so value and id are packed into one integer:
    the upper half orders like the fp32 value, the lower half is the complement of the id.
    """
    num_ids = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # −0.0 + 0.0 = 0.0: the two zeros are equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = order.masked_fill_(logits.isnan(), -(2**31))
    complement = torch.arange(num_ids - 1, -1, -1, device=logits.device)
    best = ((order.long() << 32) | complement).topk(k, dim=-1).values
    ids = (num_ids - 1) - (best & 0xFFFFFFFF)
    return logits.gather(-1, ids), ids
