"""Losses of draft heads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .hidden import IGNORED
from .processes import Processes

# Rows whose logits are held at once. 128 rows of 16k fp32 logits are 8 MB: they stay in a CPU's cache between the
# softmax passes, and a GPU still has enough of them.
CHUNK_ROWS = {"cpu": 128, "cuda": 4096}


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of ``x Wᵀ`` whose logits exist for one chunk of rows at a time; gradients come in the same pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, labels: Tensor, teacher, teacher_weight, num_labels: Tensor | None):
        num_valid = (labels != IGNORED).sum().clamp_min(1) if num_labels is None else num_labels
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        total = x.new_zeros((), dtype=torch.float32)
        chunk = CHUNK_ROWS.get(x.device.type, 1024)
        compute = weight.to(x.dtype)
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            share = (labels[part] != IGNORED)[:, None] / num_valid
            logprobs = F.log_softmax((x[part] @ compute.T).float(), dim=-1)
            if teacher is None or teacher_weight is None:
                index = labels[part].clamp_min(0)[:, None]
                total -= (logprobs.gather(1, index) * share).sum()
                grad = logprobs.exp_().scatter_add_(1, index, torch.full_like(index, -1, dtype=logprobs.dtype))
            else:
                target = F.softmax((teacher[part] @ teacher_weight.T).float(), dim=-1)
                total -= (torch.linalg.vecdot(logprobs, target)[:, None] * share).sum()
                grad = logprobs.exp_().sub_(target)
            grad = (grad * share).to(x.dtype)
            grad_x[part] = grad @ compute
            if grad_weight is not None:
                grad_weight += (grad.T @ x[part]).float()
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, None if grad_weight is None else grad_weight * grad_loss, None, None, None, None


def mean_count(labels: Tensor, processes: Processes) -> Tensor | None:
    """Return how many labels in each column are not −100, as the mean over several processes; None in a lone one.

    Each process's sum of losses divided by this, and averaged, is the mean over the labels of all processes.
    """
    if processes.count == 1:
        return None
    return processes.mean((labels != IGNORED).sum(0).float()).clamp_min(1 / processes.count)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, teacher: Tensor | None = None, teacher_weight: Tensor | None = None,
    num_labels: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean of ``−log softmax(x Wᵀ)[label]`` over the labels that are not −100; 0 when there is none.

    Equal to `torch.nn.functional.cross_entropy` on ``x @ weight.T``, without storing the logits. With a teacher the
    target is its whole distribution, ``−Σ_v p_v log softmax(x Wᵀ)_v`` with ``p = softmax(teacher W_teacherᵀ)``.

    Args:
        x: ``(n, C)``; its dtype is the dtype of the products.
        weight: ``(V, C)``; frozen (no gradient is computed) unless it requires grad.
        labels: ``(n,) int64`` in ``[0, V)`` or −100. Not checked: the gather that reads them raises on a CPU. With a
            teacher only whether they are −100 counts.
        teacher: ``(n, C)`` hidden states in ``x``'s dtype, or None; no gradient goes there.
        teacher_weight: ``(V, C)`` in ``x``'s dtype; needed with a teacher.
        num_labels: a scalar to divide the sum by instead of the number of labels, see `mean_count`.
    """
    return _LinearCrossEntropy.apply(x, weight, labels, teacher, teacher_weight, num_labels)


def head_weights(num_heads: int, decay: float) -> list[float]:
    """Return ``λ^k`` for k = 1…M: later heads are harder and noisier, so they weigh less (arXiv 2401.10774, eq. 1)."""
    return [decay**k for k in range(1, num_heads + 1)]


def medusa_loss(
    states: Tensor, weight: Tensor, labels: Tensor, decay: float,
    teacher: Tensor | None = None, teacher_weight: Tensor | None = None, num_labels: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return Medusa-1's loss ``Σ_k λ^k · CE_k`` and the heads' own cross-entropies.

    Args:
        states: ``(n, M, C)`` after the residual blocks.
        weight: ``(V, C)`` shared by the heads, or ``(M, V, C)``.
        labels: ``(n, M) int64``: rows of ``weight``, −100 where there is no token.
        decay: ``λ``.
        teacher: ``(n, M, C)`` for the backbone's own distribution as the target of each head, see
            `linear_cross_entropy`; None for the labels.
        teacher_weight: ``(V, C)``, with a teacher.
        num_labels: ``(M,)`` to divide by, see `mean_count`; None: each head's own.

    Returns:
        The loss, a scalar, and ``(M,)`` cross-entropies without gradient.
    """
    num_heads = states.shape[1]
    weights = weight if weight.dim() == 3 else [weight] * num_heads
    teachers = [None] * num_heads if teacher is None else teacher.unbind(1)
    counts = [None] * num_heads if num_labels is None else num_labels.unbind()
    losses = [
        linear_cross_entropy(states[:, k], weights[k], labels[:, k], teachers[k], teacher_weight, counts[k])
        for k in range(num_heads)
    ]
    parts = torch.stack(losses)
    return (parts * parts.new_tensor(head_weights(num_heads, decay))).sum(), parts.detach()
