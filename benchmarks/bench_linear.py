"""The linear layers of one decoder layer, with SiLU and residuals, against torch with merged weights and without."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels import gated_linear, linear
from specdec_kernels.reference.linear import gated_linear_ref, linear_ref

from .cases import MODELS
from .harness import Cost, Result

OP = "linear"
OURS = ("specdec_kernels",)


@dataclass(frozen=True)
class Case:
    """One layer in bf16 over so many rows, a batch's nodes together."""

    model: str
    rows: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of the weights."""
        m = MODELS[self.model]
        q, kv, width, inner = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim, m.hidden_size, m.intermediate_size
        shapes = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
        return shapes | {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}


CASES = {
    f"{case.model}-M{case.rows}": case
    for case in (Case(model, rows) for model in ("smollm2_135m", "llama3_8b") for rows in (1, 16, 64, 128))
}


@dataclass(frozen=True)
class Inputs:
    """Weights by name, those that torch is given merged, and the input of each group."""

    weights: dict[str, Tensor]
    qkv: Tensor
    gate_up: Tensor
    hidden: Tensor
    attended: Tensor
    gated: Tensor


@lru_cache(maxsize=1)  # nothing is written to
def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draw weights as small whole numbers times a power of two, which is fast and exact in bf16."""
    generator = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> Tensor:
        numbers = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        return numbers.to(device, torch.bfloat16).mul_(2.0 ** round(math.log2(2 * shape[1] ** -0.5 / 73)))

    by_name = {name: weights(*shape) for name, shape in case.shapes.items()}
    merged = (torch.cat([by_name[name] for name in names]) for names in (("q", "k", "v"), ("gate", "up")))
    rows = (
        torch.randn(case.rows, by_name[name].shape[1], generator=generator).to(device, torch.bfloat16)
        for name in ("q", "o", "down")
    )
    return Inputs(by_name, *merged, *rows)


def cost(case: Case) -> Cost:
    """Every weight is read once, and multiplied with every row."""
    count = sum(rows * width for rows, width in case.shapes.values())
    return Cost(2 * count, flops=2 * count * case.rows, dtype="bfloat16")


def check(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare to some units in the last place: sums are rounded to bf16 between."""
    for have, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=2**-6, atol=2**-4)


def providers(case: Case) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    """Return the reference, ours, torch with merged weights, and torch with a product for each weight."""
    return {
        "reference": lambda inputs: _layer(inputs, linear_ref, partial(gated_linear_ref, gate_bias=None, up_bias=None)),
        "specdec_kernels": lambda inputs: _layer(inputs, _linear, gated_linear),
        "torch_merged": _torch_merged,
        "torch": _torch,
    }


def _linear(x: Tensor, weights: list[Tensor], biases: list[Tensor], residual: Tensor | None) -> Tensor:
    return linear(x, weights, biases, residual=residual)


def _layer(inputs: Inputs, linear: Callable, gated_linear: Callable) -> list[Tensor]:
    w = inputs.weights
    return [
        linear(inputs.hidden, [w["q"], w["k"], w["v"]], [], None),
        linear(inputs.attended, [w["o"]], [], inputs.hidden),
        gated_linear(inputs.hidden, w["gate"], w["up"]),
        linear(inputs.gated, [w["down"]], [], inputs.hidden),
    ]


def _torch_merged(inputs: Inputs) -> list[Tensor]:
    w = inputs.weights
    gate, up = F.linear(inputs.hidden, inputs.gate_up).chunk(2, dim=-1)
    return [
        F.linear(inputs.hidden, inputs.qkv),
        inputs.hidden + F.linear(inputs.attended, w["o"]),
        F.silu(gate) * up,
        inputs.hidden + F.linear(inputs.gated, w["down"]),
    ]


def _torch(inputs: Inputs) -> list[Tensor]:
    """As a model's modules do it."""
    w = inputs.weights
    qkv = [F.linear(inputs.hidden, w[name]) for name in ("q", "k", "v")]
    return [
        torch.cat(qkv, dim=-1),
        inputs.hidden + F.linear(inputs.attended, w["o"]),
        F.silu(F.linear(inputs.hidden, w["gate"])) * F.linear(inputs.hidden, w["up"]),
        inputs.hidden + F.linear(inputs.gated, w["down"]),
    ]


def notes(results: list[Result], device: torch.device) -> str:
    """Say how fast the weights go by."""
    return "\n".join(
        f"{r.case:24} {r.speedup_over_best_baseline:5.2f} times as fast as torch's best, "
        f"{r.cost_bytes / r.median_us / 1e3:6.1f} GB/s"
        for r in results
        if r.provider in OURS and r.speedup_over_best_baseline is not None
    )
