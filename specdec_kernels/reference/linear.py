"""Linear layers in plain torch: several matrices over one input, with a residual or a gate behind them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_ref(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None) -> Tensor:
    """Return ``(..., ΣN)``; see `specdec_kernels.linear`."""
    y = torch.cat([F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)], dim=-1)
    return y if residual is None else residual + y


def gated_linear_ref(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
) -> Tensor:
    """Return ``(..., N)``; see `specdec_kernels.gated_linear`."""
    return F.silu(F.linear(x, gate_weight, gate_bias)) * F.linear(x, up_weight, up_bias)
