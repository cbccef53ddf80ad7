"""What the verification kernels move, against what they cannot avoid; and how often they are launched."""

import pytest
import torch

from specdec_kernels.kernels import verify as module
from tests.kernels.meter import measure

NUM_NODES, BYTES = 6, 2
ROW = 32_000 * BYTES
STATISTICS, REST, FINISH = "_verify_statistics_kernel", "_verify_rest_kernel", "_verify_finish_kernel"


def loaded(
    rule: str, *, drawn: bool, uniform: float, lengths: int | None = None, vocab=32_000
) -> tuple[list[str], int]:
    """Return the kernels launched for one batch row, and the bytes that they load."""
    torch.manual_seed(0)
    target = torch.randn(1, NUM_NODES, vocab, dtype=torch.bfloat16)
    ids, u = torch.randint(vocab, (1, NUM_NODES)), torch.full((1, NUM_NODES), uniform)
    draft = (target + 0.1 * torch.randn(target.shape)).bfloat16() if drawn else None
    if drawn:  # what the drafter overrates most: rejected, the second sibling too
        excess = (draft[:, 0].float().softmax(-1) - target[:, 0].float().softmax(-1)).topk(2).indices
        ids[:, 1:3] = excess if uniform > 0 else ids[:, 1:3]
    in_use = None if lengths is None else torch.tensor([lengths], dtype=torch.int32)
    with measure() as launches:
        if rule == "tree":
            parents = torch.tensor([[-1, 0, 0, 1, 1, 2]], dtype=torch.int32)
            args = ids, parents, target, draft, torch.ones(1), u, in_use
            module.verify_tree_triton(*args, with_replacement=False)
        else:
            law = None if draft is None else draft[:, :-1]
            module.verify_chain_triton(ids[:, 1:], target, law, torch.ones(1), u, in_use, block=rule == "block")
    return [x.kernel for x in launches], sum(t.loaded for x in launches for t in x.traffic.values())


@pytest.mark.parametrize(
    ("rule", "drawn", "uniform", "rows", "rest"),
    [
        ("chain", True, 0.0, 6 + 5, 0),  # every draft is accepted; the final draw needs one tile
        ("chain", True, 1 - 2.0**-24, 6 + 5, 2),  # the first is rejected: p and q once more
        ("chain", False, 1 - 2.0**-24, 6, 0),
        ("tree", True, 1 - 2.0**-24, 6 + 3, 4),  # two siblings are rejected; the laws of leaves are not read
        ("block", True, 0.5, 6 + 5, 10),  # every row is summed once more
    ],
)
def test_reads_everything_once(rule, drawn, uniform, rows, rest) -> None:
    kernels, num_bytes = loaded(rule, drawn=drawn, uniform=uniform)
    assert kernels == ([STATISTICS, REST, FINISH] if drawn else [STATISTICS, FINISH])
    final_tile = 2 * 2048 * (2 if rest else 1)
    ratio = num_bytes / ((rows + rest) * ROW + final_tile)
    print(f"{rule}: {ratio:.4f}")
    assert 0.99 <= ratio <= 1.05  # the last tile is shorter


def test_reads_everything_once_of_a_large_vocabulary() -> None:
    """The statistics that programs share grow with the vocabulary, the programs that read them do not."""
    _, num_bytes = loaded("chain", drawn=True, uniform=1 - 2.0**-24, vocab=128_256)
    assert num_bytes <= 1.05 * (11 + 2) * 128_256 * BYTES


def test_padding_is_not_read() -> None:
    _, num_bytes = loaded("tree", drawn=False, uniform=0.0, lengths=2)
    assert num_bytes <= 1.05 * (2 * ROW + 2 * 2048)


def test_the_meter_would_see_a_row_read_twice(monkeypatch) -> None:
    """Control: statistics of every tile made twice."""
    from specdec_kernels.kernels import _verify_kernels as kernels

    once = kernels.summarise_tile

    def twice(*args):
        once(*args)
        once(*args)

    monkeypatch.setitem(kernels._verify_statistics_kernel.fn.__globals__, "summarise_tile", twice)
    _, num_bytes = loaded("chain", drawn=False, uniform=0.0)
    assert num_bytes > 1.5 * 6 * ROW
