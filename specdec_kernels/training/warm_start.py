"""Begin a training with the weights that an earlier one came to."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ..modules.medusa import MedusaHeads
from .calibrate import row_of_token
from .hidden import IGNORED


def take_over(module: nn.Module, trained: nn.Module, folder: str | Path) -> None:
    """Copy all weights of a trained module into one of the same shape.

    Args:
        module: changed in place; keeps its dtype.
        trained: may know another vocabulary, which is no parameter.
        folder: of the trained one, for the message.

    Raises:
        ValueError: their parameters differ in name or shape; these are listed.
    """
    found, wanted = ({name: tuple(p.shape) for name, p in m.named_parameters()} for m in (trained, module))
    different = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    if different:
        missing = "(none)"
        parts = [f"{name} {found.get(name, missing)}, wanted {wanted.get(name, missing)}" for name in different]
        raise ValueError(f"{folder} holds weights of other shapes: {'; '.join(parts)}")
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            module.get_parameter(name).copy_(parameter)


def go_on_from_heads(heads: MedusaHeads, folder: str | Path) -> None:
    """Let fresh Medusa heads begin as trained ones, whatever the vocabulary of these was.

    Rows of a projection of their own are taken over token by token; of a token that the trained heads did not draft,
    the fresh heads keep theirs.

    Args:
        heads: fresh ones of `fresh_heads`; changed in place.
        folder: as `MedusaHeads.from_pretrained` takes it.

    Raises:
        FileNotFoundError: there are no heads.
        ValueError: they are of another shape, or for another model.
    """
    trained = MedusaHeads.from_pretrained(folder, dtype=torch.float32, device=heads.w_res.device)
    if trained.vocab_size not in (None, heads.vocab_size):
        raise ValueError(f"the heads in {folder} are for {trained.vocab_size} tokens, the model has {heads.vocab_size}")
    trained.vocab_size = heads.vocab_size
    if heads.w_out is not None and trained.w_out is not None and heads.hidden_size == trained.hidden_size:
        trained.w_out = nn.Parameter(_projection_for(heads.w_out.detach(), heads, trained))
    take_over(heads, trained, folder)


def _projection_for(fresh: Tensor, heads: MedusaHeads, trained: MedusaHeads) -> Tensor:
    """Return ``(M, V', C)``: the rows of the fresh vocabulary, of as many heads as the trained ones are."""
    assert trained.w_out is not None
    tokens = torch.arange(fresh.shape[1], device=fresh.device) if heads.vocab_map is None else heads.vocab_map
    to_row = row_of_token(trained, fresh.device)
    rows = tokens if to_row is None else to_row[tokens]
    known = trained.w_out.detach().expand(trained.num_heads, -1, -1)[:, rows.clamp_min(0)]
    # All fresh heads have the same projection, the model's own.
    return torch.where((rows != IGNORED)[:, None], known, fresh[:1])
