"""`rms_norm` and `rotary_cache_write_`: the six of every op, and the bits of the modules they replace."""

import doctest

import pytest
import torch

import specdec_kernels.ops.decoder as op_module
from specdec_kernels import rms_norm, rotary_cache_write_
from specdec_kernels._ops import ops
from specdec_kernels.testing import assert_close_to_baseline

from ..marks import needs_native

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# (B, T, Hq, Hk, D, Dr), dtype, normed heads, and why.
CASES = [
    ((1, 1, 9, 3, 64, 64), BF16, False),  # one token of the packaged model
    ((2, 5, 4, 2, 24, 24), BF16, True),  # Qwen3
    ((3, 7, 3, 1, 20, 10), FP16, False),  # part of a head, odd vectors
    ((1, 33, 2, 2, 2, 2), FP32, True),
    ((2, 3, 5, 1, 17, 0), FP32, False),  # no rotation
    ((1, 300, 4, 2, 64, 64), BF16, True),  # more than a thread takes
]
FIRST, CAPACITY = 2, 9  # nodes before, and rows of the cache besides those of the nodes


def case_id(case) -> str:
    (batch, nodes, q, kv, dim, rotary), dtype, normed = case
    return f"B{batch}-T{nodes}-H{q}+{kv}-D{dim}-R{rotary}-{str(dtype)[6:]}{'-norm' if normed else ''}"


def make_inputs(case, device="cpu"):
    """Return the arguments of the op; tensors have gaps, caches are ``(B, H, S, D)`` seen as the op wants them."""
    (batch, nodes, q, kv, dim, rotary), dtype, normed = case
    qkv = torch.randn(batch, nodes, (q + 2 * kv) * dim + 5)[..., 5:].unflatten(2, (q + 2 * kv, dim))
    angle = torch.rand(1 if nodes == 33 else batch, nodes, rotary) * 100
    caches = torch.full((2, batch, kv, nodes + CAPACITY, dim), float("nan"))
    norms = [torch.randn(dim) if normed else None for _ in range(2)]
    moved = [None if t is None else t.to(device, dtype) for t in (qkv, angle.cos(), angle.sin(), caches, *norms)]
    qkv, cos, sin, caches, q_norm, k_norm = moved
    if rotary == 0:
        cos = sin = None
    lengths = torch.tensor([4, 0, 7][:batch], dtype=torch.int32, device=device)
    k_cache, v_cache = caches.transpose(2, 3)
    slots = None
    if batch == 3:  # written to the rows of a larger cache
        k_cache, v_cache = (torch.cat([cache, cache[:2]]) for cache in (k_cache, v_cache))
        slots = torch.tensor([4, 0, 3, 1], dtype=torch.int32, device=device)[:3]
    return [qkv, cos, sin, k_cache, v_cache, lengths, FIRST, slots, q_norm, k_norm, 1e-5]


def copied(inputs):
    return [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]


def norm_law(x, weight, eps):
    """What a Llama norm does, in fp32 at least."""
    y = x.to(torch.promote_types(x.dtype, FP32))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def law(qkv, cos, sin, k_cache, v_cache, lengths, first_node, slots, q_norm, k_norm, eps):
    """Head by head and node by node, with the operations of the modules; returns what qkv and the caches become."""
    qkv, k_cache, v_cache = qkv.clone(), k_cache.clone(), v_cache.clone()
    num_kv, num_q = k_cache.shape[2], qkv.shape[2] - 2 * k_cache.shape[2]

    def turned(x, norm, b, node):
        x = x if norm is None else norm_law(x, norm, eps)
        if cos is None:
            return x
        c, s = (t[b % len(t), node] for t in (cos, sin))
        part = x[..., : len(c)]
        half = len(c) // 2
        mixed = torch.cat([-part[..., half:], part[..., :half]], -1)
        return torch.cat([part * c + mixed * s, x[..., len(c) :]], -1)

    for b in range(qkv.shape[0]):
        for node in range(qkv.shape[1]):
            row, heads = int(lengths[b]) + first_node + node, qkv[b, node].clone()
            slot = b if slots is None else int(slots[b])
            qkv[b, node, :num_q] = turned(heads[:num_q], q_norm, b, node)
            k_cache[slot, row] = turned(heads[num_q : num_q + num_kv], k_norm, b, node)
            v_cache[slot, row] = heads[num_q + num_kv :]
    return qkv, k_cache, v_cache


def call(inputs) -> None:
    *tensors, first_node, slots, q_norm, k_norm, eps = inputs
    rotary_cache_write_(*tensors, first_node=first_node, slots=slots, q_norm=q_norm, k_norm=k_norm, eps=eps)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_has_the_bits_of_the_modules(case, backend, device) -> None:
    """Rotation rounds what the modules round; only a norm's sum may have another order."""
    inputs = copied(make_inputs(case, device))
    expected = law(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in inputs))
    call(inputs)
    for have, want in zip((inputs[0], inputs[3], inputs[4]), expected, strict=True):
        have = have.cpu()
        assert torch.equal(have.isnan(), want.isnan())
        if case[2]:
            assert_close_to_baseline(have.nan_to_num(), want.nan_to_num().double(), want.nan_to_num() * (1 + 2**-6))
        else:
            torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64], ids=["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("shape", [(1,), (3, 576), (2, 3, 17), (0, 8), (129, 640)], ids=str)
def test_norm_matches_exact(shape, dtype, backend, device) -> None:
    x = torch.randn(*shape[:-1], shape[-1] + 2, device=device).to(dtype)[..., 2:]
    weight = torch.randn(shape[-1], device=device).to(dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.is_contiguous()
    assert out.dtype == dtype
    x, weight, out = x.cpu(), weight.cpu(), out.cpu()
    if dtype == torch.float64:
        torch.testing.assert_close(out, norm_law(x, weight, 1e-5))
    elif x.numel():
        assert_close_to_baseline(out, norm_law(x.double(), weight.double(), 1e-5), norm_law(x, weight, 1e-5))


@needs_native
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_native_has_these_bits_on_every_instruction_set(case, isa) -> None:
    inputs = make_inputs((case[0], case[1], False))
    expected = law(*inputs)
    call(inputs)
    torch.testing.assert_close((inputs[0], inputs[3], inputs[4]), expected, rtol=0, atol=0, equal_nan=True)


@needs_native
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64], ids=["bf16", "fp16", "fp32", "fp64"])
def test_rows_do_not_depend_on_each_other(dtype, isa) -> None:
    x, weight = torch.randn(700, 200).to(dtype), torch.randn(200).to(dtype)
    out = rms_norm(x, weight, 1e-6)
    for begin, end in ((0, 1), (5, 8), (699, 700)):
        assert torch.equal(rms_norm(x[begin:end], weight, 1e-6), out[begin:end])
    inputs = make_inputs(((1, 5, 4, 2, 24, 24), dtype, True))
    together, alone = copied(inputs), copied(inputs)
    call(together)
    for node in range(5):
        one = [t[:, node : node + 1] if i < 3 else t for i, t in enumerate(alone)]
        one[6] = FIRST + node
        call(one)
    for have, want in zip(alone, together, strict=True):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_do_not_depend_on_each_other_on_a_gpu() -> None:
    x, weight = torch.randn(700, 576, device="cuda").to(BF16), torch.randn(576, device="cuda").to(BF16)
    out = rms_norm(x, weight, 1e-6)
    for begin, end in ((0, 1), (5, 8), (699, 700)):
        assert torch.equal(rms_norm(x[begin:end], weight, 1e-6), out[begin:end])


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=case_id)
def test_opcheck(case, backend, device) -> None:
    inputs = [t.nan_to_num() if isinstance(t, torch.Tensor) and t.dim() == 4 else t for t in make_inputs(case, device)]
    options = dict(zip(NAMES[6:], inputs[6:], strict=True))
    torch.library.opcheck(ops.rotary_cache_write_.default, inputs[:6], options)
    torch.library.opcheck(ops.rms_norm.default, (inputs[0], torch.ones_like(inputs[0][0, 0, 0]), 1e-5))


def test_compiles(backend, device) -> None:
    def step(qkv, cos, sin, k_cache, v_cache, lengths, weight):
        qkv = rms_norm(qkv, weight, 1e-5)
        rotary_cache_write_(qkv, cos, sin, k_cache, v_cache, lengths)
        return qkv[:, :, :4] * 2, k_cache, v_cache

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for nodes in (2, 5):  # the second call compiles with dynamic shapes
        inputs = make_inputs(((2, nodes, 4, 2, 8, 8), FP32, False), device)[:6]
        inputs = [*(t.nan_to_num() for t in inputs), torch.ones(8, device=device)]
        torch.testing.assert_close(compiled(*copied(inputs)), step(*copied(inputs)), rtol=0, atol=0)


def test_exports(backend, device) -> None:
    class Step(torch.nn.Module):
        def forward(self, qkv, cos, sin, k_cache, v_cache, lengths):
            rotary_cache_write_(qkv, cos, sin, k_cache, v_cache, lengths)
            return rms_norm(k_cache, cos[0, 0], 1e-5)

    args = tuple(t.nan_to_num() for t in make_inputs(((1, 3, 2, 1, 8, 8), FP32, False), device)[:6])
    program = torch.export.export(Step(), args)
    assert "specdec_kernels.rotary_cache_write_" in program.graph_module.code
    torch.testing.assert_close(program.module()(*copied(args)), Step()(*copied(args)), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph() -> None:
    inputs = copied(make_inputs(CASES[1], "cuda"))
    call(copied(inputs))
    torch.cuda.synchronize()
    graph, replayed = torch.cuda.CUDAGraph(), copied(inputs)
    with torch.cuda.graph(graph):
        call(replayed)
    graph.replay()
    call(inputs)
    torch.testing.assert_close(replayed[3], inputs[3], rtol=0, atol=0, equal_nan=True)


GOOD = make_inputs(((2, 3, 4, 2, 8, 8), FP32, True))
NAMES = ("qkv", "cos", "sin", "k_cache", "v_cache", "prefix_len", "first_node", "slots", "q_norm", "k_norm", "eps")
REJECTED = [
    ({"qkv": GOOD[0][0]}, ValueError, r"qkv must have shape \(B, T, Hq \+ 2 Hk, D\), got \(3, 8, 8\)"),
    ({"qkv": GOOD[0].int()}, TypeError, "qkv must be float16 or .*, got int32"),
    ({"qkv": GOOD[0][:, :, :4]}, ValueError, "qkv must have more than 2 · 2 heads, got 4"),
    ({"qkv": GOOD[0].clone().requires_grad_()}, RuntimeError, "qkv requires grad"),
    ({"cos": None}, ValueError, "cos and sin must both be given, or none"),
    ({"cos": GOOD[1][:, :2]}, ValueError, r"cos must have shape \(2, 3, Dr\), got \(2, 2, 8\)"),
    ({"sin": GOOD[2].double()}, TypeError, "sin must be float32, got float64"),
    ({"cos": GOOD[1][..., :3], "sin": GOOD[2][..., :3]}, ValueError, "cos must have an even width of at most 8, got 3"),
    ({"cos": GOOD[1].repeat(1, 1, 2)[..., :8]}, ValueError, r"sin must have the strides of cos, \(48, 16, 1\), got"),
    ({"k_cache": GOOD[3][:1]}, ValueError, r"k_cache must have shape \(2, S, Hk, 8\), got \(1, 12, 2, 8\)"),
    ({"v_cache": GOOD[4][:, :5]}, ValueError, r"v_cache must have shape \(2, 12, 2, 8\), got \(2, 5, 2, 8\)"),
    ({"v_cache": GOOD[4].to("meta")}, ValueError, "v_cache must be on cpu, got meta"),
    ({"prefix_len": GOOD[5].long()}, TypeError, "prefix_len must be int32, got int64"),
    ({"prefix_len": GOOD[5] + 4}, ValueError, r"prefix_len must be in \[0, 7\], got 8"),
    ({"first_node": -1}, ValueError, r"first_node must be in \[0, 9\], got -1"),
    ({"first_node": 10}, ValueError, r"first_node must be in \[0, 9\], got 10"),
    ({"slots": torch.tensor([0, 2]).int()}, ValueError, r"slots must be in \[0, 1\], got 2"),
    ({"slots": torch.tensor([0, 1])}, TypeError, "slots must be int32, got int64"),
    ({"q_norm": GOOD[8][:4]}, ValueError, r"q_norm must have shape \(8,\), got \(4,\)"),
    ({"eps": "small"}, TypeError, "eps must be a number, got str"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), REJECTED, ids=lambda v: "-".join(v) if type(v) is dict else ""
)
def test_rejects(changes, error, message) -> None:
    with pytest.raises(error, match=f"^rotary_cache_write_: {message}"):
        rotary_cache_write_(**(dict(zip(NAMES, GOOD, strict=True)) | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
        ({"x": torch.ones(2, 0)}, ValueError, r"x must have a last dimension of at least 1, got shape \(2, 0\)"),
        ({"x": torch.ones(4).long()}, TypeError, "x must be float16 or .*, got int64"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must have shape \(4,\), got \(3,\)"),
        ({"weight": torch.ones(4).half()}, TypeError, "weight must be float32, got float16"),
        ({"weight": torch.ones(4, requires_grad=True)}, RuntimeError, "weight requires grad"),
        ({"eps": None}, TypeError, "eps must be a number, got NoneType"),
    ],
)
def test_norm_rejects(changes, error, message) -> None:
    with pytest.raises(error, match=f"^rms_norm: {message}"):
        rms_norm(**({"x": torch.ones(2, 4), "weight": torch.ones(4), "eps": 1e-5} | changes))


def test_extremes(backend, device) -> None:
    """No batch, no nodes, the last rows of a cache, zeros and NaN."""
    for shape in ((0, 3), (2, 0)):
        call(make_inputs(((*shape, 2, 1, 4, 4), FP32, True), device))
    inputs = make_inputs(((1, 2, 2, 1, 4, 4), FP32, False), device)
    inputs[5] = inputs[5] + 3
    call(inputs)
    assert inputs[4][0, :, 0, 0].isfinite().tolist() == [False] * 9 + [True] * 2
    x = torch.tensor([[0.0, 0.0], [1.0, float("nan")], [3.0, 4.0]], device=device)
    out = rms_norm(x, torch.ones(2, device=device), 1e-6)
    assert out[0].tolist() == [0, 0]
    assert out.isnan().any(1).tolist() == [False, True, False]


def test_docstrings() -> None:
    assert doctest.testmod(op_module).failed == 0
