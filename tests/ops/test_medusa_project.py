"""`medusa_project` and `medusa_project_topk`: the six of every op."""

import doctest

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_kernels.ops.medusa_project as op_module
from specdec_kernels import medusa_project, medusa_project_topk
from specdec_kernels._ops import ops
from specdec_kernels.reference.medusa_project import medusa_project_topk_ref
from specdec_kernels.testing import assert_close_to_baseline

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# (B, M, R, C, V), dtype, projection, bias, and why.
CASES = [
    ((1, 4, 1, 64, 1000), BF16, "shared", True),  # the common call
    ((3, 5, 1, 48, 131), FP16, "own", True),
    ((2, 3, 2, 17, 7), FP32, "own", True),  # two layers, primes
    ((8, 1, 1, 32, 8193), FP32, "shared", False),  # one head, no bias, a tile and one
    ((2, 2, 0, 24, 65), BF16, "own", True),  # no residual layer
    ((2, 2, 0, 24, 65), FP32, "shared", False),
    ((64, 2, 3, 16, 33), FP32, "shared", True),
    ((2, 3, 1, 8, 1), FP32, "own", False),  # a vocabulary of one
]


def case_id(case) -> str:
    (batch, heads, layers, hidden, vocab), dtype, projection, bias = case
    size = f"B{batch}-M{heads}-R{layers}-C{hidden}-V{vocab}"
    return f"{size}-{str(dtype)[6:]}-{projection}{'' if bias else '-nobias'}"


def make_inputs(case, device="cpu"):
    """Return ``hidden, w_res, b_res, w_out``; hidden and the weights are cut from wider tensors."""
    (batch, heads, layers, hidden, vocab), dtype, projection, bias = case
    x = torch.randn(batch, 2 * hidden)[:, :hidden]
    w_res = torch.randn(layers, heads, hidden, hidden).transpose(0, 1) * hidden**-0.5
    b_res = torch.randn(heads, layers, hidden) * 0.1 if bias else None
    w_out = torch.randn(heads, vocab + 1, hidden)[:, 1:] * hidden**-0.5
    w_out = w_out if projection == "own" else w_out[0]
    return tuple(t if t is None else t.to(device, dtype) for t in (x, w_res, b_res, w_out))


def make_root(case, device="cpu"):
    """Return the options of the block that sees the pending token, cut from wider tensors."""
    (batch, _, _, hidden, _), dtype, _, bias = case
    root = torch.randn(batch, 2 * hidden)[:, :hidden] * 0.02  # as small as embeddings are
    root[-1:] = 0
    w_root = torch.randn(hidden, 3 * hidden)[:, hidden:] * hidden**-0.5
    b_root = torch.randn(hidden) * 0.1 if bias else None
    named = {"root": root, "w_root": w_root, "b_root": b_root}
    return {name: t if t is None else t.to(device, dtype) for name, t in named.items()}


def with_root(hidden, root, w_root, b_root):
    """Return what the heads see instead of hidden."""
    normed = F.rms_norm(root, root.shape[-1:], eps=1e-6)
    return hidden + F.silu(F.linear(torch.cat([hidden, normed], dim=-1), w_root, b_root))


def head_by_head(hidden, w_res, b_res, w_out):
    """The loop every peer runs, in whatever dtype it is given."""
    logits = []
    for head in range(w_res.shape[0]):
        x = hidden
        for layer in range(w_res.shape[1]):
            x = x + F.silu(F.linear(x, w_res[head, layer], None if b_res is None else b_res[head, layer]))
        logits.append(F.linear(x, w_out[head] if w_out.dim() == 3 else w_out))
    return torch.stack(logits, dim=1)


def doubled(inputs, dtype=torch.float64):
    return tuple(t if t is None else t.cpu().to(dtype) for t in inputs)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_exact(case, backend, device) -> None:
    inputs = make_inputs(case, device)
    logits = medusa_project(*inputs)
    assert logits.is_contiguous()
    assert logits.dtype == case[1]
    baseline = head_by_head(*(t if t is None else t.cpu() for t in inputs))
    assert_close_to_baseline(logits.cpu(), head_by_head(*doubled(inputs)), baseline)


def test_double(backend, device) -> None:
    inputs = make_inputs(((3, 2, 2, 16, 33), torch.float64, "own", True), device)
    torch.testing.assert_close(medusa_project(*inputs).cpu(), head_by_head(*doubled(inputs)))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_topk_matches_exact(case, backend, device) -> None:
    inputs, k = make_inputs(case, device), min(10, case[0][-1])
    values, ids, lse = (t.cpu() for t in medusa_project_topk(*inputs, k))
    exact = head_by_head(*doubled(inputs))
    baseline = head_by_head(*(t if t is None else t.cpu() for t in inputs)).float()
    assert (values.dtype, ids.dtype, lse.dtype) == (FP32, torch.int64, FP32)
    assert (values.diff(dim=-1) <= 0).all()
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    # The value belongs to the id, and is as large as the exact k-th largest: near-ties may swap ids.
    assert_close_to_baseline(values.to(case[1]), exact.gather(-1, ids), baseline.gather(-1, ids))
    top = exact.topk(k).values
    assert_close_to_baseline(values.to(case[1]), top, baseline.topk(k).values)
    assert_close_to_baseline(lse, exact.logsumexp(-1), baseline.logsumexp(-1))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_base_row_comes_first(dtype, backend, device) -> None:
    """It is a head without layers, before the others."""

    def law(hidden, w_res, b_res, w_out):
        base = head_by_head(hidden, w_res[:1, :0], b_res, w_out)
        return torch.cat([base, head_by_head(hidden, w_res, b_res, w_out)], dim=1)

    inputs = make_inputs(((3, 2, 1, 48, 131), dtype, "shared", True), device)
    logits = medusa_project(*inputs, include_base=True).cpu()
    exact, baseline = law(*doubled(inputs)), law(*(t.cpu() for t in inputs))
    assert_close_to_baseline(logits, exact, baseline)
    values, ids, lse = (t.cpu() for t in medusa_project_topk(*inputs, 5, include_base=True))
    assert_close_to_baseline(values.to(dtype), exact.gather(-1, ids), baseline.gather(-1, ids))
    assert_close_to_baseline(values.to(dtype), exact.topk(5).values, baseline.topk(5).values)
    assert_close_to_baseline(lse, exact.logsumexp(-1), baseline.float().logsumexp(-1))


@pytest.mark.parametrize("base", [False, True], ids=["heads", "base"])
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5], CASES[6]], ids=case_id)
def test_root_comes_before_the_heads(case, base, backend, device) -> None:
    """Their first block sees it; the base row does not."""

    def law(inputs, root):
        logits = head_by_head(with_root(inputs[0], *root), *inputs[1:])
        rows = head_by_head(inputs[0], inputs[1][:1, :0], None, inputs[3]) if base else logits[:, :0]
        return torch.cat([rows, logits], dim=1)

    base = base and case[2] == "shared"
    inputs, root = make_inputs(case, device), make_root(case, device)
    options = {"include_base": base, **root}
    exact = law(doubled(inputs), doubled(root.values()))
    baseline = law([t if t is None else t.cpu() for t in inputs], doubled(root.values(), case[1]))
    assert_close_to_baseline(medusa_project(*inputs, **options).cpu(), exact, baseline)
    k = min(5, case[0][-1])
    values, ids, lse = (t.cpu() for t in medusa_project_topk(*inputs, k, **options))
    assert_close_to_baseline(values.to(case[1]), exact.gather(-1, ids), baseline.gather(-1, ids))
    assert_close_to_baseline(values.to(case[1]), exact.topk(k).values, baseline.topk(k).values)
    assert_close_to_baseline(lse, exact.logsumexp(-1), baseline.float().logsumexp(-1))


@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_opcheck(projection, bias, backend, device) -> None:
    case = ((2, 3, 2, 16, 20), FP32, projection, bias)
    hidden, w_res, b_res, w_out = make_inputs(case, device)
    torch.library.opcheck(ops.medusa_project.default, (hidden, w_res, b_res, w_out), make_root(case, device))
    vocab_map = torch.randperm(20, device=device) if bias else None
    args = (hidden, w_res, b_res, w_out, 5)
    options = {"vocab_map": vocab_map, **make_root(case, device)}
    torch.library.opcheck(ops.medusa_project_topk.default, args, {"vocab_map": vocab_map})
    torch.library.opcheck(ops.medusa_project_topk.default, args, options)
    if projection == "shared":
        torch.library.opcheck(ops.medusa_project.default, args[:4], {"include_base": True})
        torch.library.opcheck(ops.medusa_project_topk.default, args, {"vocab_map": None, "include_base": True})


def test_compiles(backend, device) -> None:
    def step(hidden, w_res, b_res, w_out, **root):
        logits = medusa_project(hidden * 1, w_res, b_res, w_out, **root)
        return logits, *medusa_project_topk(hidden, w_res, b_res, w_out, 4, **root)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in (2, 5):  # the second call compiles with dynamic shapes
        case = ((batch, 2, 1, 16, 20), FP32, "own", True)
        inputs, root = make_inputs(case, device), make_root(case, device)
        torch.testing.assert_close(compiled(*inputs, **root), step(*inputs, **root), rtol=0, atol=0)


def test_exports(backend, device) -> None:
    class Step(torch.nn.Module):
        def forward(self, hidden, w_res, b_res, w_out, vocab_map):
            return medusa_project_topk(hidden, w_res, b_res, w_out, 4, vocab_map=vocab_map)

    args = (*make_inputs(((2, 2, 1, 16, 20), FP32, "shared", True), device), torch.randperm(20, device=device))
    program = torch.export.export(Step(), args)
    assert "specdec_kernels.medusa_project_topk" in program.graph_module.code
    torch.testing.assert_close(program.module()(*args), Step()(*args), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph() -> None:
    case = ((4, 3, 1, 64, 1000), BF16, "shared", True)
    inputs, root = make_inputs(case, "cuda"), make_root(case, "cuda")
    medusa_project_topk(*inputs, 10, **root)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, top = medusa_project(*inputs), medusa_project_topk(*inputs, 10, **root)
    inputs[0].neg_()  # replay with another input
    graph.replay()
    torch.testing.assert_close((logits, top), (medusa_project(*inputs), medusa_project_topk(*inputs, 10, **root)))


GOOD = make_inputs(((2, 3, 1, 16, 20), FP32, "own", True))
ROOT = make_root(((2, 3, 1, 16, 20), FP32, "own", True))
# What is changed in a valid call -> the error.
REJECTED = [
    ({"hidden": None}, TypeError, "hidden must be a torch.Tensor, got NoneType"),
    ({"hidden": GOOD[0][None]}, ValueError, r"hidden must have shape \(B, C\), got \(1, 2, 16\)"),
    ({"hidden": GOOD[0].long()}, TypeError, "hidden must be float16 or .*, got int64"),
    ({"hidden": GOOD[0].clone().requires_grad_()}, RuntimeError, "hidden requires grad"),
    ({"hidden": GOOD[0].mT.contiguous().mT}, ValueError, "hidden must have stride 1 in its last dimension"),
    ({"w_res": GOOD[1][..., :8]}, ValueError, r"w_res must have shape \(M, R, 16, 16\), got \(3, 1, 16, 8\)"),
    ({"w_res": GOOD[1].double()}, TypeError, "w_res must be float32, got float64"),
    ({"w_res": GOOD[1][:0], "w_out": GOOD[3][:0], "b_res": None}, ValueError, "w_res and w_out must not be empty"),
    ({"b_res": GOOD[2][:2]}, ValueError, r"b_res must have shape \(3, 1, 16\), got \(2, 1, 16\)"),
    ({"b_res": GOOD[2].to("meta")}, ValueError, "b_res must be on cpu, got meta"),
    ({"w_out": [1]}, TypeError, "w_out must be a torch.Tensor, got list"),
    ({"w_out": GOOD[3][:2]}, ValueError, r"w_out must have shape \(3, V, 16\), got \(2, 20, 16\)"),
    ({"w_out": GOOD[3][0][:, :9]}, ValueError, r"w_out must have shape \(V, 16\), got \(20, 9\)"),
    ({"w_out": GOOD[3][0, 0]}, ValueError, r"w_out must have shape \(V, 16\), got \(16,\)"),
    ({"w_out": GOOD[3][:, :0]}, ValueError, "w_res and w_out must not be empty"),
    ({"w_out": torch.nn.Parameter(GOOD[3])}, RuntimeError, "w_out requires grad"),
    ({"root": ROOT["root"]}, ValueError, "root and w_root must be given together"),
    ({"b_root": ROOT["b_root"]}, ValueError, "root and w_root must be given together"),
    (ROOT | {"root": ROOT["root"][:1]}, ValueError, r"root must have shape \(2, 16\), got \(1, 16\)"),
    (ROOT | {"w_root": GOOD[1][0, 0]}, ValueError, r"w_root must have shape \(16, 32\), got \(16, 16\)"),
    (ROOT | {"w_root": ROOT["w_root"].mT.contiguous().mT}, ValueError, "w_root must have stride 1 in its last"),
    (ROOT | {"b_root": ROOT["b_root"].double()}, TypeError, "b_root must be float32, got float64"),
    (ROOT | {"w_root": torch.nn.Parameter(ROOT["w_root"])}, RuntimeError, "w_root requires grad"),
    ({"include_base": 1}, TypeError, "include_base must be a bool, got int"),
    ({"include_base": True}, ValueError, r"include_base must be False with own projections, got w_out \(3, 20, 16\)"),
]
TOPK_REJECTED = [
    ({"k": 0}, ValueError, r"k must be in \[1, 20\], got 0"),
    ({"k": 21}, ValueError, r"k must be in \[1, 20\], got 21"),
    ({"k": 65, "w_out": torch.zeros(100, 16)}, ValueError, r"k must be in \[1, 64\], got 65"),
    ({"vocab_map": torch.arange(19)}, ValueError, r"vocab_map must have shape \(20,\), got \(19,\)"),
    ({"vocab_map": torch.arange(20).int()}, TypeError, "vocab_map must be int64, got int32"),
    ({"vocab_map": torch.arange(20).to("meta")}, ValueError, "vocab_map must be on cpu, got meta"),
]
ARGUMENTS = dict(zip(("hidden", "w_res", "b_res", "w_out"), GOOD, strict=True))


def identity(value) -> str | None:
    return "-".join(value) if isinstance(value, dict) else None


@pytest.mark.parametrize(("changes", "error", "message"), REJECTED, ids=identity)
def test_rejects(changes, error, message) -> None:
    with pytest.raises(error, match=f"^medusa_project: {message}"):
        medusa_project(**(ARGUMENTS | changes))


@pytest.mark.parametrize(("changes", "error", "message"), REJECTED + TOPK_REJECTED, ids=identity)
def test_topk_rejects(changes, error, message) -> None:
    with pytest.raises(error, match=f"^medusa_project_topk: {message}"):
        medusa_project_topk(**(ARGUMENTS | {"k": 5} | changes))


def test_empty_batch(backend, device) -> None:
    inputs = make_inputs(((0, 3, 1, 16, 20), BF16, "own", True), device)
    assert medusa_project(*inputs).shape == (0, 3, 20)
    assert [t.shape for t in medusa_project_topk(*inputs, 4)] == [(0, 3, 4), (0, 3, 4), (0, 3)]


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_weights_are_never_widened(projection) -> None:
    """A large half-precision projection is used as it is: no fp32 temporary of its size appears."""
    widest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal widest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.dtype == FP32:
                    widest = max(widest, tensor.numel())
            return out

    inputs = make_inputs(((2, 4, 1, 64, 20_000), BF16, projection, True))
    with Watch():
        medusa_project_topk_ref(*inputs, 10)
    assert 0 < widest <= 2 * 4 * 20_000


def test_docstrings() -> None:
    assert doctest.testmod(op_module).failed == 0
