"""Argument checks of the verification ops. Metadata always; values where reading them is free."""

import torch
from torch import Tensor

from .._validate import (
    check_device,
    check_dtype,
    check_last_stride,
    check_no_grad,
    check_shape,
    check_tensor,
    check_values,
    values_readable,
)

_LOGITS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_UNIFORMS = (torch.float32, torch.float64)


def check_target(op: str, ids_name: str, ids: Tensor, num_ids: int | str, logits: Tensor) -> tuple[int, int, int]:
    """Check ids ``(B, num_ids)`` and logits; return B, T, V of the logits."""
    check_tensor(op, "target_logits", logits)
    check_shape(op, ids_name, ids, ("B", num_ids))
    check_dtype(op, ids_name, ids, (torch.int64,))
    num_rows = ids.shape[0]
    num_nodes = ids.shape[1] + (ids_name == "draft_ids")
    check_logits(op, "target_logits", logits, (num_rows, num_nodes, "V"))
    if num_nodes == 0:
        raise ValueError(f"{op}: {ids_name} must have at least one node, the root, got shape {tuple(ids.shape)}")
    if logits.shape[2] == 0:
        raise ValueError(f"{op}: target_logits must have a vocabulary of at least 1, got shape {tuple(logits.shape)}")
    check_device(op, ids_name, ids, logits.device)
    return num_rows, num_nodes, logits.shape[2]


def check_logits(op: str, name: str, logits: Tensor, shape: tuple[int | str, ...]) -> None:
    """Check shape, dtype, stride of the vocabulary, and that no gradient is asked for."""
    check_shape(op, name, logits, shape)
    check_dtype(op, name, logits, _LOGITS)
    check_last_stride(op, name, logits)
    check_no_grad(op, **{name: logits})


def check_draft(
    op: str, logits: Tensor | None, vocab_map: Tensor | None, num_rows: int, num_given: int, target: Tensor
) -> None:
    """Check the draft logits ``(B, num_given, V)``, or ``(B, num_given, V')`` with a map of V' offsets."""
    if logits is None:
        if vocab_map is not None:
            raise ValueError(
                f"{op}: draft_vocab_map must be None without draft_logits, got a {type(vocab_map).__name__}"
            )
        return
    vocab = target.shape[2]
    draft_vocab: int | str = vocab
    if vocab_map is not None:
        check_shape(op, "draft_vocab_map", vocab_map, ("V'",))
        check_dtype(op, "draft_vocab_map", vocab_map, (torch.int64,))
        check_device(op, "draft_vocab_map", vocab_map, target.device)
        draft_vocab = vocab_map.shape[0]
    check_logits(op, "draft_logits", logits, (num_rows, num_given, draft_vocab))
    check_device(op, "draft_logits", logits, target.device)
    if vocab_map is not None and values_readable(vocab_map):
        ids = torch.arange(vocab_map.shape[0]) + vocab_map
        check_values(op, "draft_vocab_map + draft id", ids, 0, vocab - 1)


def check_randomness(op: str, temperature: Tensor, uniforms: Tensor, shape: tuple[int, int], target: Tensor) -> None:
    """Check temperature ``(B,)`` and uniforms ``(B, T)``, kinds and values."""
    check_shape(op, "temperature", temperature, shape[:1])
    check_dtype(op, "temperature", temperature, (torch.float32,))
    check_shape(op, "uniforms", uniforms, shape)
    check_dtype(op, "uniforms", uniforms, _UNIFORMS)
    check_device(op, "temperature", temperature, target.device)
    check_device(op, "uniforms", uniforms, target.device)
    if values_readable(temperature, uniforms) and shape[0]:
        low, high = (float(v) for v in torch.aminmax(temperature))
        # Written so that NaN fails.
        if not (low >= 0 and high < torch.inf):
            raise ValueError(f"{op}: temperature must be finite and at least 0, got {high if low >= 0 else low}")
        low, high = (float(v) for v in torch.aminmax(uniforms))
        if not (low >= 0 and high < 1):
            raise ValueError(f"{op}: uniforms must be in [0, 1), got {high if low >= 0 else low}")


def check_lengths(op: str, name: str, lengths: Tensor | None, num_rows: int, largest: int, target: Tensor) -> None:
    """Check per-row lengths ``(B,)`` in 0…largest; None means all are the largest."""
    if lengths is None:
        return
    check_shape(op, name, lengths, (num_rows,))
    check_dtype(op, name, lengths, (torch.int32,))
    check_device(op, name, lengths, target.device)
    if values_readable(lengths):
        check_values(op, name, lengths, 0, largest)


def check_parents(op: str, parents: Tensor, num_nodes: Tensor | None, shape: tuple[int, int], target: Tensor) -> None:
    """Check parents ``(B or 1, T)``: −1 for the root, then ``0 <= parents[i] < i`` for the nodes in use."""
    check_tensor(op, "parents", parents)
    num_rows = 1 if parents.shape[:1] == (1,) else shape[0]
    check_shape(op, "parents", parents, (num_rows, shape[1]))
    check_dtype(op, "parents", parents, (torch.int32,))
    check_device(op, "parents", parents, target.device)
    if values_readable(parents, num_nodes):
        nodes = torch.arange(shape[1], dtype=torch.int32)
        is_wrong = (parents >= nodes) | (parents < nodes.clamp(max=1) - 1)
        if num_nodes is not None:
            is_wrong = is_wrong & (nodes < num_nodes[:, None])
        if is_wrong.any():
            row, node = (int(i) for i in is_wrong.nonzero()[0])
            parent = int(parents[min(row, parents.shape[0] - 1), node])
            raise ValueError(
                f"{op}: parents must be topological (parents[0] == -1, 0 <= parents[i] < i), "
                f"got parent {parent} of node {node} in row {row}"
            )
