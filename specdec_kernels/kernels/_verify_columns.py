"""Which columns of the draft logits belong to an id of the target: the inverse of ``draft_vocab_map``."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# A map belongs to a drafter and does not change: it is inverted once.
_inverted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def columns_by_id(vocab_map: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Return ``starts (num_ids + 1)`` and ``columns (V')``, int32: id x has ``columns[starts[x] : starts[x + 1]]``.

    Remembered for as long as the map lives and until it is written to. Inside a CUDA graph's capture it is not: that
    memory belongs to the graph.
    """
    version = None if vocab_map.is_inference() else vocab_map._version
    known = _inverted.get(vocab_map)
    if known is not None and version is not None and known[0] == (version, num_ids):
        return known[1]
    inverted = _invert(vocab_map, num_ids)
    if version is not None and not (vocab_map.is_cuda and torch.cuda.is_current_stream_capturing()):
        _inverted[vocab_map] = ((version, num_ids), inverted)
    return inverted


def _invert(vocab_map: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(vocab_map.shape[0], device=vocab_map.device) + vocab_map
    # What is no id of the target comes last, behind all starts.
    ids, columns = torch.where((ids >= 0) & (ids < num_ids), ids, num_ids).sort(stable=True)
    starts = torch.searchsorted(ids, torch.arange(num_ids + 1, device=ids.device))
    return starts.int(), columns.int()
