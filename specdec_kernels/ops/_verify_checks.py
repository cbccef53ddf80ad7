"""Argument checks of the verification ops. Metadata always; values where reading them is free."""

import torch
from torch import Tensor

from .._validate import (
    check_kind,
    check_no_grad,
    check_number,
    check_rows,
    check_tensor,
    check_values,
    values_readable,
)

_LOGITS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IDS = (torch.int64,)
_UNIFORMS = (torch.float32, torch.float64)


def check_target(op: str, ids_name: str, ids: Tensor, logits: Tensor, *, has_root: bool) -> tuple[int, int]:
    """Check ids ``(B, T)``, or ``(B, T-1)`` without the root, and target logits ``(B, T, V)``; return (B, T)."""
    check_tensor(op, "target_logits", logits)
    check_kind(op, ids_name, ids, ("B", "T" if has_root else "N"), _IDS, logits.device)
    shape = (ids.shape[0], ids.shape[1] if has_root else ids.shape[1] + 1)
    check_logits(op, "target_logits", logits, (*shape, "V"), logits.device)
    if shape[1] == 0:
        raise ValueError(f"{op}: {ids_name} must have shape (B, T) with the root, T >= 1, got {tuple(ids.shape)}")
    if logits.shape[2] == 0:
        raise ValueError(f"{op}: target_logits must have shape (B, T, V) with V >= 1, got {tuple(logits.shape)}")
    return shape


def check_logits(op: str, name: str, logits: Tensor, shape: tuple[int | str, ...], device: torch.device) -> None:
    """Check shape, dtype, device, stride of the vocabulary, and that no gradient is asked for."""
    check_rows(op, name, logits, shape, _LOGITS, device)
    check_no_grad(op, **{name: logits})


def check_draft(
    op: str, logits: Tensor | None, vocab_map: Tensor | None, num_rows: int, num_laws: int, target: Tensor
) -> None:
    """Check the draft logits ``(B, num_laws, V)``, or ``(B, num_laws, V')`` with a map of V' offsets."""
    if logits is None:
        if vocab_map is not None:
            raise ValueError(f"{op}: draft_vocab_map must be None when draft_logits is None, got a tensor")
        return
    draft_vocab: int | str = target.shape[2]
    if vocab_map is not None:
        check_vocab_map(op, vocab_map, target)
        draft_vocab = vocab_map.shape[0]
    check_logits(op, "draft_logits", logits, (num_rows, num_laws, draft_vocab), target.device)


def check_vocab_map(op: str, vocab_map: Tensor, target: Tensor) -> None:
    """Check offsets ``(V',)``: every draft id j lands on a target id ``j + vocab_map[j]``."""
    check_kind(op, "draft_vocab_map", vocab_map, ("V'",), (torch.int64,), target.device)
    if vocab_map.shape[0] == 0:
        raise ValueError(f"{op}: draft_vocab_map must have shape (V',) with V' >= 1, got (0,)")
    if values_readable(vocab_map):
        ids = torch.arange(vocab_map.shape[0]) + vocab_map
        check_values(op, "j + draft_vocab_map[j]", ids, 0, target.shape[2] - 1)


def check_randomness(op: str, temperature: Tensor, uniforms: Tensor, shape: tuple[int, int], target: Tensor) -> None:
    """Check temperature ``(B,)`` and uniforms ``(B, T)``, kinds and values."""
    check_kind(op, "temperature", temperature, shape[:1], (torch.float32,), target.device)
    check_kind(op, "uniforms", uniforms, shape, _UNIFORMS, target.device)
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
    check_kind(op, name, lengths, (num_rows,), (torch.int32,), target.device)
    if values_readable(lengths):
        check_values(op, name, lengths, 0, largest)


def check_parents(op: str, parents: Tensor, num_nodes: Tensor | None, shape: tuple[int, int], target: Tensor) -> None:
    """Check parents ``(B or 1, T)``: −1 for the root, then ``0 <= parents[i] < i`` for the nodes in use."""
    check_tensor(op, "parents", parents)
    num_rows = 1 if parents.shape[:1] == (1,) else shape[0]
    check_kind(op, "parents", parents, (num_rows, shape[1]), (torch.int32,), target.device)
    if values_readable(parents, num_nodes) and not _are_topological(parents, num_nodes):
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


def _are_topological(parents: Tensor, num_nodes: Tensor | None) -> bool:
    """Say whether all is well, where there are so few nodes that a list is faster than torch's dispatch."""
    if parents.numel() > 512 or (num_nodes is not None and len(num_nodes) != len(parents)):
        return False
    counts = [parents.shape[1]] * len(parents) if num_nodes is None else num_nodes.tolist()
    for row, count in zip(parents.tolist(), counts, strict=True):
        for node, parent in enumerate(row[:count]):
            if not (0 <= parent < node or (parent == -1 and node == 0)):
                return False
    return True


def check_thresholds(op: str, **thresholds: float) -> None:
    """Check that these are numbers of at least 0."""
    for name, value in thresholds.items():
        check_number(op, name, value)
        if not value >= 0:
            raise ValueError(f"{op}: {name} must be at least 0, got {value}")
