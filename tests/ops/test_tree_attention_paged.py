"""`paged_tree_attention`: equal to the contiguous op through any page table, and the six of every op."""

import math

import pytest
import torch
from torch import Tensor

from specdec_kernels import paged_tree_attention, tree_attention
from specdec_kernels._ops import ops

from .attention_cases import check, make_case

FP32, BF16 = torch.float32, torch.bfloat16


def paged(cache: Tensor, page_size: int, needed: list[int], layout: str, garbage: float) -> tuple[Tensor, Tensor]:
    """Scatter a contiguous cache into shuffled pages; return them and the table.

    Pages that no row needs hold garbage, and so does the table beyond the needed pages.
    """
    batch, _, num_heads, dim = cache.shape
    num_pages = [-(-length // page_size) for length in needed]
    order = torch.randperm(sum(num_pages) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    shape = (len(order), num_heads, page_size, dim) if layout == "hnd" else (len(order), page_size, num_heads, dim)
    pages = torch.full(shape, garbage).to(cache.dtype)
    if layout == "hnd":
        pages = pages.transpose(1, 2)
    table = torch.full((batch, max(num_pages, default=0) + 2), -1, dtype=torch.int32)
    for row in range(batch):
        for index in range(num_pages[row]):
            page = order.pop()
            table[row, index] = page
            rows = cache[row, index * page_size : (index + 1) * page_size]
            pages[page, : len(rows)] = rows
    return pages, table


def page_case(case, page_size: int, layout: str = "nhd", garbage: float = math.nan) -> tuple[Tensor, ...]:
    """Return the arguments of the paged op that mean the same as a contiguous case."""
    needed = [length + case.q.shape[1] for length in case.prefix]
    k, table = paged(case.k, page_size, needed, layout, garbage)
    v, _ = paged(case.v, page_size, needed, layout, garbage)
    q, _, _, mask, prefix_len = case.args()
    return q, k, v, table, mask, prefix_len


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "window": 6}], ids=["plain", "options"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_equals_contiguous(page_size, layout, options, backend, device) -> None:
    """Trees cross page borders, and prefixes end before, at and behind one."""
    case = make_case(4, (15, 64, 0, 37), 17, (4, 2), (16, 16), torch.float64, trees=4)
    actual = paged_tree_attention(*(x.to(device) for x in page_case(case, page_size, layout)), **options)
    expected = tree_attention(*(x.to(device) for x in case.args()), **options)
    torch.testing.assert_close(actual, expected)


# (prefix of each row, T, (Hq, Hk), (D, Dv), dtype, page), and why.
CASES = [
    ((5, 1, 9), 7, (6, 2), (16, 16), FP32, 4),
    ((0,), 1, (1, 1), (8, 8), BF16, 16),
    ((33, 100), 65, (9, 3), (64, 64), BF16, 16),  # two mask words, the demo model's heads
    ((50, 3), 33, (4, 2), (192, 128), torch.float16, 64),  # values narrower than keys
]


@pytest.mark.parametrize("shape", CASES, ids=lambda s: f"B{len(s[0])}-T{s[1]}-Hq{s[2][0]}-D{s[3][0]}-page{s[5]}")
def test_matches_exact(shape, backend, device) -> None:
    *sizes, page_size = shape
    case = make_case(len(sizes[0]), *sizes, trees=len(sizes[0]))
    check(case, paged_tree_attention(*(x.to(device) for x in page_case(case, page_size))))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
def test_quantised_pages_with_sinks(dtype, backend, device) -> None:
    scales = {"k_scale": torch.rand(2) * 0.05, "v_scale": torch.rand(()) * 0.05}
    case = make_case(2, (13, 5), 9, (4, 2), (32, 32), BF16, sinks=torch.randn(4), **scales)
    case.k, case.v = ((x * 20).to(dtype) for x in (case.k, case.v))
    args = page_case(case, 8, garbage=100.0)
    options = {name: x.to(device) for name, x in case.options.items()}
    check(case, paged_tree_attention(*(x.to(device) for x in args), **options))


@pytest.mark.parametrize("garbage", [-1, -(2**31), 2**31 - 1])
def test_table_beyond_the_needed_pages_is_not_read(garbage, backend, device) -> None:
    case = make_case(2, (30, 3), 5)  # the second row ends with its page
    q, k, v, table, mask, prefix_len = page_case(case, 8)
    expected = paged_tree_attention(*(x.to(device) for x in (q, k, v, table.clamp(min=0), mask, prefix_len)))
    table[table < 0] = garbage
    actual = paged_tree_attention(*(x.to(device) for x in (q, k, v, table, mask, prefix_len)))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_rows_may_share_pages(backend, device) -> None:
    """A common prefix stored once."""
    case = make_case(2, (16, 16), 3, dtype=torch.float64)
    case.k[1, :16], case.v[1, :16] = case.k[0, :16], case.v[0, :16]
    q, k, v, table, mask, prefix_len = page_case(case, 8)
    table[1, :2] = table[0, :2]
    actual = paged_tree_attention(*(x.to(device) for x in (q, k, v, table, mask, prefix_len)))
    torch.testing.assert_close(actual, tree_attention(*(x.to(device) for x in case.args())))


def test_empty_batch(backend, device) -> None:
    args = (torch.zeros(0, 5, 4, 16), torch.zeros(3, 8, 2, 16), torch.zeros(3, 8, 2, 24))
    tables = (torch.zeros(0, 2, dtype=torch.int32), torch.ones(1, 5, 1, dtype=torch.int64), torch.zeros(0).int())
    out, lse = paged_tree_attention(*(x.to(device) for x in (*args, *tables)))
    assert out.shape == (0, 5, 4, 24)
    assert lse.shape == (0, 5, 4)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_opcheck(layout, backend, device) -> None:
    args = page_case(make_case(2, nodes=5), 8, layout, garbage=0.0)
    options = {"scale": 0.3, "softcap": None, "window": 4, "sinks": torch.randn(4, device=device)}
    options |= {"k_scale": None, "v_scale": torch.ones((), device=device)}
    torch.library.opcheck(ops.paged_tree_attention.default, tuple(x.to(device) for x in args), options)


def test_compiles_and_exports(backend, device) -> None:
    class Step(torch.nn.Module):
        def forward(self, q, *rest):
            return paged_tree_attention(q * 1, *rest, softcap=2.0)

    args = tuple(x.to(device) for x in page_case(make_case(2, nodes=5), 8, "hnd"))
    expected = Step()(*args)
    compiled = torch.compile(Step(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), expected, rtol=0, atol=0)
    torch.testing.assert_close(torch.export.export(Step(), args).module()(*args), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph() -> None:
    q, k, v, table, mask, prefix_len = (x.cuda() for x in page_case(make_case(2, (30, 20), 9), 8))
    paged_tree_attention(q, k, v, table, mask, prefix_len)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = paged_tree_attention(q, k, v, table, mask, prefix_len)
    prefix_len -= 11  # replay with another length
    graph.replay()
    torch.testing.assert_close((out, lse), paged_tree_attention(q, k, v, table, mask, prefix_len), rtol=0, atol=0)
