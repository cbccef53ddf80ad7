"""Make a model's linear layers faster on the CPU, reversibly: weights packed once by oneDNN, Q/K/V and gate/up merged.

    before    q_proj(x)   k_proj(x)   v_proj(x)        three products, whose weights are packed anew in each
    prepared  q_proj(x)   k_proj(x)   v_proj(x)        the first to be asked multiplies x by all of [Wq; Wk; Wv], packed
                 |_________________________|           once; the others take their columns of the same product

Every layer stays the object that it is, under its name and with its hooks; only its class is another one meanwhile, a
subclass of ``nn.Linear``, as with ``torch.nn.utils.parametrize``. oneDNN is reached through the operators that
``torch.compile`` uses for frozen weights; nothing outside this file knows them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .families import check_supported

# Layers that are given the same input.
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ALONE = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "c_fc", "c_proj")
# fp32 is left alone, so that its results keep their bits; oneDNN packs fp16 only for few machines.
_DTYPE = torch.bfloat16


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Pack the weights of a model's linear layers for inference in bf16 on the CPU, in place, until `restore`.

    The results are those of the model as it was, up to the rounding of sums: merged and packed products may add in
    another order. A row of a linear layer has the same bits however many rows there are, also when it comes alone (it
    is computed twice then). A model in fp32 or fp16 computes as before; it is packed when it runs after
    ``.to(torch.bfloat16)``, so the order of the two does not matter. Moved to another device, it computes there as
    before.

    From outside the model is the same: ``state_dict`` gives the same keys, shapes and values, ``load_state_dict`` and
    ``save_pretrained`` work, copies are prepared, too. What differs:

    - the packed weights replace the original ones, so ``parameters()`` no longer lists these, and reading ``weight``
      of a packed layer, or the state dict, makes a copy, whose changes are lost;
    - a vocabulary projection that is tied to the embedding is packed beside it, since the embedding is still read row
      by row: this one matrix is in memory twice;
    - no gradients, no training mode, no ``torch.compile``.

    Experts and their routers are left as they are. Drafters that share the vocabulary projection may be made before or
    after; one that is not tied to the embedding then stays in memory for the drafter, too.

    Args:
        model: a causal LM of a supported family (see `families.FAMILIES`), in eval mode, on the CPU. One that is
            prepared already is left as it is.

    Returns:
        The same model.

    Raises:
        TypeError: not a transformers model.
        NotImplementedError: the model is not supported or not on the CPU, or one of its layers is not a plain
            ``nn.Linear`` (quantized, LoRA, parametrized): names it.
        RuntimeError: the model is in training mode, or torch has no oneDNN for bf16 on this machine.

    Example:
        >>> model = prepare(model.to(torch.bfloat16))
        >>> out = model.generate(**inputs, custom_generate=speculative_generate, drafter=drafter, max_new_tokens=32)
        >>> model = restore(model)
    """
    check_supported(model)
    if any(isinstance(module, PreparedLinear) for module in model.modules()):
        return model
    if model.training:
        raise RuntimeError("prepare: the model is in training mode; call model.eval() first")
    if model.device.type != "cpu":
        raise NotImplementedError(f"prepare: only models on the CPU are supported, got one on {model.device}")
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        raise RuntimeError("prepare: torch has no oneDNN for bf16 on this machine (AVX512 or a later ISA is needed)")
    groups = list(_groups(model))
    for names, layers in groups:
        _check_plain(names, layers)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    for _, layers in groups:
        _Group(layers, keeps_weights=layers[0].weight is embedding).pack()
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `prepare`: every weight is a parameter again, with the bits that it had.

    Args:
        model: as given to `prepare`, or any other; one that is not prepared is left as it is.

    Returns:
        The same model.
    """
    for module in model.modules():
        if isinstance(module, PreparedLinear):
            module._group.unpack()
    for module in model.modules():
        if isinstance(module, PreparedLinear):
            del module._group, module._index
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return model


def _groups(model: PreTrainedModel) -> Iterator[tuple[list[str], list[nn.Linear]]]:
    """Yield the layers to be packed, with their names: those that share an input together."""
    for path, module in model.base_model.named_modules():
        children = module._modules
        merged = [names for names in _MERGED if all(name in children for name in names)]
        for names in (*merged, *((name,) for name in _ALONE if name in children)):
            yield [f"{path}.{name}" for name in names], [children[name] for name in names]
    yield ["the vocabulary projection"], [model.get_output_embeddings()]


def _check_plain(names: list[str], layers: list[nn.Linear]) -> None:
    for name, layer in zip(names, layers, strict=True):
        if type(layer) is not nn.Linear:
            raise NotImplementedError(f"prepare: {name} is a {type(layer).__name__}, not a plain nn.Linear")
    if len({layer.bias is None for layer in layers}) > 1:
        raise NotImplementedError(f"prepare: of {', '.join(names)} some have a bias, some have none")


class PreparedLinear(nn.Linear):
    """Be a linear layer whose weight may lie packed in a group; made from one by `prepare`, never constructed."""

    _group: "_Group"
    _index: int

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The parameter or, while it is packed, a copy."""
        own = self._parameters["weight"]
        return self._group.weight(self._index) if own is None else own

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``.

        Raises:
            RuntimeError: in training mode, with gradients, under ``torch.compile``, or an input of another dtype.
        """
        group = self._group
        self._check(input, group)
        if not group.is_current(self._parameters["weight"]) and not group.pack():
            return super().forward(input)
        if input.dtype != _DTYPE:
            raise RuntimeError(f"prepared linear layer: input must be {_DTYPE}, got {input.dtype}")
        return group.product(self._index, input)

    def _check(self, input: Tensor, group: "_Group") -> None:
        if self.training or (torch.is_grad_enabled() and (input.requires_grad or group.requires_grad)):
            raise RuntimeError(
                "prepared linear layer: no training and no gradients; run under torch.no_grad() in eval mode, or call "
                "restore(model)"
            )
        if torch.compiler.is_compiling():
            raise RuntimeError("prepared linear layer: torch.compile is not supported; call restore(model)")

    def _apply(self, fn: Callable, recurse: bool = True) -> "PreparedLinear":
        # Moving and casting work on plain parameters; the next forward packs them if it can.
        self._group.unpack()
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        if self._parameters["weight"] is None:
            destination[prefix + "weight"] = self._group.weight(self._index)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._group.unpack()
        super()._load_from_state_dict(*args, **kwargs)


class _Product:
    """Hold the columns of one product until each of the layers has taken its own."""

    def __init__(self, input: Tensor, output: Tensor, sizes: list[int]):
        # Held, so that no other tensor can take its place in memory.
        self._input = input
        self._state = _state(input)
        self.parts: list[Tensor | None] = [*output.split(sizes, dim=-1)]

    def take(self, index: int, input: Tensor) -> Tensor | None:
        """Return the columns of a layer, once, if they are those for ``input``."""
        if input is not self._input or _state(input) != self._state:
            return None
        part, self.parts[index] = self.parts[index], None
        return part


class _Group:
    """Hold the weights of linear layers that share an input as one packed matrix, or leave them to the layers.

    Args:
        layers: plain, all with a bias or all without.
        keeps_weights: the weights are needed by others, too, so they stay where they are.
    """

    def __init__(self, layers: list[nn.Linear], keeps_weights: bool):
        self._keeps_weights = keeps_weights
        self._sizes = [layer.out_features for layer in layers]
        self._trainable = [layer.weight.requires_grad for layer in layers]
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        self._product: _Product | None = None
        self._source: tuple[int, int] | None = None
        for index, layer in enumerate(layers):
            layer.__class__ = PreparedLinear
            layer._group, layer._index = self, index  # type: ignore[assignment]
        self._layers: list[Any] = layers

    @property
    def requires_grad(self) -> bool:
        """Whether a weight is trainable."""
        return any(self._trainable)

    def is_current(self, own: Tensor | None) -> bool:
        """Say whether the packed weights are those to use, given what a layer has as its own weight now."""
        if self._packed is None:
            return False
        return own is None or (self._keeps_weights and _state(own) == self._source)

    def pack(self) -> bool:
        """Pack what the layers have, if they are in bf16 on the CPU; say whether that is so."""
        self.unpack()
        weights = [layer._parameters["weight"] for layer in self._layers]
        if any(weight.dtype != _DTYPE or weight.device.type != "cpu" for weight in weights):
            return False
        biases = [layer.bias for layer in self._layers if layer.bias is not None]
        # Not as inference tensors, whatever the first forward runs in: `restore` hands them out.
        with torch.inference_mode(False), torch.no_grad():
            weight = weights[0].detach() if len(weights) == 1 else torch.cat(weights)
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
            self._bias = torch.cat(biases) if biases else None
        self._trainable = [weight.requires_grad for weight in weights]
        if self._keeps_weights:
            self._source = _state(weights[0])
        else:
            for layer in self._layers:
                layer._parameters["weight"] = None
        return True

    def unpack(self) -> None:
        """Give the layers their weights back, with the same bits; one that got a new weight meanwhile keeps that."""
        if self._packed is None:
            return
        if not self._keeps_weights:
            with torch.inference_mode(False), torch.no_grad():
                weights = self._packed.to_dense().split(self._sizes)
                for layer, weight, trainable in zip(self._layers, weights, self._trainable, strict=True):
                    if layer._parameters["weight"] is None:
                        layer._parameters["weight"] = nn.Parameter(weight.clone(), requires_grad=trainable)
        self._packed = self._bias = self._product = self._source = None

    def weight(self, index: int) -> Tensor:
        """Return a copy of a packed weight."""
        assert self._packed is not None
        return self._packed.to_dense().split(self._sizes)[index].clone()

    def product(self, index: int, input: Tensor) -> Tensor:
        """Return the product of a layer; the first of the layers to be asked computes it for all."""
        if len(self._sizes) == 1:
            return self._multiply(input)
        product = self._product
        part = None if product is None else product.take(index, input)
        if product is None or part is None:
            product = self._product = _Product(input, self._multiply(input), self._sizes)
            part = product.take(index, input)
        if not any(part is not None for part in product.parts):
            self._product = None
        assert part is not None
        return part

    def _multiply(self, input: Tensor) -> Tensor:
        # One row alone would take another path, whose sums have another order.
        is_lone = input.numel() == input.shape[-1]
        rows = input.reshape(1, -1).expand(2, -1) if is_lone else input
        output = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return output[:1].reshape(*input.shape[:-1], -1) if is_lone else output

    def __getstate__(self) -> dict[str, Any]:
        """Be copied and pickled with plain weights, since packed ones cannot be."""
        state = {**self.__dict__, "_product": None}
        if self._packed is not None:
            state["_packed"] = self._packed.to_dense()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._packed is not None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._packed)


def _state(tensor: Tensor) -> tuple[int, int]:
    """Return what changes when the values of a tensor are replaced or, outside inference mode, changed."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
