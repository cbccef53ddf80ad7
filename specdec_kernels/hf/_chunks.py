"""How prompts are fed: in chunks, which leave out rows whose prompt has ended.

row 0   a a a a b b c c c c      chunk a: rows 0, 1, 2;  b: rows 0, 2;  c: row 0
row 1   a a a a . . . . . .
row 2   a a a a b b . . . .
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

# Prompt tokens per forward: a prompt is fed as a chain, whose mask has T²/64 words.
PREFILL_CHUNK = 512
# A chunk ends with a prompt where that leaves out at least so much padding: about what another forward costs.
SPARED_PADDING = 32


def prompt_chunks(lengths: Tensor, width: int) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Yield where each chunk of right-padded prompts starts, how many tokens it has, and the rows that it feeds.

    All rows are in the first chunk, and the longest ones in all of them. On the CPU only: elsewhere reading the lengths
    would wait for the device, so every row takes part to the end.

    Args:
        lengths: ``(B,)``, 1 … width.
        width: of the prompts with their padding.
    """
    ends = lengths.tolist() if lengths.device.type == "cpu" else [width] * len(lengths)
    ends = [width if end == max(ends) else end for end in ends]
    start = 0
    while start < width:
        rows = [row for row, end in enumerate(ends) if end > start]
        size = min(PREFILL_CHUNK, width - start)
        shorter = sorted(ends[row] - start for row in rows if ends[row] < start + size)
        spared = ((count * (size - end), end) for count, end in enumerate(shorter, 1))
        size = next((end for padding, end in spared if padding >= SPARED_PADDING), size)
        yield start, size, rows
        start += size


def check_prompts(ids: Tensor, lengths: Tensor, batch_size: int, capacity: int) -> int:
    """Return the width ``L`` of prompts ``ids (B, L)``; raise ValueError unless `HFTarget.prefill` can take them."""
    longest = ids.shape[-1]
    if ids.shape != (batch_size, longest) or longest < 1:
        raise ValueError(f"HFTarget.prefill: ids must have shape ({batch_size}, L), L >= 1, got {tuple(ids.shape)}")
    if lengths.shape != (batch_size,):
        raise ValueError(f"HFTarget.prefill: lengths must have shape ({batch_size},), got {tuple(lengths.shape)}")
    if longest > capacity:
        raise ValueError(f"HFTarget.prefill: {longest} tokens do not fit into a capacity of {capacity}")
    if lengths.device.type == "cpu" and not bool(((lengths >= 1) & (lengths <= longest)).all()):
        raise ValueError(f"HFTarget.prefill: lengths must be in [1, {longest}], got {lengths.tolist()}")
    return longest
