"""Some decoder layers in one call, against the ops it stands for, one by one, and torch's operators."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels import decoder_layers_, gated_linear, linear, rms_norm, rotary_cache_write_, tree_attention
from specdec_kernels.reference.layers import decoder_layers_ref

from . import bench_decoder, bench_linear
from .bench_decoder import CAPACITY, EPS, PREFIX
from .cases import MODELS
from .harness import Cost, Result

OP = "layers"
OURS = ("specdec_kernels", "one_by_one")
LAYERS = 4


@dataclass(frozen=True)
class Case:
    """Layers in bf16 over chains of nodes; all rows have the same prefix."""

    model: str
    batch: int
    nodes: int
    layers: int = LAYERS


CASES = {
    f"{case.model}-B{case.batch}-T{case.nodes}": case
    for case in (
        Case(model, batch, nodes)
        for model in ("smollm2_135m", "llama3_8b")
        for batch, nodes in ((1, 1), (1, 16), (1, 64), (8, 16))
    )
}


@dataclass(frozen=True)
class Inputs:
    """What the op takes; the caches are written to, always the same. ``visible`` is torch's mask of the keys."""

    hidden: Tensor
    weights: list[Tensor]
    cos: Tensor
    sin: Tensor
    caches: list[Tensor]
    tree_mask: Tensor
    prefix_len: Tensor
    visible: Tensor

    @property
    def args(self) -> tuple:
        """Return the arguments of the op behind ``hidden``."""
        return self.weights, self.cos, self.sin, self.caches, self.tree_mask, self.prefix_len

    @property
    def layers(self) -> list[tuple[list[Tensor], Tensor, Tensor]]:
        """Return weights, K and V of each layer."""
        count = len(self.caches) // 2
        return [(self.weights[9 * i : 9 * i + 9], *self.caches[2 * i : 2 * i + 2]) for i in range(count)]


@lru_cache(maxsize=1)  # what is written to is the same each time
def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draw as the benchmarks of the single ops do; every layer has matrices and caches of its own."""
    step = bench_decoder.make_inputs(bench_decoder.Case(case.model, case.batch, case.nodes), device)
    shapes, generator = bench_linear.Case(case.model, 1).shapes, torch.Generator().manual_seed(0)
    norm = torch.ones_like(step.weight)

    def weight(*shape: int) -> Tensor:
        numbers = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        return numbers.to(device, torch.bfloat16).mul_(2.0 ** round(math.log2(shape[1] ** -0.5 / 73)))

    weights: list[Tensor] = []
    for _ in range(case.layers):
        q, k, v, o, gate, up, down = (weight(*shapes[name]) for name in ("q", "k", "v", "o", "gate", "up", "down"))
        weights += [norm, q, k, v, o, norm, gate, up, down]
    shape = case.batch, CAPACITY, *step.k_cache.shape[2:]
    caches = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(2 * case.layers)]
    causal = torch.ones(case.nodes, PREFIX + case.nodes, dtype=torch.bool, device=device).tril(PREFIX)
    bits = torch.tensor([(2 << node) - 1 if node < 63 else -1 for node in range(case.nodes)], device=device)
    return Inputs(step.hidden, weights, step.cos, step.sin, caches, bits[None, :, None], step.prefix_len, causal)


def cost(case: Case) -> Cost:
    """Weights and the prefix are read once, weights are multiplied with every row; the rest is little."""
    model = MODELS[case.model]
    count = sum(rows * width for rows, width in bench_linear.Case(case.model, 1).shapes.values())
    keys = 2 * case.batch * PREFIX * model.num_kv_heads * model.head_dim
    flops = 2 * count * case.batch * case.nodes
    return Cost(2 * case.layers * (count + keys), flops=case.layers * flops, dtype="bfloat16")


def check(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare to some units in the last place: sums are rounded to bf16 in each layer."""
    for have, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=2**-5, atol=2**-4)


def providers(case: Case) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    """Return the reference, ours in one call and op by op, and torch's operators as a model calls them."""
    return {"reference": _reference, "specdec_kernels": _ours, "one_by_one": _one_by_one, "torch": _torch}


def _reference(i: Inputs) -> list[Tensor]:
    hidden, count = i.hidden.clone(), len(i.caches) // 2
    options = {"biases": [], "biased": [], "slots": None, "windows": [0] * count, "rotated": [1] * count}
    decoder_layers_ref(hidden, *i.args, **options, scale=i.caches[0].shape[3] ** -0.5, eps=EPS)
    return [hidden]


def _ours(i: Inputs) -> list[Tensor]:
    hidden = i.hidden.clone()
    decoder_layers_(hidden, *i.args, eps=EPS)
    return [hidden]


def _one_by_one(i: Inputs) -> list[Tensor]:
    x = i.hidden
    for w, k, v in i.layers:
        qkv = linear(rms_norm(x, w[0], EPS), w[1:4]).unflatten(2, (-1, k.shape[3]))
        rotary_cache_write_(qkv, i.cos, i.sin, k, v, i.prefix_len)
        attended, _ = tree_attention(qkv[:, :, : -2 * k.shape[2]], k, v, i.tree_mask, i.prefix_len)
        x = linear(attended.flatten(2), w[4:5], residual=x)
        x = linear(gated_linear(rms_norm(x, w[5], EPS), w[6], w[7]), w[8:9], residual=x)
    return [x]


def _torch(i: Inputs) -> list[Tensor]:
    x, end = i.hidden, PREFIX + i.hidden.shape[1]
    cos, sin = i.cos[:, :, None], i.sin[:, :, None]
    for w, k_cache, v_cache in i.layers:
        normed = F.rms_norm(x, x.shape[-1:], w[0], EPS)
        q, k, v = (F.linear(normed, weight).unflatten(2, (-1, k_cache.shape[3])) for weight in w[1:4])
        k_cache[:, PREFIX:end], v_cache[:, PREFIX:end] = k * cos + _turned(k) * sin, v
        heads = (t.transpose(1, 2) for t in (q * cos + _turned(q) * sin, k_cache[:, :end], v_cache[:, :end]))
        attended = F.scaled_dot_product_attention(*heads, attn_mask=i.visible, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), w[4])
        normed = F.rms_norm(x, x.shape[-1:], w[5], EPS)
        x = x + F.linear(F.silu(F.linear(normed, w[6])) * F.linear(normed, w[7]), w[8])
    return [x]


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)


def notes(results: list[Result], device: torch.device) -> str:
    """Say what one call saves."""
    times = {(r.case, r.provider): r.median_us for r in results}
    return "\n".join(
        f"{case:24} {us / LAYERS:8.1f} µs a layer, {times[case, 'one_by_one'] / LAYERS:8.1f} op by op"
        for (case, provider), us in times.items()
        if provider == "specdec_kernels" and (case, "one_by_one") in times
    )
