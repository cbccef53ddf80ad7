"""Losses of draft heads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .hidden import IGNORED

# Rows whose logits are held at once. 128 rows of 16k fp32 logits are 8 MB: they stay in a CPU's cache between the
# softmax passes, and a GPU still has enough of them.
CHUNK_ROWS = {"cpu": 128, "cuda": 4096}


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of ``x Wᵀ`` whose logits exist for one chunk of rows at a time; gradients come in the same pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        num_valid = (labels != IGNORED).sum().clamp_min(1)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = x.new_zeros((), dtype=torch.float32)
        chunk = CHUNK_ROWS.get(x.device.type, 1024)
        compute = weight.to(x.dtype)
        for start in range(0, len(x), chunk):
            rows, target = x[start : start + chunk], labels[start : start + chunk]
            valid = target != IGNORED
            index = target.clamp_min(0)[:, None]
            logprobs = F.log_softmax((rows @ compute.T).float(), dim=-1)
            total -= (logprobs.gather(1, index)[:, 0] * valid).sum()
            grad = logprobs.exp_()
            grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype))
            grad = (grad * (valid / num_valid)[:, None]).to(x.dtype)
            grad_x[start : start + chunk] = grad @ compute
            if grad_weight is not None:
                grad_weight += (grad.T @ rows).float()
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total / num_valid

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, None if grad_weight is None else grad_weight * grad_loss, None


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of ``−log softmax(x Wᵀ)[label]`` over the labels that are not −100; 0 when there is none.

    Equal to `torch.nn.functional.cross_entropy` on ``x @ weight.T``, without storing the logits.

    Args:
        x: ``(n, C)``; its dtype is the dtype of the products.
        weight: ``(V, C)``; frozen (no gradient is computed) unless it requires grad.
        labels: ``(n,) int64`` in ``[0, V)`` or −100. Not checked: the gather that reads them raises on a CPU.
    """
    return _LinearCrossEntropy.apply(x, weight, labels)


def head_weights(num_heads: int, decay: float) -> list[float]:
    """Return ``λ^k`` for k = 1…M: later heads are harder and noisier, so they weigh less (arXiv 2401.10774, eq. 1)."""
    return [decay**k for k in range(1, num_heads + 1)]


def medusa_loss(states: Tensor, weight: Tensor, labels: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Return Medusa-1's loss ``Σ_k λ^k · CE_k`` and the heads' own cross-entropies.

    Args:
        states: ``(n, M, C)`` after the residual blocks.
        weight: ``(V, C)`` shared by the heads, or ``(M, V, C)``.
        labels: ``(n, M) int64``: rows of ``weight``, −100 where there is no token.
        decay: ``λ``.

    Returns:
        The loss, a scalar, and ``(M,)`` cross-entropies without gradient.
    """
    num_heads = states.shape[1]
    weights = weight if weight.dim() == 3 else [weight] * num_heads
    losses = [linear_cross_entropy(states[:, k], weights[k], labels[:, k]) for k in range(num_heads)]
    parts = torch.stack(losses)
    return (parts * parts.new_tensor(head_weights(num_heads, decay))).sum(), parts.detach()
