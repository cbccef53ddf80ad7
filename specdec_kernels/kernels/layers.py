"""Whole decoder layers in Triton: the launches of their ops, one after the other, prepared once for all layers alike.

A layer is eight launches, nine where attention splits its keys. They write to buffers that the next layer writes anew,
and the last one to ``hidden``. What they are given is worked out for the first layer; for the others only the layer's
own tensors take their places among the arguments::

    h → normed → qkv → (rotated, K and V to the cache) → attended → + h: middle → normed → gated → + middle: h
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .._registry import OPS
from ._launch import Call, launch
from .decoder import rms_norm_call, rotary_cache_write_call
from .linear import gated_linear_call, linear_call
from .tree_attention import attention_calls, plan_of


def decoder_layers_triton(
    hidden, weights, cos, sin, caches, tree_mask, prefix_len, *, biases, biased, slots, windows, rotated, scale, eps
) -> None:
    """Launch the kernels; see `specdec_kernels.decoder_layers_`. The reference serves fp64 and wider heads."""
    if hidden.numel() == 0:
        return
    step = _Step(hidden, weights, (cos, sin), caches, (tree_mask, prefix_len, slots), biased, scale, eps)
    if hidden.dtype == torch.float64 or step.plan(*caches[:2]) is None:
        OPS["decoder_layers_"].reference(
            *(hidden, weights, cos, sin, caches, tree_mask, prefix_len),
            **{"biases": biases, "biased": biased, "slots": slots, "windows": windows, "rotated": rotated},
            **{"scale": scale, "eps": eps},
        )
        return
    count = len(windows)
    num_weights, num_biases = len(weights) // count, len(biased)
    prepared: dict[tuple, list[_Launch]] = {}
    with torch.cuda.device_of(hidden):
        for i, form in enumerate(zip(windows, rotated, strict=True)):
            own = [*caches[2 * i : 2 * i + 2], *weights[num_weights * i : num_weights * (i + 1)]]
            own += biases[num_biases * i : num_biases * (i + 1)]
            key = (*form, *[(tensor.stride(), tensor.data_ptr() % 16) for tensor in own])
            launches = prepared.get(key)
            if launches is None:
                # Other objects than the caller's, who may give one in two places.
                first = [tensor.detach() for tensor in own]
                launches = prepared[key] = [_Launch(call, first) for call in step.calls(first, num_weights, *form)]
            for start in launches:
                start(own)


class _Launch:
    """One launch of a layer, to be made for other layers, too.

    Args:
        call: the launch.
        own: tensors of that layer alone; those among its arguments are exchanged.
    """

    def __init__(self, call: Call, own: list[Tensor]):
        self._call, self._args = call, list(call.args)
        self._start: Callable | None = None
        index = {id(tensor): i for i, tensor in enumerate(own)}
        self._single = [(i, index[id(arg)]) for i, arg in enumerate(call.args) if id(arg) in index]
        self._tuples = [
            (i, [(arg, index.get(id(arg))) for arg in args])
            for i, args in enumerate(call.args)
            if type(args) is tuple and any(id(arg) in index for arg in args)
        ]

    def __call__(self, own: list[Tensor]) -> None:
        args = self._args
        for i, which in self._single:
            args[i] = own[which]
        for i, members in self._tuples:
            args[i] = tuple([arg if which is None else own[which] for arg, which in members])
        if self._start is None:
            kernel, grid, _, options, facts = self._call
            self._start = launch(kernel, grid, tuple(args), options, facts)
        else:
            self._start(*args)


class _Step:
    """What all layers share: the inputs of the op, and buffers."""

    def __init__(self, hidden, weights, angles, caches, tree, biased, scale, eps):
        batch, num_nodes, _ = hidden.shape
        num_kv_heads, head_dim = caches[0].shape[2:]
        num_q_heads, inner = weights[1].shape[0] // head_dim, weights[6].shape[0]
        self._hidden, self._angles, self._biased = hidden, angles, list(biased)
        self._tree_mask, self._prefix_len, self._slots = tree
        self._scale, self._eps = scale, eps
        self._normed, self._middle = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
        self._heads = hidden.new_empty(batch, num_nodes, num_q_heads + 2 * num_kv_heads, head_dim)
        self._qkv, self._queries = self._heads.flatten(2), self._heads[:, :, :num_q_heads]
        self._attended = hidden.new_empty(self._queries.shape)
        self._lse = hidden.new_empty(self._queries.shape[:3], dtype=torch.float32)
        self._gated = hidden.new_empty(batch, num_nodes, inner)

    def plan(self, k: Tensor, v: Tensor):
        """Return the plan of a layer's attention, or None."""
        return plan_of(self._queries, k, v)

    def calls(self, own: list[Tensor], num_weights: int, window: int, is_rotated: int) -> Iterator[Call]:
        """Yield the launches of a layer: of K and V, its weights, and its biases."""
        k, v, *w = own
        w, b = w[:num_weights], dict(zip(self._biased, w[num_weights:], strict=True))
        normed, middle, eps = self._normed, self._middle, self._eps
        yield rms_norm_call(self._hidden, w[0], eps, normed)
        yield linear_call(normed, w[1:4], self._all_or_none(b, w[1:4]), None, self._qkv)
        norms = dict(zip(("q_norm", "k_norm"), w[9:] or (None, None), strict=True))
        options = {"first_node": 0, "slots": self._slots, "eps": eps, **norms}
        cos, sin = self._angles if is_rotated else (None, None)
        yield rotary_cache_write_call(self._heads, cos, sin, k, v, self._prefix_len, **options)
        yield from attention_calls(
            *(self.plan(k, v), self._queries, (k, v), None if self._slots is None else self._slots[:, None]),
            *((self._tree_mask, self._prefix_len), (self._attended, self._lse)),
            scale=self._scale,
            window=window or None,
        )
        yield linear_call(self._attended.flatten(2), w[4:5], _given(b, 3), self._hidden, middle)
        yield rms_norm_call(middle, w[5], eps, normed)
        yield gated_linear_call(normed, w[6], w[7], b.get(4), b.get(5), self._gated)
        yield linear_call(self._gated, w[8:9], _given(b, 6), middle, self._hidden)

    def _all_or_none(self, biases: dict[int, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the biases of q, k and v; where some have none, zeros."""
        given = [biases.get(i) for i in range(3)]
        if given == [None] * 3:
            return []
        zeros = [weight.new_zeros(weight.shape[0]) for weight in weights]
        return [zero if bias is None else bias for bias, zero in zip(given, zeros, strict=True)]


def _given(biases: dict[int, Tensor], index: int) -> list[Tensor]:
    return [biases[index]] if index in biases else []
