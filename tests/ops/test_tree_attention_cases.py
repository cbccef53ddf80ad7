"""`tree_attention`: what went wrong elsewhere. Exact visible sets, ragged batches, poison, extremes."""

import math

import pytest
import torch

from specdec_kernels import tree_attention
from specdec_kernels.tree import mask_from_parents

from .attention_cases import T1_PARENTS, T1_VISIBLE, Case, chain, check, exact, int32, make_case, to

BF16 = torch.bfloat16
# torch's fused kernel serves the first on the CPU, written-out softmax the second.
PATHS = pytest.mark.parametrize("options", [{}, {"softcap": 4.0}], ids=["fused", "written"])


def seen_by(parents, prefix, capacity, dim, device, **options) -> list[set[int]]:
    """Return which cache rows have weight in each node's output: V is the identity, so out holds the weights."""
    num_nodes = len(parents)
    q, k = torch.randn(1, num_nodes, 1, dim), torch.randn(1, capacity, 1, dim)
    v = torch.eye(capacity).view(1, capacity, 1, capacity)
    args = (q, k, v, mask_from_parents(torch.tensor([parents])), int32(prefix))
    out, _ = tree_attention(*(x.to(device) for x in args), **options)
    torch.testing.assert_close(out.sum(-1), torch.ones_like(out[..., 0]))
    return [set(out[0, node, 0].nonzero().flatten().tolist()) for node in range(num_nodes)]


@pytest.mark.parametrize("dim", [16, 8], ids=["fused", "written"])
def test_visible_sets(dim, backend, device) -> None:
    seen = seen_by(T1_PARENTS, 4, 16, dim, device)
    assert seen == [{0, 1, 2, 3} | {4 + node for node in nodes} for nodes in T1_VISIBLE]


@pytest.mark.parametrize("dim", [16, 8], ids=["fused", "written"])
def test_window_counts_depth_not_rows(dim, backend, device) -> None:
    seen = seen_by(T1_PARENTS, 4, 16, dim, device, window=3)
    # Node 5 is at position 6 and sees positions 4, 5, 6: nodes 0, 2, 5. By row index it would see rows 7…9 only.
    assert seen == [{2, 3, 4}, {3, 4, 5}, {3, 4, 6}, {4, 5, 7}, {4, 5, 8}, {4, 6, 9}]


@pytest.mark.parametrize("parents", [[-1], [-1, 0, 0, 0]], ids=["root", "depth-1"])
def test_shallow_trees(parents, backend, device) -> None:
    seen = seen_by(parents, 3, 8, 8, device)
    assert seen == [{0, 1, 2, 3} | {3 + node} for node in range(len(parents))]


@pytest.mark.parametrize("num_nodes", [33, 64, 65, 129])
def test_word_borders(num_nodes, backend, device) -> None:
    """Bits 31, 32, 63 and 64 belong to some node's mask, in a chain and in a star."""
    seen = seen_by(chain(num_nodes), 2, num_nodes + 2, 8, device)
    assert seen == [set(range(node + 3)) for node in range(num_nodes)]
    seen = seen_by([-1] + [0] * (num_nodes - 1), 2, num_nodes + 2, 8, device)
    assert seen == [{0, 1, 2} | {2 + node} for node in range(num_nodes)]


@PATHS
def test_ragged_batch_equals_single_rows(options, backend, device) -> None:
    case = make_case(3, (5, 1, 9), 11, (6, 2), (16, 16), torch.float64, trees=3, **options)
    together = tree_attention(*(x.to(device) for x in case.args()), **options)
    for row in range(3):
        alone = tree_attention(*(x.to(device) for x in case.row(row).args()), **options)
        for whole, part in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[row : row + 1], part)


@PATHS
def test_trees_of_different_sizes(options, backend, device) -> None:
    """Rows with 5 and 9 nodes: the short one is padded with mask rows of zeros, whose K/V are garbage."""
    small = make_case(1, (7,), 5, dtype=torch.float64, **options)
    both = make_case(2, (7, 4), 9, dtype=torch.float64, trees=2, **options)
    mask = both.mask.clone()
    mask[0, :5], mask[0, 5:] = small.mask[0], 0
    both.q[0, :5], both.k[0, :12], both.v[0, :12] = small.q[0], small.k[0, :12], small.v[0, :12]
    both.k[0, 12:], both.v[0, 12:] = math.nan, math.inf
    q, k, v, _, prefix_len = (x.to(device) for x in both.args())
    out, lse = tree_attention(q, k, v, mask.to(device), prefix_len, **options)
    expected = tree_attention(*(x.to(device) for x in small.args()), **options)
    torch.testing.assert_close((out[:1, :5], lse[:1, :5]), expected)
    assert (out[0, 5:] == 0).all()
    assert (lse[0, 5:] == -math.inf).all()
    second = tree_attention(*(x.to(device) for x in both.row(1).args()), **options)
    torch.testing.assert_close((out[1:], lse[1:]), second)


def test_padding_with_a_sink(backend, device) -> None:
    case = make_case(1, (3,), 4)
    q, k, v, mask, prefix_len = (x.to(device) for x in case.args())
    mask[:, 2:] = 0
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    out, lse = tree_attention(q, k, v, mask, prefix_len, sinks=sinks)
    assert (out[:, 2:] == 0).all()
    torch.testing.assert_close(lse[0, 2:], sinks.expand(2, 4))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float8_e4m3fn], ids=["fp32", "bf16", "fp8"])
@PATHS
def test_unseen_rows_may_hold_anything(options, dtype, window, poison, backend, device) -> None:
    case = make_case(3, (20, 3, 11), 9, dtype=torch.float32, trees=3)
    case.k, case.v = case.k.to(dtype), case.v.to(dtype)
    case.q = case.q.to(dtype if dtype.itemsize > 1 else BF16)
    options = options | {"window": window}
    clean = tree_attention(*(x.to(device) for x in case.args()), **options)
    for cache in (case.k, case.v):
        for row, length in enumerate(case.prefix):
            cache[row, length + 9 :] = poison  # uncommitted rows of the shorter and the spare rows of all
            if window is not None:
                cache[row, : max(0, length - window + 1)] = poison
    poisoned = tree_attention(*(x.to(device) for x in case.args()), **options)
    for before, after in zip(clean, poisoned, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["bshd", "gaps", "stacked", "broadcast"])
def test_strides_do_not_matter(layout, backend, device) -> None:
    case = make_case(2, (12, 5), 7, dtype=torch.float64, trees=2)
    expected = tree_attention(*(x.contiguous().to(device) for x in case.args()))
    q, k, v, mask, prefix_len = (x.to(device) for x in case.args())
    if layout == "bshd":
        k, v = k.contiguous(), v.contiguous()
    elif layout == "gaps":
        k, v, q = (torch.nn.functional.pad(x, (0, 5, 0, 2))[:, :, : x.shape[2], : x.shape[3]] for x in (k, v, q))
    elif layout == "stacked":  # (2L, B, H, S, D), as Medusa's cache
        stack = torch.stack([v.transpose(1, 2), k.transpose(1, 2)])
        k, v = stack[1].transpose(1, 2), stack[0].transpose(1, 2)
    else:
        k, v, q = (x[:1].expand_as(x) for x in (k, v, q))
        expected = tree_attention(*(x.contiguous() for x in (q, k, v)), mask, prefix_len)
    every_second = torch.stack([prefix_len, prefix_len + 100], dim=1)[:, 0]
    wide_mask = torch.stack([mask, ~mask], dim=-1)[..., 0]
    torch.testing.assert_close(tree_attention(q, k, v, wide_mask, every_second), expected)


@PATHS
def test_accuracy_of_a_wide_tree_over_a_long_prefix(options, backend, device) -> None:
    case = make_case(1, (4096,), 64, (4, 2), (64, 64), BF16, **options)
    check(case, tree_attention(*(x.to(device) for x in case.args()), **options))


@PATHS
def test_empty_batch(options, backend, device) -> None:
    case = make_case(0, (), 5, dtype=BF16)
    out, lse = tree_attention(*(x.to(device) for x in case.args()), **options)
    assert out.shape == (0, 5, 4, 16)
    assert lse.shape == (0, 5, 4)


@PATHS
def test_full_cache(options, backend, device) -> None:
    """The draft block ends with the last row of the cache, and nothing is written to the cache."""
    case = make_case(2, (8, 8), 6, **options)
    case.k, case.v = case.k[:, :14].clone(), case.v[:, :14].clone()
    k, v = case.k.clone(), case.v.clone()
    check(case, tree_attention(*(x.to(device) for x in case.args()), **options))
    assert torch.equal(case.k, k)
    assert torch.equal(case.v, v)


@pytest.mark.parametrize("factor", [0.0, 1e4, -1e4])
@PATHS
def test_extreme_scores(options, factor, backend, device) -> None:
    """Scores of ±1e5 neither overflow nor underflow: the softmax is that of the largest."""
    case = make_case(1, (15,), 7, scale=factor, dtype=torch.float32, **options)
    out, lse = tree_attention(*(x.to(device) for x in case.args()), scale=factor, **options)
    exact_out, exact_lse = exact(case)
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-6, atol=1e-6)
    assert out.isfinite().all()
    if factor == 0.0:
        torch.testing.assert_close(out.cpu().double(), exact_out, rtol=1e-5, atol=1e-6)


def test_a_nan_query_stays_in_its_row(backend, device) -> None:
    case = make_case(2, (6, 3), 5)
    clean, _ = tree_attention(*(x.to(device) for x in case.args()))
    case.q[0, 3] = math.nan
    out, lse = tree_attention(*(x.to(device) for x in case.args()))
    assert out[0, 3].isnan().all()
    assert lse[0, 3].isnan().all()
    untouched = torch.ones(2, 5, dtype=torch.bool)
    untouched[0, 3] = False
    torch.testing.assert_close(out[untouched], clean[untouched])


def test_lse_merges_two_halves(backend, device) -> None:
    """What the lse is for: attention over prefix and draft apart, merged, equals attention over both."""
    case = make_case(1, (10,), 6, dtype=torch.float64)
    out, lse = tree_attention(*to(case, device).args())
    root_only = Case(case.q[:, :1], case.k, case.v, [[-1]], [9])
    prefix_out, prefix_lse = tree_attention(*root_only.args())  # rows 0…9
    draft = Case(case.q[:, :1], case.k[:, 10:], case.v[:, 10:], [[-1]], [0])
    draft_out, draft_lse = tree_attention(*draft.args())  # row 10
    merged_lse = torch.logaddexp(prefix_lse, draft_lse)
    parts = ((prefix_out, prefix_lse), (draft_out, draft_lse))
    merged = sum(part_out * (part_lse - merged_lse).exp()[..., None] for part_out, part_lse in parts)
    torch.testing.assert_close((merged, merged_lse), (out[:, :1], lse[:, :1]))
