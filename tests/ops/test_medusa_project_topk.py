"""`medusa_project_topk`: ties, borders, NaN and infinities, on logits that are exact in every dtype."""

import math

import pytest
import torch
from torch import Tensor

from specdec_kernels import medusa_project_topk
from specdec_kernels.reference.medusa_project import topk_lowest_id

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def topk_of(logits: Tensor, k: int, device, **options) -> tuple[Tensor, ...]:
    """Run the op so that its logits are exactly ``logits (V,)``: one head, hidden size 1, hidden state 1."""
    one, no_layer = torch.ones(1, 1, dtype=logits.dtype), torch.zeros(1, 0, 1, 1, dtype=logits.dtype)
    args = (one, no_layer, None, logits[:, None])
    results = medusa_project_topk(*(t if t is None else t.to(device) for t in args), k, **options)
    return tuple(t[0, 0].cpu() for t in results)


def sorted_ids(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (math.isnan(logits[i]), -logits[i], i))


@DTYPES
@pytest.mark.parametrize("vocab", [1, 7, 63, 64, 65, 8193, 10_000, 151_936])
def test_borders_of_the_vocabulary(vocab, dtype, backend, device) -> None:
    """A vocabulary that is no multiple of a tile: no id at or past V wins, the last row can win."""
    k = min(vocab, 5)
    _, ids, _ = topk_of(torch.full((vocab,), -3.0, dtype=dtype), k, device)
    assert ids.tolist() == list(range(k))
    last = torch.full((vocab,), -3.0, dtype=dtype)
    last[-1] = -2.0
    values, ids, _ = topk_of(last, k, device)
    assert ids.tolist() == [vocab - 1, *range(k - 1)]
    assert values.tolist() == [-2.0] + [-3.0] * (k - 1)


@DTYPES
@pytest.mark.parametrize("seed", range(5))
def test_ties_go_to_the_lowest_row(seed, dtype, backend, device) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-4, 4, (300,), generator=generator).to(dtype)
    values, ids, lse = topk_of(logits, 64, device)
    expected = sorted_ids(logits.tolist())[:64]
    assert ids.tolist() == expected
    assert values.tolist() == logits[expected].tolist()
    torch.testing.assert_close(lse, logits.float().logsumexp(-1))


def test_the_zeros_are_equal(backend, device) -> None:
    _, ids, _ = topk_of(torch.tensor([-1.0, -0.0, 0.0, -0.0, 0.0]), 5, device)
    assert ids.tolist() == [1, 2, 3, 4, 0]


@DTYPES
def test_ties_at_the_border_of_k(dtype, backend, device) -> None:
    _, ids, _ = topk_of(torch.tensor([0.5, 0.25, 0.25, -1.0], dtype=dtype), 2, device)
    assert ids.tolist() == [0, 1]


def test_vocab_map_names_the_rows(backend, device) -> None:
    """Ties go by row, not by mapped id, and the lse is over the rows there are."""
    logits, names = torch.tensor([1.0, 2.0, 2.0, 0.0]), torch.tensor([900, 700, 50, 2**40])
    values, ids, lse = topk_of(logits, 4, device, vocab_map=names.to(device))
    assert ids.tolist() == [700, 50, 900, 2**40]
    assert values.tolist() == [2.0, 2.0, 1.0, 0.0]
    torch.testing.assert_close(lse, logits.logsumexp(-1))


@DTYPES
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_never_wins(sign, dtype, backend, device) -> None:
    """NaN of either sign comes last, whatever its bits, and its row's lse is NaN."""
    logits = torch.tensor([1.0, math.nan, -math.inf, 3.0, math.nan], dtype=dtype)
    logits = torch.copysign(logits, torch.tensor([1, sign, -1, 1, sign]))
    values, ids, lse = topk_of(logits, 5, device)
    assert ids.tolist() == [3, 0, 2, 1, 4]
    assert values[:3].tolist() == [3.0, 1.0, -math.inf]
    assert values[3:].isnan().all()
    assert lse.isnan()


def test_a_nan_row_leaves_the_others_alone(backend, device) -> None:
    hidden = torch.randn(3, 8, device=device)
    weights = (torch.zeros(2, 1, 8, 8, device=device), None, torch.randn(50, 8, device=device))
    clean = medusa_project_topk(hidden, *weights, 6)
    hidden[1] = math.nan
    dirty = medusa_project_topk(hidden, *weights, 6)
    for before, after in zip(clean, dirty, strict=True):
        torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=0, atol=0)
    assert ((dirty[1][1] >= 0) & (dirty[1][1] < 50)).all()


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([-math.inf] * 3, -math.inf), ([math.inf, 0.0, 1.0], math.inf), ([1e4, 0.0, -1e4], 1e4), ([-1e4] * 4, -1e4)],
)
def test_lse_of_extremes(logits, expected, backend, device) -> None:
    logits = torch.tensor(logits)
    values, ids, lse = topk_of(logits, 3, device)
    torch.testing.assert_close(lse, torch.tensor(expected) + (math.log(4) if len(logits) == 4 else 0))
    assert ids.tolist() == sorted_ids(logits.tolist())[:3]
    assert values.tolist() == logits[ids].tolist()


def test_heads_and_rows_do_not_mix(backend, device) -> None:
    """Each head's own projection has its own winner in each batch row."""
    batch, num_heads, vocab = 3, 4, 40
    w_out = torch.zeros(num_heads, vocab, batch)
    for head in range(num_heads):
        for row in range(batch):
            w_out[head, 10 * head + row, row] = 1.0
    hidden, no_layer = torch.eye(batch), torch.zeros(num_heads, 0, batch, batch)
    _, ids, _ = medusa_project_topk(hidden.to(device), no_layer.to(device), None, w_out.to(device), 1)
    assert ids[..., 0].tolist() == [[10 * head + row for head in range(num_heads)] for row in range(batch)]


def test_order_over_all_magnitudes() -> None:
    """The packed order is that of the numbers, from subnormal to the largest, for both signs."""
    magnitudes = torch.tensor([0.0, 1e-45, 1e-40, 1.2e-38, 1e-3, 1.0, 65504.0, 3e38, math.inf])
    logits = torch.cat([magnitudes, -magnitudes])[torch.randperm(18)]
    values, ids = topk_lowest_id(logits[None], 18)
    assert ids[0].tolist() == sorted_ids(logits.tolist())
    assert torch.equal(values[0], logits[ids[0]])
