"""A decoder layer as eight calls of ours, in place of the thirty operators of its modules.

    h  →  rms_norm → linear(Wq Wk Wv) → rotary_cache_write_ → tree_attention → linear(Wo) + h  →  h
    h  →  rms_norm → gated_linear(Wgate Wup) → linear(Wdown) + h  →  h

It computes and rounds what the modules do, where they do.
"""

import copy
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from .._ops import ops
from .._registry import has_kernel
from .attention import TreeState
from .cache import TreeCache

DTYPE = torch.bfloat16

# Families whose layers are Llama's, but for what `FusedLayer` reads from their modules.
FUSED_FAMILIES = ("granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")
_SILU = ("silu", "swish")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")


class OwnForward:
    """The ``forward`` that `prepare` gives to one module.

    Args:
        module: whose attribute it becomes.
    """

    # The ops that it calls: a GPU that lacks a kernel of one (no Triton) runs the module's own.
    ops: ClassVar[tuple[str, ...]]

    def __init__(self, module: Any):
        self.module = module

    def is_usable(self, x: Tensor) -> bool:
        """Say whether an input is one that our kernels are for."""
        return (
            x.dtype is DTYPE
            and (x.is_cpu or (x.is_cuda and _has_twins(self.ops)))
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not self.module.training
        )


@cache
def _has_twins(names: tuple[str, ...]) -> bool:
    return all(has_kernel(name, "cuda") for name in names)


def fused_layer(config: PreTrainedConfig, layer: Any) -> "FusedLayer | None":
    """Return the fast forward of a decoder layer, or None where its modules are not those that it replaces."""
    if config.model_type not in FUSED_FAMILIES or getattr(config, "hidden_act", None) not in _SILU:
        return None
    attention, mlp = layer._modules.get("self_attn"), layer._modules.get("mlp")
    if set(layer._modules) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return None
    if not set(_ATTENTION) <= set(attention._modules) <= {*_ATTENTION, *_NORMS}:
        return None
    if not set(_MLP) <= set(mlp._modules) <= {*_MLP, "act_fn"}:
        return None
    groups = [[attention._modules[name] for name in ("q_proj", "k_proj", "v_proj")]]
    groups.append([mlp._modules[name] for name in ("gate_proj", "up_proj")])
    if any(len({linear.bias is None for linear in group}) > 1 for group in groups):
        return None
    return FusedLayer(config, layer)


class FusedLayer(OwnForward):
    """The ``forward`` of a decoder layer, for the steps of `HFTarget`; every other call goes to the layer's class.

    Args:
        config: of the model.
        layer: as `fused_layer` wants it.
    """

    ops = ("rms_norm", "linear", "rotary_cache_write_", "tree_attention", "paged_tree_attention", "gated_linear")

    def __init__(self, config: PreTrainedConfig, layer: Any):
        super().__init__(layer)
        attention, mlp = layer._modules["self_attn"], layer._modules["mlp"]
        self._skips_attention = self._skips_mlp = False
        self._index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.window = _window(config, attention)
        self.rotates = bool(getattr(attention, "use_rope", True))
        self.multiplier: float = getattr(layer, "residual_multiplier", 1.0)
        self.eps: float = layer.input_layernorm.variance_epsilon
        places = [(layer, "input_layernorm"), *((attention, name) for name in _ATTENTION)]
        places += [(layer, "post_attention_layernorm"), *((mlp, name) for name in _MLP)]
        places += [(attention, name) for name in _NORMS if name in attention._modules]
        parts = [parent._modules[name] for parent, name in places]
        # Looked up here once: attributes of modules are slow, and this is asked thirty times a step.
        self.parts = [
            (parent._modules, name, part, part._parameters, part._forward_hooks, part._forward_pre_hooks)
            for part, (parent, name) in zip(parts, places, strict=True)
        ]
        # The modules around the parts.
        blocks = [(layer._modules, "self_attn"), (layer._modules, "mlp"), (mlp._modules, "act_fn")]
        self.blocks = [
            (siblings, name, block, block._forward_hooks, block._forward_pre_hooks)
            for siblings, name in blocks
            if (block := siblings.get(name)) is not None
        ]
        self._num_kv_heads = parts[2].out_features // self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int]:
        """``(Hk, D)``."""
        return self._num_kv_heads, self.head_dim

    @property
    def linear_parameters(self) -> list[dict[str, Any]]:
        """Return the parameters of q, k, v, o, gate, up and down."""
        return [self.parts[i][3] for i in (1, 2, 3, 4, 6, 7, 8)]

    @property
    def constants(self) -> tuple[Any, ...]:
        """Return what has to be the same in all layers that run in one call, but for the values of the weights."""
        shapes = tuple(tuple(parameters["weight"].shape) for _, _, _, parameters, _, _ in self.parts)
        return self.scale, self.eps, self.multiplier, self.kv_shape, shapes

    def without(self, attention: bool, mlp: bool, layer: Any) -> "FusedLayer":
        """Return the forward of a copy of the layer that leaves out its attention, its MLP, or both."""
        other = copy.copy(self)
        other.module, other._skips_attention, other._skips_mlp = layer, attention, mlp
        return other

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the layer makes of ``hidden_states (B, T, C)``."""
        state: Any = kwargs.get("tree_state")
        cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
        is_ours = state is not None and isinstance(cache, TreeCache) and cache.dtype in (None, DTYPE)
        weights = unhindered_weights(self.parts, self.blocks) if is_ours and self.is_usable(hidden_states) else None
        if weights is None:
            return type(self.module).forward(self.module, hidden_states, *args, **kwargs)
        if not self._skips_attention:
            normed = ops.rms_norm.default(hidden_states, weights[0], self.eps)
            qkv = ops.linear.default(normed, weights[1:4], self._biases(1, 4), None)
            attended = self._attend(qkv, weights[9:], cache, state, kwargs["position_embeddings"])
            hidden_states = self._add(hidden_states, attended, weights, 4)
        if not self._skips_mlp:
            normed = ops.rms_norm.default(hidden_states, weights[5], self.eps)
            biases = self._biases(6, 8) or (None, None)
            gated = ops.gated_linear.default(normed, weights[6], weights[7], *biases)
            hidden_states = self._add(hidden_states, gated, weights, 8)
        return hidden_states

    def _biases(self, begin: int, end: int) -> list[Tensor]:
        biases = [parameters["bias"] for _, _, _, parameters, _, _ in self.parts[begin:end]]
        return [] if biases[0] is None else biases

    def _add(self, residual: Tensor, x: Tensor, weights: list[Tensor], index: int) -> Tensor:
        """Add a projection to the residual."""
        biases = self._biases(index, index + 1)
        if self.multiplier == 1.0:
            return ops.linear.default(x, [weights[index]], biases, residual)
        return residual + ops.linear.default(x, [weights[index]], biases, None) * self.multiplier

    def _attend(
        self, qkv: Tensor, norms: list[Tensor], cache: TreeCache, state: TreeState, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Write K and V, and return what the nodes see ``(B, T, Hq · D)``."""
        batch, num_nodes, width = qkv.shape
        qkv = qkv.view(batch, num_nodes, width // self.head_dim, self.head_dim)
        num_kv_heads = self._num_kv_heads
        q, key_states = qkv[:, :, : -2 * num_kv_heads], qkv[:, :, -num_kv_heads:]
        k, v = cache.claim(key_states, self._index)
        cos, sin = angles if self.rotates else (None, None)
        q_norm, k_norm = norms or (None, None)
        ops.rotary_cache_write_.default(
            *(qkv, cos, sin, k, v, state.prefix_len),
            first_node=state.first_node,
            slots=None if state.slots is None else state.slots[:, 0],
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.eps,
        )
        if state.first_node:
            q = F.pad(q, (0, 0, 0, 0, state.first_node, 0))
        tree = state.tree_mask, state.prefix_len
        if state.slots is None:
            out, _lse = ops.tree_attention.default(q, k, v, *tree, scale=self.scale, window=self.window)
        else:
            # As in `tree_attention_forward`: rows of the cache are pages.
            options = {"scale": self.scale, "window": self.window}
            out, _lse = ops.paged_tree_attention.default(q, k, v, state.slots, *tree, **options)
        return out[:, state.first_node :].flatten(2)


def unhindered_weights(parts: list[tuple[Any, ...]], blocks: list[tuple[Any, ...]]) -> list[Tensor] | None:
    """Return the weights of parts of layers, or None where one, or a block of them, is not to be passed over."""
    for siblings, name, block, hooks, pre_hooks in blocks:
        if hooks or pre_hooks or siblings[name] is not block or "forward" in vars(block):
            return None
    weights = []
    for siblings, name, part, parameters, hooks, pre_hooks in parts:
        weight = parameters["weight"]
        if hooks or pre_hooks or siblings[name] is not part or weight.dtype is not DTYPE:
            return None
        weights.append(weight)
    return weights


def _window(config: PreTrainedConfig, attention: Any) -> int | None:
    """Return the window that the attention module hands on; Mistral's reads it from the config at each call."""
    return config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
