"""Run some of a decoder's layers through the model's own forward: positions, masks and norms stay the model's business.

During a call the list of layers is another one of the same length, in which a layer that does not run is replaced by a
stand-in that hands the hidden states on:

    layers                     0       1       2       3       4       5
    plan(stop=2)               run     run     tap     pass    pass    pass      the tap keeps what layer 1 gave
    plan(start=2, hidden)      pass    enter   run     run     run     run       layer 1's place gives `hidden`
    skipped_attention={1, 2},  run     no      pass    no      run     run
    skipped_mlp={2, 3}                 attn.           MLP

The model itself is not changed, nor does another model that shares its weights notice.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..decoding.protocols import LayerPlan
from .fused_layer import FusedLayer

# Families whose MLP gives a second value, which the layer drops.
_TUPLE_MLPS = ("gpt_oss",)


class _StandIn(nn.Module):
    """Take the place of a layer and hand the hidden states on; what else the model asks of the layer is the layer's."""

    def __init__(self, layer: nn.Module, gives_tuple: bool):
        super().__init__()
        # In a tuple, the layer is no submodule.
        self._layer = (layer,)
        self.gives_tuple = gives_tuple

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)

    def pass_on(self, hidden_states: Tensor) -> Tensor:
        """Return what goes to the next layer."""
        return hidden_states

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        passed = self.pass_on(hidden_states)
        return (passed, None) if self.gives_tuple else passed


class _Entry(_StandIn):
    """Give the hidden states of a forward that has come this far already."""

    hidden: Tensor | None = None

    def pass_on(self, hidden_states: Tensor) -> Tensor:
        return hidden_states if self.hidden is None else self.hidden


class _Tap(_StandIn):
    """Keep the hidden states that pass."""

    seen: Tensor | None = None

    def pass_on(self, hidden_states: Tensor) -> Tensor:
        self.seen = hidden_states
        return hidden_states


class _NoBlock(_StandIn):
    """Take the place of an attention block or an MLP: it adds nothing to the residual, and caches nothing."""

    def pass_on(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


class LayerRunner:
    """Run a decoder by plans, after a whole forward inside `tapped`.

    Args:
        model: a causal LM whose decoder keeps its layers in ``layers``, and they their blocks in ``self_attn`` and
            ``mlp``: every supported family.
    """

    def __init__(self, model: PreTrainedModel):
        self._decoder = model.base_model
        self._mlp_gives_tuple = model.config.model_type in _TUPLE_MLPS
        self._layers: list[Any] = [*self._decoder._modules["layers"].children()]  # type: ignore[union-attr]
        # Some versions of some families wrap what a layer gives; seen when a layer runs. Ours give a tensor, and a look
        # would keep them from running in one call.
        is_ours = all(isinstance(vars(layer).get("forward"), FusedLayer) for layer in self._layers)
        self._layer_gives_tuple: bool | None = False if is_ours else None
        self._lists: dict[LayerPlan, nn.ModuleList] = {}

    @property
    def num_layers(self) -> int:
        """``L``."""
        return len(self._layers)

    def check(self, plan: LayerPlan) -> None:
        """Raise ValueError unless the decoder has these layers."""
        end = self.num_layers if plan.stop is None else plan.stop
        if not 0 <= plan.start < end <= self.num_layers or plan.stop == self.num_layers:
            raise ValueError(
                f"HFTarget: a plan must have 0 <= start < stop < {self.num_layers} (stop None: to the end), got start "
                f"{plan.start}, stop {plan.stop}"
            )
        for name in ("skipped_attention", "skipped_mlp"):
            unknown = sorted(layer for layer in getattr(plan, name) if not 0 <= layer < self.num_layers)
            if unknown:
                raise ValueError(f"HFTarget: {name} must hold layers in [0, {self.num_layers}), got {unknown}")

    @contextmanager
    def planned(self, plan: LayerPlan, hidden: Tensor | None) -> Iterator[list[Tensor]]:
        """Let the model run by a plan inside the block.

        Args:
            plan: which layers, valid.
            hidden: ``(B, n, C)``, what the layers before ``plan.start`` gave; None when that is 0.

        Yields:
            A list that holds, after the block, what layer ``plan.stop − 1`` gave, if the plan has a stop.
        """
        layers = self._lists.get(plan)
        if layers is None:
            layers = self._lists[plan] = self._replaced(plan)
        entries = [layer for layer in layers if isinstance(layer, _Entry)]
        taps = [layer for layer in layers if isinstance(layer, _Tap)]
        tapped: list[Tensor] = []
        own = self._decoder._modules["layers"]
        try:
            self._decoder._modules["layers"] = layers
            for entry in entries:
                entry.hidden = hidden
            yield tapped
        finally:
            self._decoder._modules["layers"] = own
            tapped.extend(tap.seen for tap in taps if tap.seen is not None)
            for entry in entries:
                entry.hidden = None
            for tap in taps:
                tap.seen = None

    @contextmanager
    def tapped(self, layer: int | None, states: list[Tensor]) -> Iterator[None]:
        """Append to ``states`` what the first ``layer`` layers give, in each forward in the block; None: nothing.

        Also look at the form in which layers give it: this comes before the first plan, around a whole forward.
        """
        if layer is None and self._layer_gives_tuple is not None:
            yield
            return

        def look(_: nn.Module, __: Any, given: Any) -> None:
            self._layer_gives_tuple = isinstance(given, tuple)
            if layer is not None:
                states.append(given[0] if self._layer_gives_tuple else given)

        with self._layers[(layer or 1) - 1].register_forward_hook(look):
            yield

    def _replaced(self, plan: LayerPlan) -> nn.ModuleList:
        stop = self.num_layers if plan.stop is None else plan.stop
        layers: list[nn.Module] = []
        for index, layer in enumerate(self._layers):
            if plan.start <= index < stop:
                layers.append(self._without_blocks(layer, index, plan))
            else:
                kind = _Entry if index == plan.start - 1 else _Tap if index == stop else _StandIn
                layers.append(kind(layer, bool(self._layer_gives_tuple)))
        return nn.ModuleList(layers)

    def _without_blocks(self, layer: nn.Module, index: int, plan: LayerPlan) -> nn.Module:
        skips = index in plan.skipped_attention, index in plan.skipped_mlp
        if not any(skips):
            return layer
        if all(skips):
            return _StandIn(layer, bool(self._layer_gives_tuple))
        # A copy of the layer's own dictionary: the same weights and hooks, another block.
        twin = copy.copy(layer)
        twin._modules = dict(layer._modules)
        name, gives_tuple = ("self_attn", True) if skips[0] else ("mlp", self._mlp_gives_tuple)
        twin._modules[name] = _NoBlock(getattr(layer, name), gives_tuple)
        fused = vars(layer).get("forward")
        if isinstance(fused, FusedLayer):
            twin.forward = fused.without(*skips, twin)
        return twin
