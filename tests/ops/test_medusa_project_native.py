"""The native CPU kernels of Medusa heads on every instruction set: borders of tiles and chunks, threads, memory."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.memory import peak_extra_bytes
from specdec_kernels import _native, medusa_project, medusa_project_topk
from specdec_kernels.reference.medusa_project import topk_lowest_id
from specdec_kernels.testing import assert_close_to_baseline

from ..marks import needs_native
from .test_medusa_project import doubled, head_by_head, make_inputs, make_root, with_root
from .test_medusa_project_topk import sorted_ids

pytestmark = needs_native

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=["fp32", "bf16", "fp16", "fp64"])
# A task takes 192 weight rows.
CHUNK = 192


def close(case, dtype) -> None:
    inputs = make_inputs(case)
    logits = medusa_project(*inputs)
    if dtype == FP64:
        torch.testing.assert_close(logits, head_by_head(*inputs))
    else:
        assert_close_to_baseline(logits, head_by_head(*doubled(inputs)), head_by_head(*inputs))
    values, ids, lse = medusa_project_topk(*inputs, min(9, case[0][-1]))
    expected = topk_lowest_id(logits.float(), values.shape[-1])
    torch.testing.assert_close((values, ids), expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, logits.float().logsumexp(-1))


@DTYPES
@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("hidden", [1, 3, 15, 16, 17, 31, 32, 33, 100])
def test_widths(hidden, projection, dtype, isa) -> None:
    """Around the numbers that one step multiplies."""
    close(((3, 2, 1, hidden, 40), dtype, projection, True), dtype)


@DTYPES
@pytest.mark.parametrize("hidden", [1, 16, 33, 100, 700])
def test_root(hidden, dtype, isa) -> None:
    """Its block is the op's, whatever kernels norm and multiply."""
    case = (2, 2, 1, hidden, 70), dtype, "shared", True
    inputs, root = make_inputs(case), make_root(case)
    logits = medusa_project(*inputs, **root)
    exact = doubled(inputs)
    exact = head_by_head(with_root(exact[0], *doubled(root.values())), *exact[1:])
    if dtype == FP64:
        torch.testing.assert_close(logits, exact)
    else:
        baseline = head_by_head(with_root(inputs[0], *root.values()), *inputs[1:])
        assert_close_to_baseline(logits, exact, baseline)


@DTYPES
@pytest.mark.parametrize("vocab", [1, 2, 5, 6, 7, 12, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_vocabularies(vocab, dtype, isa) -> None:
    """Around the rows of weights of a tile and of a chunk."""
    close(((2, 3, 1, 24, vocab), dtype, "own", True), dtype)


@DTYPES
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 8, 13])
def test_batches(batch, dtype, isa) -> None:
    """Around the rows of a panel, and more panels than a tile has rows of weights."""
    close(((batch, 3, 2, 24, 31), dtype, "shared", True), dtype)


@DTYPES
def test_more_rows_than_stay_in_the_cache(dtype, isa) -> None:
    """The rows are taken in blocks; what a block leaves in memory does not reach the next."""
    close(((70, 1, 0, 4111, 13), dtype, "shared", True), dtype)


@DTYPES
@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("shape", [(7, 3, 2, 70, 450), (7, 2, 0, 8203, 29)], ids=["short", "long"])
def test_a_row_is_the_same_in_every_company(shape, projection, dtype, isa) -> None:
    """Bits depend on the row and the weights: not on the batch, the place in it, nor on the other rows of weights."""
    hidden, w_res, b_res, w_out = make_inputs((shape, dtype, projection, True))
    k = min(64, shape[-1])
    logits = medusa_project(hidden, w_res, b_res, w_out)
    ranked = medusa_project_topk(hidden, w_res, b_res, w_out, k)
    for rows in (*(slice(row, row + 1) for row in range(7)), slice(1, 3), slice(2, 5), slice(2, 7)):
        some = medusa_project_topk(hidden[rows], w_res, b_res, w_out, k)
        for have, want in zip(some, ranked, strict=True):
            assert torch.equal(have, want[rows])
        assert torch.equal(medusa_project(hidden[rows], w_res, b_res, w_out), logits[rows])
    some = slice(shape[-1] * 4 // 9, shape[-1] - 3)
    assert torch.equal(medusa_project(hidden, w_res, b_res, w_out[..., some, :]), logits[..., some])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_threads_do_not_matter(projection, dtype) -> None:
    """Weights large enough to be shared out, with many ties: the same bits on one, two and three threads."""
    inputs = list(make_inputs(((2, 3, 1, 512, 3001), dtype, projection, True)))
    inputs[3] = (inputs[3] * 8).round() / 8
    root = make_root(((2, 3, 1, 512, 3001), dtype, projection, True))
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 2, 3):
            torch.set_num_threads(threads)
            results.append((medusa_project(*inputs, **root), *medusa_project_topk(*inputs, 64, **root)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[0][1:3], topk_lowest_id(results[0][0].float(), 64), rtol=0, atol=0)


def ranked(logits: Tensor, k: int) -> list[Tensor]:
    """Run the op so that its logits are exactly ``logits (V,)``, over enough columns to be shared out by threads."""
    w_out = torch.zeros(len(logits), 1 << 10, dtype=logits.dtype)
    w_out[:, 0] = logits
    hidden = torch.zeros(1, 1 << 10, dtype=logits.dtype)
    hidden[0, 0] = 1
    no_layer = torch.zeros(1, 0, 1 << 10, 1 << 10, dtype=logits.dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        return [t[0, 0] for t in medusa_project_topk(hidden, no_layer, None, w_out, k)]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("k", [1, 10, 64])
def test_ties_across_chunks_and_threads(k, dtype, isa) -> None:
    """The largest logits lie around the borders of the chunks, and a thread's list begins with ties of another's."""
    logits = torch.full((5 * CHUNK + 11,), -1.0, dtype=dtype)
    for border in range(0, len(logits), CHUNK):
        logits[max(0, border - 3) : border + 3] = 2.0
    logits[7 :: CHUNK + 1] = 3.0
    values, ids, lse = ranked(logits, k)
    assert ids.tolist() == sorted_ids(logits.tolist())[:k]
    assert values.tolist() == logits[ids].tolist()
    torch.testing.assert_close(lse, logits.float().logsumexp(-1))


def test_chunks_that_are_all_nan(isa) -> None:
    """NaN fills the list at first, and gives way to numbers, −inf included."""
    logits = torch.full((4 * CHUNK,), math.nan)
    logits[3 * CHUNK + 5], logits[2 * CHUNK + 1], logits[CHUNK] = 1.0, -math.inf, -math.inf
    values, ids, lse = ranked(logits, 6)
    assert ids.tolist() == [3 * CHUNK + 5, CHUNK, 2 * CHUNK + 1, 0, 1, 2]
    assert values[:3].tolist() == [1.0, -math.inf, -math.inf]
    assert values[3:].isnan().all()
    assert lse.isnan()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (-math.inf, -math.inf, -math.inf),
        (-math.inf, 2.0, 2.0 + math.log(CHUNK)),
        (math.inf, 1.0, math.inf),
        (3e38, 1.0, 3e38),
        (-3e38, -math.inf, -3e38),
        (1.0, 1.0, 1.0 + math.log(2 * CHUNK)),
        (80.0, -80.0, 80.0 + math.log(CHUNK)),
    ],
)
def test_lse_over_chunks(first, second, expected, isa) -> None:
    for logits in (first, second), (second, first):
        _, _, lse = ranked(torch.tensor(logits).repeat_interleave(CHUNK), 3)
        torch.testing.assert_close(lse, torch.tensor(expected))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_infinite_states(dtype, isa) -> None:
    """SiLU of −inf is NaN and that of +inf is inf, as torch has it; far out it is 0 and x."""
    for value in (-math.inf, math.inf, math.nan, -1e4, 1e4, -100.0, 100.0, -79.0, 79.0, 0.0):
        hidden, weight = torch.ones(1, 1, dtype=dtype), torch.tensor(value, dtype=dtype).view(1, 1, 1, 1)
        args = (hidden, weight, None, torch.ones(1, 1, dtype=dtype))
        torch.testing.assert_close(medusa_project(*args), head_by_head(*args), equal_nan=True)


def test_weights_may_share_memory_and_have_gaps(isa) -> None:
    """Heads that share their weights by stride 0, rows far apart, biases expanded, rows of hidden out of order."""
    hidden = torch.randn(6, 40)[::2, 4:37]
    w_res = torch.randn(1, 2, 33, 50)[..., :33].expand(3, 2, 33, 33) * 0.1
    w_res = w_res.as_strided(w_res.shape, w_res.stride())
    b_res = torch.randn(33).expand(3, 2, 33)
    w_out = torch.randn(57, 3, 64).transpose(0, 1)[..., 5:38]
    logits = medusa_project(hidden, w_res, b_res, w_out)
    dense = [t.contiguous() for t in (hidden, w_res, b_res, w_out)]
    assert torch.equal(logits, medusa_project(*dense))
    assert_close_to_baseline(logits, head_by_head(*doubled(dense)), head_by_head(*dense))


def test_bits_of_every_level_round_alike() -> None:
    """Small whole numbers are exact everywhere, so every instruction set must give the same."""
    inputs = [torch.randint(-3, 4, t.shape).to(BF16) for t in make_inputs(((5, 2, 0, 77, 300), BF16, "own", True))]
    native = _native.native_module()
    expected = head_by_head(*inputs)
    for level in ("plain", "avx2", "avx512", "avx512_bf16"):
        native.limit_isa(level)
        try:
            assert torch.equal(medusa_project(*inputs), expected)
        finally:
            native.limit_isa("")


def test_logits_are_never_stored() -> None:
    """Of 205 MB of logits the op holds a few chunks."""
    batch, vocab, cpu = 64, 200_000, torch.device("cpu")
    args = (torch.randn(batch, 8), torch.zeros(4, 1, 8, 8), None, torch.randn(vocab, 8), 10)
    peak = peak_extra_bytes(lambda: medusa_project_topk(*args), cpu)
    if peak is None:
        pytest.skip("this system does not tell the peak of memory")
    for_logits = batch * 4 * vocab * 4
    assert peak < for_logits // 8
    assert peak_extra_bytes(lambda: medusa_project(*args[:4]), cpu) >= 0.9 * for_logits  # it sees such a buffer
