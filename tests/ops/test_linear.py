"""`linear` and `gated_linear`: the six of every op, and rows that do not depend on each other."""

import doctest

import pytest
import torch
import torch.nn.functional as F

import specdec_kernels.ops.linear as op_module
from specdec_kernels import gated_linear, linear
from specdec_kernels._ops import ops
from specdec_kernels.testing import assert_close_to_baseline

from ..marks import needs_native

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# shape of x, rows of each matrix, dtype, bias, residual, and why.
CASES = [
    ((1, 1, 64), (64, 32, 32), BF16, True, False),  # Q, K and V of one token
    ((1, 16, 48), (64,), BF16, False, True),  # an output projection
    ((3, 5, 17), (7, 1, 97), FP16, True, True),  # primes
    ((70,), (193,), FP32, False, False),  # one row without a batch, more than two tasks
    ((131, 24), (33, 95), FP32, True, True),  # more rows than a block
    ((2, 1), (3, 2), BF16, True, True),  # width 1
]
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64], ids=["fp32", "bf16", "fp16", "fp64"])


def case_id(case) -> str:
    shape, rows, dtype, bias, residual = case
    parts = ["x".join(map(str, shape)), "+".join(map(str, rows)), str(dtype)[6:], *["bias"] * bias]
    return "-".join([*parts, *["residual"] * residual])


def make_inputs(case, device="cpu"):
    """Return ``x, weights, biases, residual``, all cut from wider tensors."""
    shape, rows, dtype, bias, residual = case
    width = shape[-1]
    x = torch.randn(*shape[:-1], 2 * width)[..., width:]
    weights = [torch.randn(count, width + 3)[:, :width] * width**-0.5 for count in rows]
    biases = [torch.randn(2 * count)[count:] for count in rows] if bias else []
    added = torch.randn(*shape[:-1], sum(rows) + 1)[..., 1:] if residual else None
    return _moved((x, weights, biases, added), device, dtype)


def _moved(value, *where):
    if isinstance(value, torch.Tensor):
        return value.to(*where)
    return None if value is None else type(value)(_moved(item, *where) for item in value)


def law(x, weights, biases, residual):
    """The loop over layers, in whatever dtype it is given."""
    y = torch.cat([F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)], dim=-1)
    return y if residual is None else residual + y


def gated_law(x, gate, up, gate_bias=None, up_bias=None):
    return F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)


def gated_inputs(case, device="cpu"):
    shape, rows, dtype, bias, _ = case
    x, (gate, up), biases, _ = make_inputs((shape, (rows[0], rows[0]), dtype, bias, False), device)
    return x, gate, up, *(biases or (None, None))


def call_gated(x, gate, up, gate_bias, up_bias):
    return gated_linear(x, gate, up, gate_bias=gate_bias, up_bias=up_bias)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_exact(case, backend, device) -> None:
    inputs = make_inputs(case, device)
    out = linear(*inputs[:3], residual=inputs[3])
    assert out.is_contiguous()
    assert out.dtype == case[2]
    here = _moved(inputs, "cpu")
    assert_close_to_baseline(out.cpu(), law(*_moved(here, torch.float64)), law(*here))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gated_matches_exact(case, backend, device) -> None:
    inputs = gated_inputs(case, device)
    out = call_gated(*inputs)
    assert out.is_contiguous()
    assert out.dtype == case[2]
    here = _moved(inputs, "cpu")
    assert_close_to_baseline(out.cpu(), gated_law(*_moved(here, torch.float64)), gated_law(*here))


def test_double(backend, device) -> None:
    inputs = make_inputs(((3, 7, 19), (5, 130), torch.float64, True, True), device)
    torch.testing.assert_close(linear(*inputs[:3], residual=inputs[3]), law(*inputs))
    gated = gated_inputs(((3, 7, 19), (130,), torch.float64, True, False), device)
    torch.testing.assert_close(call_gated(*gated), gated_law(*gated))


@needs_native
@DTYPES
@pytest.mark.parametrize("shape", [(300, 70), (19, 8203)], ids=["short", "long"])
def test_rows_do_not_depend_on_their_number_or_company(shape, dtype, isa) -> None:
    x, weights, biases, residual = make_inputs((shape, (40, 250) if shape[0] > 100 else (31, 49), dtype, True, True))
    all_rows = linear(x, weights, biases, residual=residual)
    gated = gated_linear(x, weights[1], weights[1] * 0.5, gate_bias=biases[1], up_bias=biases[1])
    last = shape[0]
    for begin, end in ((0, 1), (7, 8), (last - 1, last), (1, 3), (4, 7), (5, 10), (last // 3, last - last // 4)):
        rows = slice(begin, end)
        assert torch.equal(linear(x[rows], weights, biases, residual=residual[rows]), all_rows[rows])
        alone = gated_linear(x[rows], weights[1], weights[1] * 0.5, gate_bias=biases[1], up_bias=biases[1])
        assert torch.equal(alone, gated[rows])
    first = len(weights[0])
    assert torch.equal(linear(x, weights[1:], biases[1:], residual=residual[:, first:]), all_rows[:, first:])


@needs_native
@DTYPES
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 95, 96, 97, 192, 200])
def test_borders_of_tasks(rows, dtype, isa) -> None:
    inputs = make_inputs(((5, 33), (rows, rows), dtype, True, True))
    out, gated = linear(*inputs[:3], residual=inputs[3]), call_gated(inputs[0], *inputs[1], *inputs[2])
    expected, gated_expected = law(*inputs), gated_law(inputs[0], *inputs[1], *inputs[2])
    if dtype == torch.float64:
        torch.testing.assert_close((out, gated), (expected, gated_expected))
        return
    exact = _moved(inputs, torch.float64)
    assert_close_to_baseline(out, law(*exact), expected)
    assert_close_to_baseline(gated, gated_law(exact[0], *exact[1], *exact[2]), gated_expected)


@needs_native
def test_threads_change_nothing() -> None:
    x, weights, *_ = make_inputs(((129, 512), (700, 900), BF16, False, False))
    expected, threads = linear(x, weights), torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(linear(x, weights), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES[1:3], ids=case_id)
def test_opcheck(case, backend, device) -> None:
    torch.library.opcheck(ops.linear.default, make_inputs(case, device))
    torch.library.opcheck(ops.gated_linear.default, gated_inputs(case, device))


def test_compiles(backend, device) -> None:
    def step(x, weights, biases, residual):
        y = linear(x * 1, weights, biases, residual=residual)
        return y, gated_linear(x, weights[0], weights[0])

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in (2, 5):  # the second call compiles with dynamic shapes
        inputs = make_inputs(((batch, 3, 16), (8, 4), FP32, True, True), device)
        torch.testing.assert_close(compiled(*inputs), step(*inputs), rtol=0, atol=0)


def test_exports(backend, device) -> None:
    class Step(torch.nn.Module):
        def forward(self, x, gate, up):
            return gated_linear(linear(x, [gate]), up, up)

    args = tuple(t.to(device) for t in (torch.randn(2, 8), torch.randn(6, 8), torch.randn(5, 6)))
    program = torch.export.export(Step(), args)
    assert "specdec_kernels.gated_linear" in program.graph_module.code
    torch.testing.assert_close(program.module()(*args), Step()(*args), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph() -> None:
    x, weights, biases, residual = make_inputs(((4, 64), (32, 32), BF16, True, True), "cuda")
    linear(x, weights, biases, residual=residual), gated_linear(x, *weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weights, biases, residual=residual), gated_linear(x, *weights)
    x.neg_()
    graph.replay()
    torch.testing.assert_close(out, (linear(x, weights, biases, residual=residual), gated_linear(x, *weights)))


def _all_and_some(some: list[slice], num_rows: int) -> None:
    """Require that some rows alone have the bits that they have among all."""
    x, weights, biases, residual = make_inputs(((num_rows, 512), (96, 544), BF16, True, True), "cuda")
    x = x.contiguous()
    together = linear(x, weights, biases, residual=residual), gated_linear(x, *[weights[0]] * 2)
    for rows in some:
        alone = linear(x[rows], weights, biases, residual=residual[rows]), gated_linear(x[rows], *[weights[0]] * 2)
        assert all(torch.equal(have, want[rows]) for have, want in zip(alone, together, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_up_to_64_rows_their_number_does_not_matter() -> None:
    _all_and_some([slice(i, i + n) for i, n in ((0, 1), (63, 64), (7, 9), (16, 48), (1, 64))], 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_beyond_64_rows_it_should_not_matter_either() -> None:
    """No vendor says that a matrix unit gives the same bits in tiles of other heights; here is where it shows."""
    _all_and_some([slice(i, i + n) for i, n in ((0, 1), (70, 20), (100, 100), (0, 129))], 300)


X, (W, W2), (B, _), R = make_inputs(((2, 3, 16), (5, 5), FP32, True, True))
REJECTED = [
    ({"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
    ({"x": torch.tensor(1.0)}, ValueError, r"x must have a last dimension of at least 1, got shape \(\)"),
    ({"x": X.long()}, TypeError, "x must be float16 or .*, got int64"),
    ({"x": X.mT.contiguous().mT}, ValueError, "x must have stride 1 in its last dimension"),
    ({"x": X.clone().requires_grad_()}, RuntimeError, "x requires grad"),
]
LINEAR_REJECTED = [
    ({"weights": []}, ValueError, "weights must not be empty"),
    ({"weights": [W[:, :9]]}, ValueError, r"weights must have shape \(N, 16\), got \(5, 9\)"),
    ({"weights": [W.double()]}, TypeError, "weights must be float32, got float64"),
    ({"weights": [W, [1]]}, TypeError, "weights must be a torch.Tensor, got list"),
    ({"weights": [torch.nn.Parameter(W)]}, RuntimeError, "weights requires grad"),
    ({"biases": [B, B]}, ValueError, "biases must be as many as weights, 1, or none, got 2"),
    ({"biases": [B[:3]]}, ValueError, r"biases must have shape \(5,\), got \(3,\)"),
    ({"residual": R}, ValueError, r"residual must have shape \(2, 3, 5\), got \(2, 3, 10\)"),
    ({"residual": R[..., :5].to("meta")}, ValueError, "residual must be on cpu, got meta"),
]
GATED_REJECTED = [
    ({"gate_weight": W[0]}, ValueError, r"gate_weight must have shape \(N, 16\), got \(16,\)"),
    ({"up_weight": W[:3]}, ValueError, r"up_weight must have shape \(5, 16\), got \(3, 16\)"),
    ({"up_weight": W.to("meta")}, ValueError, "up_weight must be on cpu, got meta"),
    ({"gate_bias": B}, ValueError, "gate_bias and up_bias must both be given, or none"),
    ({"gate_bias": B, "up_bias": B[:2]}, ValueError, r"up_bias must have shape \(5,\), got \(2,\)"),
]


def ids_of(value):
    """Name a case without the numbers in it: every process of a parallel run draws others."""
    return "-".join(value) if isinstance(value, dict) else str(value)[:20]


@pytest.mark.parametrize(("changes", "error", "message"), REJECTED + LINEAR_REJECTED, ids=ids_of)
def test_rejects(changes, error, message) -> None:
    with pytest.raises(error, match=f"^linear: {message}"):
        linear(**({"x": X, "weights": [W]} | changes))


@pytest.mark.parametrize(("changes", "error", "message"), REJECTED + GATED_REJECTED, ids=ids_of)
def test_gated_rejects(changes, error, message) -> None:
    with pytest.raises(error, match=f"^gated_linear: {message}"):
        gated_linear(**({"x": X, "gate_weight": W, "up_weight": W2} | changes))


def test_extremes(backend, device) -> None:
    """No rows, no columns; SiLU far out; NaN stays in its row."""
    weight = torch.ones(3, 4, dtype=BF16, device=device)
    for shape in ((0, 4), (2, 0, 4)):
        x = torch.ones(shape, dtype=BF16, device=device)
        assert linear(x, [weight, weight]).shape == (*shape[:-1], 6)
        assert gated_linear(x, weight, weight).shape == (*shape[:-1], 3)
    x = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4, float("nan")], device=device)[:, None]
    one = torch.ones(1, 1, device=device)
    torch.testing.assert_close(gated_linear(x, one, one), F.silu(x) * x, equal_nan=True)
    assert linear(x, [one]).isnan().sum() == 1
    assert linear(x, [one[:0]]).shape == (6, 0)


def test_docstrings() -> None:
    assert doctest.testmod(op_module).failed == 0
