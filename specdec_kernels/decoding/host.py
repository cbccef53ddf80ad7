"""Between tensors and lists: a few numbers for each row of the batch, which the loop decides with in every step."""

from array import array
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"b": torch.int8, "i": torch.int32, "q": torch.int64}


def vector_of(values: Iterable[int], code: str, device: torch.device) -> Tensor:
    """Return numbers as a tensor, which costs half of what `torch.tensor` does.

    Args:
        values: int or bool.
        code: of the dtype, as `array.array` has it: ``"b"`` int8, ``"i"`` int32, ``"q"`` int64.
        device: to put it on.
    """
    numbers = array(code, values)
    if not numbers:  # no memory to look into
        return torch.empty(0, dtype=_DTYPES[code], device=device)
    vector = torch.frombuffer(numbers, dtype=_DTYPES[code])
    return vector if device.type == "cpu" else vector.to(device)


def on_host(*tensors: Tensor) -> list[Any]:
    """Return what integer tensors of one device hold, in lists. There is one wait for the device."""
    if tensors[0].is_cpu:
        return [tensor.tolist() for tensor in tensors]
    parts = torch.cat([tensor.flatten() for tensor in tensors]).cpu().split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).tolist() for part, tensor in zip(parts, tensors, strict=True)]
