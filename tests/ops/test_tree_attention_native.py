"""The native CPU kernel on every instruction set of this machine: exact over the option grid, safe when misused."""

import math

import pytest
import torch

from specdec_kernels import _native, paged_tree_attention, tree_attention
from specdec_kernels._ops import ops
from specdec_kernels.reference.tree_attention import tree_attention_ref
from specdec_kernels.testing import assert_close_to_baseline
from specdec_kernels.tree import mask_from_parents
from tests.kernels.pairwise import pairwise

from ..marks import needs_native
from .attention_cases import Case, chain, check, exact, int32, make_case, plain_torch
from .conftest import levels, limited_isa
from .test_tree_attention_paged import page_case

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
NO_OPTIONS = {"scale": None, "softcap": None, "window": None, "sinks": None, "k_scale": None, "v_scale": None}
pytestmark = needs_native

GRID = pairwise(
    {
        "dtype": [FP32, BF16, FP16, FP64],
        "dims": [(64, 64), (128, 128), (80, 112), (40, 17), (192, 128), (1, 256)],
        "heads": [(8, 2), (3, 3), (7, 1), (26, 2)],
        "prefix": [(0, 5), (64, 63), (131, 530)],
        "nodes": [1, 6, 33, 65],
        "options": ["none", "softcap", "window", "sinks", "all"],
        "layout": ["bhsd", "gaps", "paged"],
        "cache": ["same", "float8", "int8"],
    }
)


def grid_id(row: dict) -> str:
    return "-".join(str(value).removeprefix("torch.").replace(" ", "") for value in row.values())


def make_options(row: dict, heads: tuple[int, int]) -> dict:
    sinks = torch.randn(heads[0], dtype=FP16)
    options = {
        "none": {},
        "softcap": {"softcap": 5.0},
        "window": {"window": 37},
        "sinks": {"sinks": sinks},
        "all": {"softcap": 2.0, "window": 70, "sinks": sinks, "scale": 0.4},
    }[row["options"]]
    if row["cache"] != "same":
        options |= {"k_scale": torch.rand(heads[1]) * 0.05, "v_scale": torch.rand((), dtype=FP64) * 0.05}
    return options


@pytest.mark.parametrize("row", GRID, ids=grid_id)
def test_grid(row) -> None:
    """All instruction sets in one test: the exact answer is what takes long."""
    heads, layout = row["heads"], row["layout"]
    options = make_options(row, heads)
    memory = "bhsd" if layout == "paged" else layout
    case = make_case(2, row["prefix"], row["nodes"], heads, row["dims"], row["dtype"], memory, trees=2, **options)
    if row["cache"] != "same":
        stored = torch.float8_e4m3fn if row["cache"] == "float8" else torch.int8
        case.k, case.v = ((x * 20).to(stored) for x in (case.k, case.v))
    op, args = tree_attention, case.args()
    if layout == "paged":
        op, args = paged_tree_attention, page_case(case, 24, "hnd", garbage=100.0)
    exact_result, baseline = exact(case), plain_torch(case)
    for level in levels():
        with limited_isa(level):
            result = op(*args, **options)
        for have, want, plain in zip(result, exact_result, baseline, strict=True):
            assert_close_to_baseline(have, want, plain)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_every_float8_value(dtype, isa) -> None:
    """One key each, so the output is the value: exact, subnormal and NaN ones, too."""
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    v = stored.view(256, 1, 1, 1)
    out, _ = tree_attention(
        torch.zeros(256, 1, 1, 1, dtype=dtype), v, v, torch.ones(1, 1, 1, dtype=torch.int64), int32(*[0] * 256)
    )
    torch.testing.assert_close(out.flatten(), stored.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_every_16_bit_value(dtype, isa) -> None:
    """Conversions on the way in and out round nothing that is representable."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    values = patterns.view(BF16 if dtype == BF16 else FP16).to(dtype)
    is_subnormal = (values.abs() < torch.finfo(dtype).tiny) & (values != 0)
    values = values.masked_fill(is_subnormal, 0)  # dpbf16 takes them as zero
    v = values.view(-1, 1, 1, 1)
    count = len(values)
    q = torch.zeros_like(v)
    out, _ = tree_attention(q, q, v, torch.ones(1, 1, 1, dtype=torch.int64), torch.zeros(count, dtype=torch.int32))
    torch.testing.assert_close(out.flatten(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, -30.0, 1000.0])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=["fp32", "bf16", "fp64"])
def test_weights_far_apart(dtype, scale, isa) -> None:
    """A rising and a falling staircase of scores: the maximum grows at every chunk, or never after the first."""
    for sign in (1, -1):
        case = make_case(1, (300,), 3, (2, 1), (16, 16), dtype, scale=scale)
        case.k = torch.zeros_like(case.k)
        case.k[..., 0] = (sign * torch.linspace(0, 3, case.k.shape[1]))[None, :, None]
        check(case, tree_attention(*case.args(), scale=scale))


def test_weights_below_a_float(isa) -> None:
    """Keys 1e30 below the largest have weight 0, whatever their values; -inf scores too."""
    q, k, v = torch.ones(1, 1, 1, 8), torch.zeros(1, 9, 1, 8), torch.zeros(1, 9, 1, 8)
    k[0, :4], v[0, :4] = -1e30, 1e30
    k[0, 4:8], v[0, 4:8] = -math.inf, 1.0
    v[0, 8] = 2.0
    out, lse = tree_attention(q, k, v, torch.ones(1, 1, 1, dtype=torch.int64), int32(8))
    assert (out == 2.0).all()
    assert (lse == 0.0).all()


def test_forest_and_stray_bits() -> None:
    """Several roots, gaps between nodes, and bits beyond T are taken as they are: bits name keys, in their order."""
    case = make_case(1, (70,), 6, (2, 1), (32, 32), FP64)
    bits = [0b000001, 0b000010, 0, 0b001010, 0b010001, 0b111010]
    stray = (1 << 62) + (1 << 40)
    mask = torch.tensor([[[b + stray] for b in bits]])
    out, lse = tree_attention(case.q, case.k, case.v, mask, int32(70))
    for node, row in enumerate(bits):
        keys = [*range(70), *(70 + j for j in range(6) if row >> j & 1)]
        if row == 0:
            assert (out[0, node] == 0).all()
            assert (lse[0, node] == -math.inf).all()
            continue
        scores = torch.einsum("hd,kd->hk", case.q[0, node], case.k[0, keys, 0]) * 32**-0.5
        torch.testing.assert_close(out[0, node], scores.softmax(-1) @ case.v[0, keys, 0])
        torch.testing.assert_close(lse[0, node], scores.logsumexp(-1))


def test_a_thousand_nodes(isa) -> None:
    case = make_case(1, (3,), 1024, (2, 1), (16, 16), FP32)
    expected = tree_attention_ref(*(x.double() if x.is_floating_point() else x for x in case.args()))
    for have, want in zip(tree_attention(*case.args()), expected, strict=True):
        torch.testing.assert_close(have.double(), want.double(), rtol=1e-5, atol=1e-5)


def test_a_cache_beyond_32_bit_offsets(isa) -> None:
    """Rows 2^31 elements apart, in memory that is never touched between them."""
    k = torch.empty(2**31 + 4096, dtype=torch.int8).as_strided((1, 2, 1, 16), (0, 2**31, 16, 1))
    k[0, 0], k[0, 1] = 1, 2
    v = k.clone()
    q = torch.ones(1, 1, 1, 16)
    expected = tree_attention(q, v, v, torch.ones(1, 1, 1, dtype=torch.int64), int32(1))
    actual = tree_attention(q, k, k, torch.ones(1, 1, 1, dtype=torch.int64), int32(1))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["batch", "page", "head"])
def test_parts_of_a_cache_beyond_32_bit_offsets(what, isa) -> None:
    """The same between rows of the batch, pages and heads."""
    step = {"batch": (2**31, 32, 16, 1), "page": (2**31, 32, 16, 1), "head": (64, 16, 2**31, 1)}[what]
    shape = (1, 3, 2, 16) if what == "head" else (2, 3, 2, 16)
    k = torch.empty(2**31 + 4096, dtype=torch.int8).as_strided(shape, step)
    k.copy_(torch.randint(-9, 9, shape))
    v, rows = k.clone(), shape[0]
    batch = 1 if what == "page" else rows
    q, mask = torch.randn(batch, 1, 4, 16), torch.ones(1, 1, 1, dtype=torch.int64)
    if what == "page":
        table, length = int32(1, 0)[None], int32(4)
        actual, expected = (paged_tree_attention(q, x, x, table, mask, length) for x in (k, v))
    else:
        actual, expected = (tree_attention(q, x, x, mask, int32(2).expand(batch)) for x in (k, v))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


BAD_LENGTHS = [-1, 4, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("length", BAD_LENGTHS)
def test_refuses_lengths_that_python_did_not_see(length) -> None:
    """Compiled graphs skip the checks of values; the kernel must not read out of bounds."""
    case = make_case(1, (3,), 5)
    q, k, v, mask, _ = case.args()
    with pytest.raises(RuntimeError, match=r"prefix_len must be in \[0, 3\], got"):
        ops.tree_attention.default(q, k[:, :8], v[:, :8], mask, int32(length), **NO_OPTIONS)


@pytest.mark.parametrize("page", [-1, 7, 2**31 - 1])
def test_refuses_pages_that_python_did_not_see(page) -> None:
    case = make_case(1, (30,), 5)
    q, k, v, table, mask, prefix_len = page_case(case, 16)
    pages = len(k)
    table[0, 2] = page if page != 7 else pages
    with pytest.raises(RuntimeError, match=rf"block_table must be in \[0, {pages - 1}\], got"):
        ops.paged_tree_attention.default(q, k, v, table, mask, prefix_len, **NO_OPTIONS)
    table[0, 2], table[0, 3:] = 0, page  # beyond what the row needs: never looked at
    ops.paged_tree_attention.default(q, k, v, table, mask, prefix_len, **NO_OPTIONS)


def test_compiled_call_is_guarded() -> None:
    case = make_case(1, (3,), 5)
    q, k, v, mask, _ = case.args()
    step = torch.compile(tree_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises((RuntimeError, ValueError), match="prefix_len"):
        step(q, k, v, mask, int32(k.shape[1]))


def test_levels_can_be_limited() -> None:
    """The limit is real: where products are rounded otherwise, results differ in their last bits."""
    native = _native.native_module()
    if "avx512_bf16" not in native.cpu_isa().split():
        pytest.skip("needs two levels with different arithmetic: a CPU with AVX512-BF16")
    case = make_case(1, (200,), 9, (4, 2), (64, 64), BF16)
    best = tree_attention(*case.args())
    with limited_isa("avx512"):
        limited = tree_attention(*case.args())
    assert not torch.equal(best[1], limited[1])
    assert torch.equal(tree_attention(*case.args())[1], best[1])


def test_long_chain_cuts_into_blocks(isa) -> None:
    """More rows than a task holds: prefill of 300 nodes with 12 heads a group."""
    case = Case(*_prefill(300, 12), [chain(300)], [0])
    out, _ = tree_attention(*case.args())
    k, v = (x.transpose(1, 2).double() for x in (case.k, case.v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q.transpose(1, 2).double(), k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-6)


def _prefill(num_nodes: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(1, num_nodes, group, 16),
        torch.randn(1, num_nodes, 1, 16),
        torch.randn(1, num_nodes, 1, 16),
    )


def test_mask_strides(isa) -> None:
    case = make_case(2, (9, 70), 65, trees=2)
    q, k, v, mask, prefix_len = case.args()
    spread = torch.stack([mask.transpose(0, 2), torch.full_like(mask.transpose(0, 2), -1)], -1)[..., 0].transpose(0, 2)
    assert not spread.is_contiguous()
    expected = tree_attention(q, k, v, mask_from_parents(torch.tensor(case.parents)), prefix_len)
    torch.testing.assert_close(tree_attention(q, k, v, spread, prefix_len), expected, rtol=0, atol=0)
