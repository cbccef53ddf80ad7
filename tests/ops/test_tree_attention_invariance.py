"""The native kernel's promise: a row's bits depend on its query and on the K/V along its path, and on nothing else."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from specdec_kernels import paged_tree_attention, tree_attention
from specdec_kernels.tree import mask_from_parents

from ..marks import needs_native
from .attention_cases import Case, chain, int32, make_case, paths
from .test_tree_attention_paged import page_case

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
Result = tuple[Tensor, Tensor]
pytestmark = needs_native


def assert_same_bits(actual: Result, expected: Result) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} elements differ, by {(a - b).abs().max()}"


def attend(case: Case, **options) -> Result:
    return tree_attention(*case.args(), **case.options, **options)


def committed(case: Case, row: int, path: list[int]) -> Case:
    """Return the plain decode step of a path's last node: its ancestors are in the prefix, and nothing else is left."""
    start = case.prefix[row]
    rows = [*range(start), *(start + node for node in path)]
    k, v = case.k[row : row + 1, rows], case.v[row : row + 1, rows]
    return Case(case.q[row : row + 1, path[-1:]], k, v, [[-1]], [len(rows) - 1], case.options)


def decoded(case: Case, row: int = 0) -> Result:
    """Decode every node by itself, after its path was committed."""
    steps = [attend(committed(case, row, path)) for path in paths(case.tree(row))]
    return torch.cat([out for out, _ in steps], 1), torch.cat([lse for _, lse in steps], 1)


@contextmanager
def threads_limited(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    with threads_limited(request.param):
        yield request.param


# Around 8 rows, the most that take keys unpacked (4 on AVX2), and multiples of tiles of rows.
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 8, 9, 16, 24, 25, 32, 33, 63, 64, 65])
@DTYPES
def test_trees_equal_decoding(num_nodes, dtype, isa) -> None:
    """At every place of a prefix's end within a chunk of 64 keys: before, at and behind each border."""
    prefixes = (0, 1, 63, 64, 65, 127, 128, 129, 200)
    if num_nodes > 16:
        prefixes = (0, 63, 129) if dtype == FP32 else (1, 64, 200)
    case = make_case(len(prefixes), prefixes, num_nodes, (4, 2), (40, 24), dtype, trees=len(prefixes))
    with threads_limited(1):
        out, lse = attend(case)
    with threads_limited(2):
        assert_same_bits(attend(case), (out, lse))
    for row in range(len(prefixes)):
        assert_same_bits((out[row : row + 1], lse[row : row + 1]), decoded(case, row))


STORED = [(FP64, FP64), *itertools.product((BF16, FP16, FP32, FP64), (torch.float8_e4m3fn, torch.int8))]


@pytest.mark.parametrize(("dtype", "cache"), STORED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_other_arithmetic_equals_decoding(dtype, cache, isa) -> None:
    """Of fp64 and of 8-bit caches, at the border of the unpacked keys and behind it."""
    for num_nodes in (3, 4, 8, 9):
        case = make_case(1, (61,), num_nodes, (4, 2), (64, 48), dtype)
        if cache != FP64:
            case.k, case.v = ((x.float() * 20).to(cache) for x in (case.k, case.v))
            case.options |= {"k_scale": torch.rand(2) * 0.05, "v_scale": torch.rand(2) * 0.05}
        assert_same_bits(attend(case), decoded(case))


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (7, 1), (64, 1), (9, 3)], ids=lambda h: f"Hq{h[0]}-Hk{h[1]}")
@DTYPES
def test_group_sizes(heads, dtype, isa) -> None:
    """Rows share tiles with their node's other heads and with other nodes; the tile's rest is smaller."""
    case = make_case(1, (61,), 9, heads, (64, 64), dtype)
    assert_same_bits(attend(case), decoded(case))


@pytest.mark.parametrize("options", [{"window": 5}, {"window": 70}, {"softcap": 3.0}, {"scale": -0.3}, {"sinks": True}])
@DTYPES
def test_options(options, dtype, isa) -> None:
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    case = make_case(1, (123,), 21, (4, 2), (48, 80), dtype, **options)
    assert_same_bits(attend(case), decoded(case))


@DTYPES
def test_chain_equals_decoding(dtype, isa) -> None:
    """A prefill in one step, in chunks, and token by token."""
    case = make_case(1, (0,), 150, (2, 1), (32, 32), dtype)
    case.parents = [chain(150)]
    whole = attend(case)
    assert_same_bits(whole, decoded(case))
    parts = []
    for start in range(0, 150, 37):
        rows = slice(start, min(start + 37, 150))
        q = case.q[:, rows]
        parts.append(attend(Case(q, case.k, case.v, [chain(q.shape[1])], [start])))
    assert_same_bits(tuple(torch.cat(part, 1) for part in zip(*parts, strict=True)), whole)


def test_deep_tree_equals_decoding(isa) -> None:
    """Branches that are longer than a chunk, from a common stem that is longer than one, too."""
    parents = [
        *chain(80),
        *(79 if i == 0 else 79 + i for i in range(70)),
        *(40 if i == 0 else 149 + i for i in range(90)),
    ]
    case = make_case(1, (30,), len(parents), (2, 1), (16, 16), BF16)
    case.parents = [parents]
    assert_same_bits(attend(case), decoded(case))


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [((1500, 700), 33, (4, 2)), ((2600,), 1, (8, 1)), ((1100,), 5, (6, 3)), ((0,), 200, (4, 1))],
    ids=["rows", "split", "split-three-heads", "blocks"],
)
def test_threads_do_not_matter(shape, dtype) -> None:
    """Two threads cut the work otherwise: by rows, by key groups, or not at all."""
    prefixes, num_nodes, heads = shape
    case = make_case(len(prefixes), prefixes, num_nodes, heads, (128, 128), dtype, trees=len(prefixes))
    results = []
    for count in (1, 2, 3, 7):
        with threads_limited(count):
            results.append(attend(case))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@DTYPES
def test_many_groups_equal_decoding(dtype, threads, isa) -> None:
    """A long prefix, where the groups of keys are merged, at the border of a group."""
    case = make_case(1, (1022,), 5, (4, 1), (64, 64), dtype)
    case.parents = [[-1, 0, 1, 0, 3]]
    assert_same_bits(attend(case), decoded(case))


@DTYPES
def test_slots_do_not_matter(dtype) -> None:
    """Another topological order of the same tree, with padding between, in a batch of other requests."""
    case = make_case(3, (130, 64, 7), 8, (4, 2), (64, 64), dtype, trees=3)
    case.parents[1] = [-1, 0, 0, 1, 2, 1, 3, 4]
    alone = attend(case.row(1))
    order = [0, 2, 4, 1, 5, 3, 7, 6]  # new place -> old node
    places = [0, 2, 3, 4, 6, 7, 8, 10]  # where they go among 11 nodes
    mask = torch.zeros(3, 11, 1, dtype=torch.int64)
    q, k, v = torch.randn(3, 11, 4, 64).to(dtype), case.k.clone(), case.v.clone()
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 8)) for x in (k, v))
    k[1, 64:], v[1, 64:] = float("nan"), float("inf")
    where = dict(zip(order, places, strict=True))
    for node, path in enumerate(paths(case.parents[1])):
        place = where[node]
        mask[1, place, 0] = sum(1 << where[member] for member in path)
        q[1, place], k[1, 64 + place], v[1, 64 + place] = case.q[1, node], case.k[1, 64 + node], case.v[1, 64 + node]
    out, lse = tree_attention(q, k, v, mask, int32(130, 64, 7))
    nodes = [where[node] for node in range(8)]
    assert_same_bits((out[1:2, nodes], lse[1:2, nodes]), alone)


@DTYPES
@pytest.mark.parametrize("layout", ["bshd", "gaps"])
def test_layouts_do_not_matter(layout, dtype, isa) -> None:
    case = make_case(2, (70, 3), 9, (4, 2), (80, 80), dtype)
    expected = attend(case)
    k, v = case.k.contiguous(), case.v.contiguous()
    if layout == "gaps":
        k, v = (torch.nn.functional.pad(x, (1, 2, 0, 1))[:, :, :2, 1:-2] for x in (k, v))
    assert_same_bits(attend(Case(case.q.contiguous(), k, v, case.parents, case.prefix)), expected)


@pytest.mark.parametrize("page_size", [1, 16, 48, 256])
@DTYPES
def test_pages_do_not_matter(page_size, dtype, isa) -> None:
    case = make_case(2, (130, 3), 9, (4, 2), (64, 64), dtype, trees=2)
    assert_same_bits(paged_tree_attention(*page_case(case, page_size, "hnd")), attend(case))


@DTYPES
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 2.0}], ids=["plain", "window", "softcap"])
def test_other_nodes_may_be_nan(options, dtype, isa) -> None:
    """Neither a sibling's nor a descendant's K/V reaches a row, whatever it is, nor does what a window leaves out."""
    case = make_case(1, (67,), 17, (3, 1), (40, 40), dtype, **options)
    case.parents = [[-1, 0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 1, 12, 13, 13, 8]]
    clean_out, clean_lse = attend(case)
    for node in range(1, 17):
        k, v = case.k.clone(), case.v.clone()
        k[:, 67 + node], v[:, 67 + node] = float("inf"), float("nan")
        out, lse = attend(Case(case.q, k, v, case.parents, case.prefix, options))
        others = [i for i, path in enumerate(paths(case.parents[0])) if node not in path]
        assert_same_bits((out[:, others], lse[:, others]), (clean_out[:, others], clean_lse[:, others]))
        assert out[0, node].isnan().all()
    if "window" in options:
        seen = [i for i, path in enumerate(paths(case.parents[0])) if len(path) > 3]
        k, v = case.k.clone(), case.v.clone()
        k[:, :65], v[:, :65] = float("nan"), float("nan")  # positions 65 and up are what depth 3 sees
        out, lse = attend(Case(case.q, k, v, case.parents, case.prefix, options))
        assert_same_bits((out[:, seen], lse[:, seen]), (clean_out[:, seen], clean_lse[:, seen]))


def test_shared_mask_equals_own_masks() -> None:
    case = make_case(3, (5, 64, 100), 33, dtype=BF16)
    mask = mask_from_parents(torch.tensor(case.parents)).expand(3, -1, -1).contiguous()
    q, k, v, _, prefix_len = case.args()
    assert_same_bits(attend(case), tree_attention(q, k, v, mask, prefix_len))
