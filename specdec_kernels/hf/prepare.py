"""Make a model's step faster, reversibly: our linear layers, and decoder layers as a few calls of ours.

    layer        norm  q k v  rotary  cache  attention  o  +  norm  gate up  SiLU ·  down  +       some thirty operators
    prepared     norm  q k v  rotary+cache   attention  o+    norm  gate up SiLU ·   down+         eight
    whole step   the same for all layers                                                           one

Every module stays the object that it is, with its class, its parameters and its hooks; it only gets a ``forward`` of
its own, an attribute, which calls that of its class wherever it cannot do the same faster. On a GPU the calls are those
of the Triton kernels, and steps are recorded as CUDA graphs. Not yet run on a GPU.
"""

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import _native
from .._ops import ops
from . import _compat
from .families import FAMILIES, check_supported
from .fused_layer import DTYPE, OwnForward, fused_layer
from .fused_stack import fused_stack
from .graphs import StepGraphs, attach_graphs, detach_graphs

_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "c_fc", "c_proj")


def prepare(model: PreTrainedModel, *, graphs: StepGraphs | None = None) -> PreTrainedModel:
    """Make a model's inference in bf16 faster, in place, until `restore`.

    Linear layers compute with `specdec_kernels.linear`, which reads weights as they lie, with a single row, too; in
    `HFTarget` the decoder layers of Llama and of families that differ from it little become one call for all of them
    (`STACKED_FAMILIES`), or a few each (`FUSED_FAMILIES`). The results are those of the model as it was, up to the
    rounding of sums. The bits of a row do not depend on how many rows there are.

    On a GPU, `HFTarget` also records its steps, in any dtype, and replays them: `StepGraphs` says which, and where its
    caches stay. One target of a model at a time does so; with hooks, experts, dynamic or long RoPE none does, and
    weights that came to lie elsewhere are recorded anew. **This has not run on a GPU.**

    From outside the model is the same: its modules, parameters, hooks and state dict; copies are prepared, too. Where
    a model, a dtype (fp32, fp16), a device or a mode (training, gradients, ``torch.compile``) is not what this is made
    for, modules compute as before, so it may be called before or after ``.to(torch.bfloat16)``. A layer whose parts
    have hooks or were exchanged after this call runs through these parts. Experts and their routers are left alone.

    Args:
        model: a causal LM of a supported family (see `families.FAMILIES`), in eval mode, on the CPU or a GPU. One that
            is prepared already is left as it is.
        graphs: what records, on a GPU; `StepGraphs()` when None.

    Returns:
        The same model.

    Raises:
        TypeError: not a transformers model.
        NotImplementedError: the model is not supported or on another device, or one of its layers is not a plain
            ``nn.Linear`` (quantized, LoRA, parametrized) or has a ``forward`` of its own already: names it.
        RuntimeError: the model is in training mode, or on the CPU without the native kernels (says why).

    Example:
        >>> model = prepare(model.to(torch.bfloat16))
        >>> out = model.generate(**inputs, custom_generate=speculative_generate, drafter=drafter, max_new_tokens=32)
        >>> model = restore(model)
    """
    check_supported(model)
    if is_prepared(model):
        return model
    if model.training:
        raise RuntimeError("prepare: the model is in training mode; call model.eval() first")
    if model.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"prepare: the model must be on the CPU or a GPU, got one on {model.device}")
    if model.device.type == "cpu" and _native.load_errors["_C"] is not None:
        raise RuntimeError(f"prepare: the native kernels are not there: {_native.load_errors['_C']}")
    layers = dict(_linear_layers(model))
    for name, layer in layers.items():
        if type(layer) is not nn.Linear:
            raise NotImplementedError(f"prepare: {name} is a {type(layer).__name__}, not a plain nn.Linear")
        if "forward" in vars(layer):
            raise NotImplementedError(f"prepare: {name} has a forward of its own already")
    for layer in layers.values():
        _give(layer, PreparedLinear(layer))
    for layer in model.base_model._modules["layers"].children():  # type: ignore[union-attr]
        fused = None if "forward" in vars(layer) else fused_layer(model.config, layer)
        if fused is not None:
            _give(layer, fused)
    stack = fused_stack(model.config, model.base_model, _compat.cache_argument(model))
    if stack is not None:
        _give(model.base_model, stack)
    attach_graphs(model, StepGraphs() if graphs is None else graphs)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `prepare`.

    Args:
        model: as given to `prepare`, or any other; one that is not prepared is left as it is.

    Returns:
        The same model.
    """
    for module in model.modules():
        if isinstance(vars(module).get("forward"), OwnForward):
            del module.forward
        detach_graphs(module)
    return model


def is_prepared(model: nn.Module) -> bool:
    """Say whether `prepare` was called, and `restore` not since."""
    return any(isinstance(vars(module).get("forward"), OwnForward) for module in model.modules())


def has_independent_rows(model: PreTrainedModel) -> bool:
    """Say whether every linear layer gives a row the same bits whatever the number of rows, one included."""
    return (
        model.dtype == DTYPE
        and model.device.type == "cpu"
        and "experts" not in FAMILIES[model.config.model_type]
        and all(
            isinstance(vars(module).get("forward"), PreparedLinear)
            for module in model.modules()
            if isinstance(module, nn.Linear)
        )
    )


def _give(module: nn.Module, forward: "OwnForward") -> None:
    vars(module)["forward"] = forward


def _linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.base_model.named_modules():
        for name in (*_ATTENTION, *_MLP):
            if name in module._modules:
                yield f"{path}.{name}", module._modules[name]
    yield "the vocabulary projection", model.get_output_embeddings()


class PreparedLinear(OwnForward):
    """The ``forward`` of a linear layer."""

    ops = ("linear",)

    def __call__(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        layer = self.module
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        if not self.is_usable(input) or weight.dtype is not DTYPE or weight.is_cpu != input.is_cpu:
            return nn.Linear.forward(layer, input)
        return ops.linear.default(input, [weight], [] if bias is None else [bias], None)
