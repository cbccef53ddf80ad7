"""Philox uniforms: known answers, an independent scalar version, and what a request's draws depend on."""

import pytest
import torch

from specdec_kernels import philox_uniforms
from specdec_kernels._ops import ops
from specdec_kernels.reference import verify as reference
from specdec_kernels.reference._verify_philox import philox_4x32

# Published with the Random123 library, for Philox-4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822]
POSITIONS = [0, 7, 2**32, -1, 2**63 - 1, 0x0370734413198A2E]


def words(text):
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


def scalar_uniforms(seed, position, count):
    """Compute the same in Python integers, which do not wrap."""
    low, drawn = 2**32 - 1, []
    for block in range(-(-count // 4)):
        c, k = [block, 0, position & low, position >> 32 & low], [seed & low, seed >> 32 & low]
        for _ in range(10):
            a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [b >> 32 ^ c[1] ^ k[0], b & low, a >> 32 ^ c[3] ^ k[1], a & low]
            k = [k[0] + 0x9E3779B9 & low, k[1] + 0xBB67AE85 & low]
        drawn += c
    return [(2 * (word >> 9) + 1) / 2**24 for word in drawn[:count]]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert " ".join(f"{int(w):08x}" for w in philox_4x32(words(counter), words(key))) == expected


@pytest.mark.parametrize("count", [0, 1, 4, 5, 26, 64])
def test_matches_reference(backend, device, count):
    seeds, positions = torch.tensor(SEEDS, device=device), torch.tensor(POSITIONS, device=device)
    drawn = philox_uniforms(seeds, positions, count)
    assert drawn.shape == (6, count)
    assert drawn.dtype == torch.float32
    assert drawn.is_contiguous()
    assert torch.equal(drawn.cpu(), reference.philox_uniforms_ref(seeds.cpu(), positions.cpu(), count))
    expected = [scalar_uniforms(s, p, count) for s, p in zip(SEEDS, POSITIONS, strict=True)]
    assert drawn.double().tolist() == expected


def test_open_interval(monkeypatch):
    """The smallest and the largest word give 2^-24 and 1 − 2^-24, exactly in fp32."""
    ends = torch.tensor([[0], [2**32 - 1]])
    monkeypatch.setattr(reference, "philox_4x32", lambda counter, key: (ends, ends, ends, ends))
    drawn = reference.philox_uniforms_ref(torch.tensor([1, 2]), torch.tensor([3, 4]), 4)
    assert drawn.double().tolist() == [[2.0**-24] * 4, [1 - 2.0**-24] * 4]


def test_uniform_and_independent(backend):
    """Means, variances and correlations of neighbouring seeds, positions and draws, within 5 standard deviations."""
    n = 100_000
    zeros, steps = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    by_seed, by_position = philox_uniforms(steps, zeros, 2).double(), philox_uniforms(zeros, steps, 2).double()
    by_draw = philox_uniforms(zeros[:1], zeros[:1], 2 * n).double().view(n, 2)
    for drawn in (by_seed, by_position, by_draw):
        centred = drawn - 0.5
        assert centred.mean(0).abs().max() < 5 * (1 / 12 / n) ** 0.5
        assert (centred.square().mean() - 1 / 12).abs() < 5 * (1 / 180 / n) ** 0.5
        for a, b in ((centred[:-1, 0], centred[1:, 0]), (centred[:, 0], centred[:, 1])):
            assert (a * b).mean().abs() < 5 / 12 / n**0.5
        counts = (drawn[:, 0] * 100).long().bincount(minlength=100)
        assert ((counts - n / 100).square().sum() / (n / 100)) < 99 + 5 * (2 * 99) ** 0.5


def test_more_draws_change_no_earlier_ones(backend):
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    assert torch.equal(philox_uniforms(seeds, positions, 40)[:, :7], philox_uniforms(seeds, positions, 7))


def test_every_row_has_its_own_seed(backend):
    """Not element 0's: swapping rows with their seeds swaps the results, and one seed moves one row."""
    position = torch.tensor([5, 5])
    before = philox_uniforms(torch.tensor([1, 2]), position, 8)
    after = philox_uniforms(torch.tensor([1, 3]), position, 8)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    assert torch.equal(philox_uniforms(torch.tensor([2, 1]), position, 8), before.flip(0))
    strided = torch.tensor([[1, 9], [2, 9]])[:, 0]
    assert torch.equal(philox_uniforms(strided, position, 8), before)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_opcheck(backend, device, num_rows):
    args = torch.arange(num_rows, device=device), torch.arange(num_rows, device=device), 5
    torch.library.opcheck(ops.philox_uniforms.default, args)


def test_compiles_and_exports(backend):
    seeds = torch.arange(3)
    expected = philox_uniforms(seeds, seeds, 5)
    compiled = torch.compile(philox_uniforms, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(seeds, seeds, 5), expected)

    class Draws(torch.nn.Module):
        def forward(self, seed, position):
            return philox_uniforms(seed, position, 5)

    assert torch.equal(torch.export.export(Draws(), (seeds, seeds)).module()(seeds, seeds), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph():
    seeds = torch.arange(3, device="cuda")
    philox_uniforms(seeds, seeds, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = philox_uniforms(seeds, seeds, 5)
    seeds.add_(1)
    graph.replay()
    assert torch.equal(captured.cpu(), philox_uniforms(seeds.cpu(), seeds.cpu(), 5))


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        (([1], torch.tensor([1]), 1), TypeError, "seed must be a torch.Tensor, got list"),
        ((torch.tensor([1]), 1, 1), TypeError, "position must be a torch.Tensor, got int"),
        ((torch.tensor(1), torch.tensor(1), 1), ValueError, r"seed must have shape \(B,\), got \(\)"),
        ((torch.tensor([1.0]), torch.tensor([1]), 1), TypeError, "seed must be int64, got float32"),
        ((torch.tensor([1]), torch.tensor([1, 2]), 1), ValueError, r"position must have shape \(1,\), got \(2,\)"),
        ((torch.tensor([1]), torch.tensor([1]).int(), 1), TypeError, "position must be int64, got int32"),
        (
            (torch.tensor([1]), torch.empty(1, dtype=torch.int64, device="meta"), 1),
            ValueError,
            "must be on cpu, got meta",
        ),
        ((torch.tensor([1]), torch.tensor([1]), -1), ValueError, "count must be at least 0, got -1"),
    ],
)
def test_rejects(args, error, text):
    with pytest.raises(error, match=f"^philox_uniforms: .*{text}"):
        philox_uniforms(*args)
