"""`tree_attention`: the six of every op, over shapes, dtypes, layouts and options."""

import doctest

import pytest
import torch

import specdec_kernels.ops.tree_attention as op_module
from specdec_kernels import tree_attention
from specdec_kernels._ops import ops
from specdec_kernels.reference.tree_attention import tree_attention_ref

from .attention_cases import Case, chain, check, make_case, to

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# (prefix of each row, T, (Hq, Hk), (D, Dv), dtype, layout), and why.
CASES = [
    ((5, 1, 9), 7, (6, 2), (16, 16), FP32, "bhsd"),  # ragged rows, primes
    ((0,), 1, (1, 1), (8, 8), FP32, "bshd"),  # nothing but the root
    ((0, 3), 5, (4, 4), (24, 24), BF16, "gaps"),  # no grouping, an empty prefix beside another
    ((17,), 31, (4, 1), (16, 16), FP16, "bhsd"),  # one KV head; mask word edges from here
    ((33, 2), 32, (6, 3), (64, 64), BF16, "bshd"),
    ((33,), 17, (9, 3), (64, 64), BF16, "bhsd"),  # the demo model's heads; a mask that ends in the middle of a tile
    ((1,), 33, (4, 2), (80, 80), FP32, "gaps"),
    ((100, 7), 63, (4, 2), (16, 16), FP32, "bhsd"),
    ((64,), 64, (8, 2), (96, 96), BF16, "bhsd"),
    ((13, 40), 65, (4, 2), (16, 16), FP16, "bshd"),  # two words
    ((3,), 130, (2, 1), (16, 16), FP32, "bhsd"),  # three words
    ((777,), 26, (8, 2), (128, 128), BF16, "bhsd"),
    ((50,), 6, (4, 2), (192, 128), FP32, "bshd"),  # values narrower than keys
    ((50, 3), 6, (4, 2), (192, 128), BF16, "bhsd"),
    ((21,), 9, (2, 2), (256, 256), BF16, "bhsd"),
    ((11, 4), 8, (16, 1), (112, 112), FP64, "gaps"),
]


def case_id(case) -> str:
    prefix, nodes, heads, dims, dtype, layout = case
    size = f"B{len(prefix)}-P{max(prefix)}-T{nodes}-Hq{heads[0]}-Hk{heads[1]}-D{dims[0]}"
    return f"{size}-{'' if dims[0] == dims[1] else f'Dv{dims[1]}-'}{str(dtype)[6:]}-{layout}"


def draw(case, **options) -> Case:
    prefix, nodes, heads, dims, dtype, layout = case
    return make_case(len(prefix), prefix, nodes, heads, dims, dtype, layout, trees=len(prefix), **options)


@pytest.mark.parametrize("shape", CASES, ids=case_id)
def test_matches_exact(shape, backend, device) -> None:
    case = draw(shape)
    check(case, tree_attention(*(x.to(device) for x in case.args())))


OPTIONS = {
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 0.7},
    "window-1": {"window": 1},
    "window-prime": {"window": 7},
    "window-beyond": {"window": 10**6},
    "sinks": {"sinks": True},
    "softcap-sinks": {"softcap": 5.0, "sinks": True},
    "window-sinks": {"window": 3, "sinks": True},
    "all": {"scale": 1.3, "softcap": 2.0, "window": 5, "sinks": True},
}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dims", [(16, 16), (16, 24)], ids=["D", "D-Dv"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, dims, dtype, backend, device) -> None:
    options = options | ({"sinks": torch.randn(6)} if "sinks" in options else {})
    case = make_case(2, (20, 0), 19, (6, 2), dims, dtype, trees=2, **options)
    tensors = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    check(case, tree_attention(*(x.to(device) for x in case.args()), **tensors))


@pytest.mark.parametrize("scale", ["none", "scalar", "head"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
def test_quantised_cache(dtype, scale, backend, device) -> None:
    if scale == "none":
        scales = {}
    else:
        make = (lambda: torch.rand(()) * 0.05) if scale == "scalar" else (lambda: torch.rand(3) * 0.05)
        scales = {"k_scale": make(), "v_scale": make()}
    case = make_case(2, (13, 5), 9, (6, 3), (32, 32), BF16, **scales)
    case.k, case.v = ((x * (20 if scales else 1)).to(dtype) for x in (case.k, case.v))
    check(case, tree_attention(*(x.to(device) for x in case.args()), **{n: x.to(device) for n, x in scales.items()}))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "window": 4}], ids=["plain", "options"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "gaps"])
def test_opcheck(layout, options, backend, device) -> None:
    case = to(make_case(2, nodes=5, layout=layout, sinks=None, **options), device)
    options = {"scale": None, "softcap": None, "window": None} | options
    options |= {"sinks": torch.randn(4, device=device), "k_scale": None, "v_scale": None}
    torch.library.opcheck(ops.tree_attention.default, case.args(), options)


def test_compiles(backend, device) -> None:
    def step(q, k, v, mask, prefix_len, sinks):
        return tree_attention(q * 1, k, v, mask, prefix_len, softcap=2.0, sinks=sinks)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for nodes in (5, 9):  # the second call compiles with dynamic shapes
        case, sinks = to(make_case(2, nodes=nodes), device), torch.randn(4, device=device)
        torch.testing.assert_close(compiled(*case.args(), sinks), step(*case.args(), sinks), rtol=0, atol=0)


def test_exports(backend, device) -> None:
    class Step(torch.nn.Module):
        def forward(self, q, k, v, mask, prefix_len):
            return tree_attention(q, k, v, mask, prefix_len, window=3)

    case = to(make_case(2, nodes=5), device)
    program = torch.export.export(Step(), case.args())
    assert "specdec_kernels.tree_attention" in program.graph_module.code
    torch.testing.assert_close(program.module()(*case.args()), Step()(*case.args()), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph() -> None:
    case = to(make_case(2, nodes=9, window=6), "cuda")
    q, k, v, mask, prefix_len = case.args()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tree_attention(q, k, v, mask, prefix_len, window=6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tree_attention(q, k, v, mask, prefix_len, window=6)
    for lengths in ((34, 29), (0, 5), (2, 0)):  # replay with other lengths, back to back
        prefix_len.copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close((out, lse), tree_attention(q, k, v, mask, prefix_len, window=6), rtol=0, atol=0)


def test_long_chain_is_causal_attention(backend, device) -> None:
    """Prefill: a chain of many words, compared with torch's own causal mask."""
    case = make_case(1, (0,), 300, (4, 2), (16, 16))
    case.parents = [chain(300)]
    out, _ = tree_attention(*(x.to(device) for x in case.args()))
    q, k, v = (x[:, :300].transpose(1, 2).double() for x in (case.q, case.k, case.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out.cpu().double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_reference_blocks_agree(monkeypatch) -> None:
    """Problems too large for one block are cut by batch rows and nodes; here every cut is forced."""
    case = make_case(3, (9, 2, 30), 33, dtype=FP64, trees=3)
    whole = tree_attention_ref(*case.args(), window=8)
    for elements in (1, 600, 5000):
        monkeypatch.setattr("specdec_kernels.reference.tree_attention._BLOCK_ELEMENTS", elements)
        torch.testing.assert_close(tree_attention_ref(*case.args(), window=8), whole)


def test_docstrings() -> None:
    assert doctest.testmod(op_module).failed == 0
