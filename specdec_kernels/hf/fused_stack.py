"""All decoder layers as one call of ours, `specdec_kernels.decoder_layers_`: what a step takes beside it is little.

Layers that somebody hooked, exchanged or stands in for run by themselves, those between them in one call each::

    layers              0     1     2     3     4     5
    a whole step       [one call                       ]
    a hook at 1        [one ] run  [one call           ]
    layers 2 … 5        pass  enter[one call           ]
"""

from typing import Any

import torch
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
    """The ``forward`` of a decoder for steps of `HFTarget`; every other call goes to the decoder's class.

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
        self._blocks = [block for forward in forwards for block in forward.blocks]
        self._linear_parameters = [parameters for forward in forwards for parameters in forward.linear_parameters]
        self._norm_type = type(layers[0].input_layernorm)
        self._windows = [forward.window or 0 for forward in forwards]
        self._rotated = [int(forward.rotates) for forward in forwards]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the decoder makes of ``input_ids (B, T)``."""
        state: Any = kwargs.get("tree_state")
        cache: Any = kwargs.get(self._cache_argument)
        if not args and state is not None and not state.first_node and self._takes(cache, kwargs):
            stretches = self._stretches()
            weights, biases, biased = self._parameters() if stretches else ([], [], [])
            if weights and self.is_usable(weights[0]):
                hidden = self._run(stretches, (weights, biases, biased), cache, state, kwargs)
                return BaseModelOutputWithPast(last_hidden_state=hidden, **{self._cache_argument: cache})
        return type(self.module).forward(self.module, *args, **kwargs)

    def _takes(self, cache: Any, kwargs: dict[str, Any]) -> bool:
        """Say whether the inputs are those of a step, and the layers as many as this was made for."""
        return (
            isinstance(cache, TreeCache)
            and cache.dtype in (None, DTYPE)
            and kwargs.get("inputs_embeds") is None
            and kwargs.get("input_ids") is not None
            and kwargs.get("position_ids") is not None
            and len(self.module._modules["layers"]._modules) == len(self._layers)
        )

    def _stretches(self) -> list[tuple[int, int]]:
        """Return first and end of each stretch of layers that run in one call; those between run by themselves."""
        found, first = [], 0
        present = self.module._modules["layers"]._modules.values()
        for i, (layer, own, forward) in enumerate(zip(present, self._layers, self._forwards, strict=True)):
            if (
                layer is not own
                or layer._forward_hooks
                or layer._forward_pre_hooks
                or vars(layer).get("forward") is not forward
            ):
                found.append((first, i))
                first = i + 1
        found.append((first, len(self._layers)))
        return [(first, end) for first, end in found if first < end]

    def _parameters(self) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Return all weights, all biases and which have one; no weights where parts of a layer run by themselves."""
        weights = unhindered_weights(self._parts, self._blocks)
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
        stretches: list[tuple[int, int]],
        parameters: tuple[list[Tensor], list[Tensor], list[int]],
        cache: TreeCache,
        state: TreeState,
        kwargs: dict[str, Any],
    ) -> Tensor:
        decoder, first, ids, at = self.module, self._forwards[0], kwargs["input_ids"], 0
        hidden = decoder.embed_tokens(ids)
        angles = decoder.rotary_emb(hidden, position_ids=kwargs["position_ids"])
        buffers = cache.claim_layers(hidden.new_empty(*ids.shape, *first.kv_shape))
        is_ours = not decoder.embed_tokens._forward_hooks
        options = {name: value for name, value in kwargs.items() if name not in ("input_ids", "inputs_embeds")}
        options |= {"attention_mask": None, "position_embeddings": angles}
        layers = [*decoder._modules["layers"]._modules.values()]
        for begin, end in [*stretches, (len(layers), len(layers))]:
            for layer in layers[at:begin]:
                hidden, is_ours = layer(hidden, **options), False
            if begin < end:
                # The call writes to it: nobody else's.
                hidden = hidden.contiguous() if is_ours else hidden.clone(memory_format=torch.contiguous_format)
                self._run_stretch(begin, end, hidden, parameters, angles, buffers, state)
            at = end
        norm = decoder.norm
        if (
            type(norm) is not self._norm_type
            or norm._forward_hooks
            or norm._forward_pre_hooks
            or "forward" in vars(norm)
        ):
            return norm(hidden)
        return ops.rms_norm.default(hidden, norm.weight, norm.variance_epsilon)

    def _run_stretch(
        self,
        begin: int,
        end: int,
        hidden: Tensor,
        parameters: tuple[list[Tensor], list[Tensor], list[int]],
        angles: tuple[Tensor, Tensor],
        buffers: list[Tensor],
        state: TreeState,
    ) -> None:
        (weights, biases, biased), first = parameters, self._forwards[0]
        if (begin, end) != (0, len(self._layers)):
            count, num_biases = len(weights) // len(self._layers), len(biased)
            weights, biases = weights[count * begin : count * end], biases[num_biases * begin : num_biases * end]
            buffers = buffers[2 * begin : 2 * end]
        ops.decoder_layers_.default(
            *(hidden, weights, *angles, buffers, state.tree_mask, state.prefix_len),
            biases=biases,
            biased=biased,
            slots=None if state.slots is None else state.slots[:, 0],
            windows=self._windows[begin:end],
            rotated=self._rotated[begin:end],
            scale=first.scale,
            eps=first.eps,
        )
