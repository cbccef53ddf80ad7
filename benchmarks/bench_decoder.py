"""What a decoder layer does between its linear layers and attention, against torch's operators."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels import rms_norm, rotary_cache_write_
from specdec_kernels.reference.decoder import rms_norm_ref, rotary_cache_write_ref

from .cases import MODELS
from .harness import Cost

OP = "decoder"
OURS = ("specdec_kernels",)
PREFIX, CAPACITY, EPS = 512, 1024, 1e-5


@dataclass(frozen=True)
class Case:
    """Both norms of a layer, and rotation with the cache's new rows, in bf16; all rows have the same prefix."""

    model: str
    batch: int
    nodes: int


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
    """What the ops take; qkv and the caches are written to."""

    hidden: Tensor
    weight: Tensor
    qkv: Tensor
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    prefix_len: Tensor


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draw hidden states and heads; caches are ``(B, Hk, S, D)``, seen as the op wants them."""
    model, generator = MODELS[case.model], torch.Generator().manual_seed(0)
    batch, nodes, dim = case.batch, case.nodes, model.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    angle = torch.arange(PREFIX, PREFIX + nodes)[:, None] * 10000.0 ** (-torch.arange(dim // 2) / (dim // 2)).repeat(2)
    caches = torch.zeros(2, batch, model.num_kv_heads, CAPACITY, dim, dtype=torch.bfloat16, device=device)
    return Inputs(
        normal(batch, nodes, model.hidden_size),
        normal(model.hidden_size),
        normal(batch, nodes, model.num_heads + 2 * model.num_kv_heads, dim),
        *(f(angle)[None].to(device, torch.bfloat16) for f in (torch.cos, torch.sin)),
        *caches.transpose(2, 3),
        torch.full((batch,), PREFIX, dtype=torch.int32, device=device),
    )


def cost(case: Case) -> Cost:
    """Everything is read once and written once."""
    model = MODELS[case.model]
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    numbers = case.batch * case.nodes * (2 * model.hidden_size + heads)
    return Cost(2 * numbers, 2 * numbers)


def check(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare to some units in the last place: torch's norm rounds once less."""
    for have, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=2**-6, atol=2**-6)


def providers(case: Case) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    """Return the reference, ours, and torch's operators as a model calls them, into a cache of one length."""
    return {"reference": _reference, "specdec_kernels": _ours, "torch": _torch}


def _reference(i: Inputs) -> list[Tensor]:
    norms = [rms_norm_ref(i.hidden, i.weight, EPS) for _ in range(2)]
    options = {"slots": None, "q_norm": None, "k_norm": None, "eps": EPS}
    rotary_cache_write_ref(i.qkv, i.cos, i.sin, i.k_cache, i.v_cache, i.prefix_len, first_node=0, **options)
    return [*norms, i.qkv, i.k_cache, i.v_cache]


def _ours(i: Inputs) -> list[Tensor]:
    norms = [rms_norm(i.hidden, i.weight, EPS) for _ in range(2)]
    rotary_cache_write_(i.qkv, i.cos, i.sin, i.k_cache, i.v_cache, i.prefix_len)
    return [*norms, i.qkv, i.k_cache, i.v_cache]


def _torch(i: Inputs) -> list[Tensor]:
    norms = [F.rms_norm(i.hidden, i.hidden.shape[-1:], i.weight, EPS) for _ in range(2)]
    num_kv, end = i.k_cache.shape[2], PREFIX + i.qkv.shape[1]
    q, k, v = i.qkv.split([i.qkv.shape[2] - 2 * num_kv, num_kv, num_kv], dim=2)
    cos, sin = i.cos[:, :, None], i.sin[:, :, None]
    i.k_cache[:, PREFIX:end] = k * cos + _rotated(k) * sin
    i.v_cache[:, PREFIX:end] = v
    q.copy_(q * cos + _rotated(q) * sin)  # ours rotate in place, too; a model would keep the new tensor
    return [*norms, i.qkv, i.k_cache, i.v_cache]


def _rotated(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)
