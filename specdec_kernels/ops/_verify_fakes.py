"""Shapes and dtypes of what the verification ops return; nothing is read."""

import torch
from torch import Tensor


def fake_tree(ids: Tensor, *_, **__) -> tuple[Tensor, Tensor, Tensor]:
    """Return results of the right kind for ids ``(B, T)``."""
    num_rows, num_nodes = ids.shape
    return (
        ids.new_empty(num_rows, num_nodes),
        ids.new_empty(num_rows, dtype=torch.int32),
        ids.new_empty(num_rows, num_nodes - 1, dtype=torch.int32),
    )


def fake_chain(draft_ids: Tensor, *_, **__) -> tuple[Tensor, Tensor, Tensor]:
    """Return results of the right kind for draft ids ``(B, N)``."""
    num_rows, num_drafts = draft_ids.shape
    return fake_tree(draft_ids.new_empty(num_rows, num_drafts + 1))
