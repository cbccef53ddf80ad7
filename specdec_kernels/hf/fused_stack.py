"""All decoder layers as one call of ours, `specdec_kernels.decoder_layers_`: what a step takes beside it is little."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from .._ops import ops
from .attention import TreeState
from .cache import TreeCache
from .fused_layer import DTYPE, FusedLayer, OwnForward, unhindered_weights

# Families whose decoder does nothing but embed, run its layers over one pair of angles, and norm.
STACKED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def fused_stack(config: PreTrainedConfig, decoder: Any, cache_argument: str) -> "FusedStack | None":
    """Return the fast forward of a decoder whose layers have theirs, or None where one call cannot do the same."""
    layers = [*decoder._modules["layers"].children()]
    forwards = [vars(layer).get("forward") for layer in layers]
    if config.model_type not in STACKED_FAMILIES or not layers or "forward" in vars(decoder):
        return None
    if not all(isinstance(forward, FusedLayer) for forward in forwards):
        return None
    if len({forward.constants for forward in forwards}) > 1 or forwards[0].multiplier != 1.0:
        return None
    return FusedStack(decoder, layers, forwards, cache_argument)


class FusedStack(OwnForward):
    """The ``forward`` of a decoder for whole steps of `HFTarget`; every other call goes to the decoder's class.

    Args:
        decoder: with embeddings, layers, angles and a norm.
        layers: of the decoder.
        forwards: of the layers.
        cache_argument: the name of the cache among the decoder's arguments.
    """

    ops = ("decoder_layers_", "rms_norm")

    def __init__(self, decoder: Any, layers: list[Any], forwards: list[FusedLayer], cache_argument: str):
        super().__init__(decoder)
        self._layers, self._forwards, self._cache_argument = layers, forwards, cache_argument
        # One loop over all parts of all layers: hundreds of them are looked at in each step.
        self._parts = [part for forward in forwards for part in forward.parts]
        self._linear_parameters = [parameters for forward in forwards for parameters in forward.linear_parameters]
        self._norm_type = type(layers[0].input_layernorm)
        self._windows = [forward.window or 0 for forward in forwards]
        self._rotated = [int(forward.rotates) for forward in forwards]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the decoder makes of ``input_ids (B, T)``."""
        state: Any = kwargs.get("tree_state")
        cache: Any = kwargs.get(self._cache_argument)
        if not args and state is not None and not state.first_node and self._takes(cache, kwargs):
            weights, biases, biased = self._parameters()
            if weights and self.is_usable(weights[0]):
                hidden = self._run(weights, biases, biased, cache, state, kwargs)
                return BaseModelOutputWithPast(last_hidden_state=hidden, **{self._cache_argument: cache})
        return type(self.module).forward(self.module, *args, **kwargs)

    def _takes(self, cache: Any, kwargs: dict[str, Any]) -> bool:
        """Say whether the inputs are those of a step, and the layers those that this was made for."""
        return (
            isinstance(cache, TreeCache)
            and cache.dtype in (None, DTYPE)
            and kwargs.get("inputs_embeds") is None
            and kwargs.get("input_ids") is not None
            and kwargs.get("position_ids") is not None
            and [*self.module._modules["layers"]._modules.values()] == self._layers
        )

    def _parameters(self) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Return all weights, all biases and which have one; no weights where a layer is to run by itself."""
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            if layer._forward_hooks or layer._forward_pre_hooks or vars(layer).get("forward") is not forward:
                return [], [], []
        weights = unhindered_weights(self._parts)
        if weights is None:
            return [], [], []
        biases = [parameters["bias"] for parameters in self._linear_parameters]
        given = [bias for bias in biases if bias is not None]
        if not given:
            return weights, given, []
        count = len(biases) // len(self._layers)
        biased = [i for i in range(count) if biases[i] is not None]
        if any((bias is not None) != (i % count in biased) for i, bias in enumerate(biases)):
            return [], [], []
        return weights, given, biased

    def _run(
        self,
        weights: list[Tensor],
        biases: list[Tensor],
        biased: list[int],
        cache: TreeCache,
        state: TreeState,
        kwargs: dict[str, Any],
    ) -> Tensor:
        decoder, first = self.module, self._forwards[0]
        ids = kwargs["input_ids"]
        # The call writes to it: nobody else's.
        hidden = decoder.embed_tokens(ids).contiguous()
        hidden = hidden.clone() if decoder.embed_tokens._forward_hooks else hidden
        cos, sin = decoder.rotary_emb(hidden, position_ids=kwargs["position_ids"])
        ops.decoder_layers_.default(
            *(hidden, weights, cos, sin, cache.claim_layers(hidden.new_empty(*ids.shape, *first.kv_shape))),
            *(state.tree_mask, state.prefix_len),
            biases=biases,
            biased=biased,
            slots=None if state.slots is None else state.slots[:, 0],
            windows=self._windows,
            rotated=self._rotated,
            scale=first.scale,
            eps=first.eps,
        )
        norm = decoder.norm
        if (
            type(norm) is not self._norm_type
            or norm._forward_hooks
            or norm._forward_pre_hooks
            or "forward" in vars(norm)
        ):
            return norm(hidden)
        return ops.rms_norm.default(hidden, norm.weight, norm.variance_epsilon)
