"""KV compaction after a partially accepted tree, all layers of a model, against what torch code does today."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import kv_compact_, paged_kv_compact_
from specdec_kernels.reference.kv_compact import kv_compact_ref, paged_kv_compact_ref

from .cases import MODELS
from .harness import Cost

OP = "kv_compact"
OURS = ("specdec_kernels",)
PAGE_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One step: every row of the batch accepts every ``stride``-th node of its tree, ``stride`` at least 2.

    Attributes:
        layout: ``list`` (a tensor a layer, as Hugging Face has it), ``stacked`` or ``paged``.
    """

    model: str
    batch: int
    num_accepted: int
    stride: int
    layout: str
    capacity: int = 1024
    prefix: int = 500


def _case_id(case: Case) -> str:
    return f"{case.model}-B{case.batch}-N{case.num_accepted}-{case.layout}"


CASES = {
    _case_id(case): case
    for case in (
        Case("smollm2_135m", 1, 4, 5, "list"),
        Case("smollm2_135m", 1, 4, 5, "stacked"),
        Case("smollm2_135m", 8, 4, 5, "list"),
        Case("smollm2_135m", 8, 4, 5, "paged"),
        Case("llama3_8b", 1, 4, 14, "list"),
        Case("llama3_8b", 4, 4, 14, "paged"),
        Case("qwen3_8b", 4, 4, 14, "list"),
        Case("llama3_70b_tp8", 8, 4, 14, "list"),
        Case("llama3_8b", 1, 128, 2, "list"),
        Case("llama3_8b", 1, 128, 2, "paged"),
    )
}


@dataclass(frozen=True)
class Inputs:
    """Caches and the index tensors of one step; ``block_table`` for pages only."""

    caches: Any
    accepted: Tensor
    num_accepted: Tensor
    prefix_len: Tensor
    block_table: Tensor | None


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Fill caches with random bf16 and let all rows accept paths of the same length at different prefixes."""
    model = MODELS[case.model]
    generator = torch.Generator().manual_seed(0)
    pages = case.capacity // PAGE_SIZE
    shape = (case.batch, model.num_kv_heads, case.capacity, model.head_dim)
    if case.layout == "paged":
        shape = (case.batch * pages, PAGE_SIZE, model.num_kv_heads, model.head_dim)
    stacked = torch.randint(-9999, 9999, (2 * model.num_layers, *shape), dtype=torch.int16, generator=generator)
    caches: Any = stacked.view(torch.bfloat16).to(device)
    if case.layout == "list":
        caches = [layer.clone().transpose(1, 2) for layer in caches.unbind()]
    elif case.layout == "paged":
        caches = [layer.clone() for layer in caches.unbind()]
    table = torch.randperm(case.batch * pages, generator=generator).view(case.batch, pages).to(torch.int32)
    nodes = torch.arange(1, case.num_accepted + 1, dtype=torch.int32) * case.stride
    prefix = case.prefix - 7 * torch.arange(case.batch, dtype=torch.int32)
    return Inputs(
        caches,
        nodes.repeat(case.batch, 1).to(device),
        torch.full((case.batch,), case.num_accepted, dtype=torch.int32, device=device),
        prefix.to(device),
        table.to(device) if case.layout == "paged" else None,
    )


def cost(case: Case) -> Cost:
    """Every accepted row is read and written once in every layer, keys and values; none is in place already."""
    model = MODELS[case.model]
    num_bytes = 2 * model.num_layers * case.batch * case.num_accepted * model.num_kv_heads * model.head_dim * 2
    return Cost(num_bytes, num_bytes)


def providers(case: Case) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    """Return the reference, ours, and what one writes in torch for this layout."""
    if case.layout == "paged":
        return {
            "reference": _paged_reference,
            "specdec_kernels": _paged_ours,
            "index_copy_per_layer": _paged_index_copy,
        }
    common = {"reference": _reference, "specdec_kernels": _ours, "index_select_copy": _index_select_copy}
    if case.layout == "stacked":
        return {**common, "index_select_copy_stacked": _stacked_index_select_copy}
    return {**common, "advanced_indexing": _advanced_indexing}


def _layers(inputs: Inputs) -> list[Tensor]:
    """Return the caches as ``(B, S, H, D)``, in either form they may have."""
    if isinstance(inputs.caches, Tensor):
        return list(inputs.caches.transpose(2, 3).unbind(0))
    return inputs.caches


def _changed(inputs: Inputs) -> list[Tensor]:
    """Return what a provider wrote to, without making a view of each layer."""
    return [inputs.caches] if isinstance(inputs.caches, Tensor) else inputs.caches


def _ours(inputs: Inputs) -> list[Tensor]:
    kv_compact_(inputs.caches, inputs.accepted, inputs.num_accepted, inputs.prefix_len)
    return _changed(inputs)


def _reference(inputs: Inputs) -> list[Tensor]:
    kv_compact_ref(_layers(inputs), inputs.accepted, inputs.num_accepted, inputs.prefix_len)
    return _changed(inputs)


def _row_moves(inputs: Inputs) -> list[tuple[int, Tensor, int, int]]:
    """Return (batch row, source positions, first target, end of targets) for each row, by reading the lengths."""
    moves = []
    for row, (count, prefix) in enumerate(zip(inputs.num_accepted.tolist(), inputs.prefix_len.tolist(), strict=True)):
        source = inputs.accepted[row, :count].long() + prefix
        moves.append((row, source, prefix + 1, prefix + 1 + count))
    return moves


def _index_select_copy(inputs: Inputs) -> list[Tensor]:
    moves = _row_moves(inputs)
    for layer in _layers(inputs):
        for row, source, begin, end in moves:
            layer[row, begin:end].copy_(layer[row].index_select(0, source))
    return _changed(inputs)


def _stacked_index_select_copy(inputs: Inputs) -> list[Tensor]:
    for row, source, begin, end in _row_moves(inputs):
        sequence = inputs.caches[:, row]
        sequence[:, :, begin:end].copy_(sequence.index_select(2, source))
    return _changed(inputs)


def _advanced_indexing(inputs: Inputs) -> list[Tensor]:
    """All batch rows in one call a layer; valid here because all rows accept the same number."""
    rows = torch.arange(len(inputs.accepted), device=inputs.accepted.device).unsqueeze(1)
    prefix = inputs.prefix_len.long().unsqueeze(1)
    source = prefix + inputs.accepted
    target = prefix + torch.arange(1, source.shape[1] + 1, device=source.device)
    for layer in inputs.caches:
        layer[rows, target] = layer[rows, source]
    return _changed(inputs)


def _paged_ours(inputs: Inputs) -> list[Tensor]:
    paged_kv_compact_(inputs.caches, inputs.block_table, inputs.accepted, inputs.num_accepted, inputs.prefix_len)
    return _changed(inputs)


def _paged_reference(inputs: Inputs) -> list[Tensor]:
    paged_kv_compact_ref(inputs.caches, inputs.block_table, inputs.accepted, inputs.num_accepted, inputs.prefix_len)
    return _changed(inputs)


def _paged_index_copy(inputs: Inputs) -> list[Tensor]:
    """Flat slots, as serving engines keep them: one index_select and one index_copy_ a layer."""
    prefix = inputs.prefix_len.long().unsqueeze(1)
    source = prefix + inputs.accepted
    target = prefix + torch.arange(1, source.shape[1] + 1, device=source.device)
    slots = [inputs.block_table.long().gather(1, p // PAGE_SIZE) * PAGE_SIZE + p % PAGE_SIZE for p in (source, target)]
    for layer in inputs.caches:
        flat = layer.view(-1, *layer.shape[2:])
        flat.index_copy_(0, slots[1].flatten(), flat.index_select(0, slots[0].flatten()))
    return _changed(inputs)
