"""What the kernel moves, against what it cannot avoid: each K/V row that a tile of rows sees, q, out and lse, once."""

import pytest
import torch

from tests.kernels.meter import measure
from tests.ops.attention_cases import Case, chain, make_case, paths, visible_keys

from .attention import attend, block_m, force_plan, force_splits

BF16 = torch.bfloat16


def unavoidable(case: Case) -> int:
    """Return the bytes of one call: K/V rows once for each KV head and row tile, q and the results once."""
    batch, num_nodes, num_q_heads, qk_dim = case.q.shape
    num_kv_heads, v_dim = case.k.shape[2], case.v.shape[3]
    group_size, step = num_q_heads // num_kv_heads, block_m(case)
    num_rows, keys = num_nodes * group_size, 0
    for row in range(batch):
        node_paths = paths(case.tree(row))
        for first in range(0, num_rows, step):
            nodes = range(first // group_size, (min(first + step, num_rows) - 1) // group_size + 1)
            keys += len(set().union(*(visible_keys(case, row, node_paths[n]) for n in nodes)))
    kv_bytes = keys * num_kv_heads * (qk_dim + v_dim) * case.k.element_size()
    lse_bytes = batch * num_nodes * num_q_heads * 4
    return kv_bytes + case.q.numel() * case.q.element_size() * (qk_dim + v_dim) // qk_dim + lse_bytes


def moved(case: Case, **pages) -> int:
    with measure() as launches:
        attend(case, **pages)
    return sum(launch.moved() for launch in launches)


@pytest.mark.parametrize("num_nodes", [1, 16, 63, 65])
@pytest.mark.parametrize("prefix", [0, 1, 100, 777])
def test_reads_everything_once(prefix, num_nodes, monkeypatch) -> None:
    force_plan(monkeypatch, target_programs=1)
    case = make_case(1, (prefix,), num_nodes, (4, 1), (128, 128), BF16)
    ratio = moved(case) / unavoidable(case)
    print(f"P{prefix} T{num_nodes}: {ratio:.4f}")
    assert ratio <= 1.05


def working_programs(case: Case) -> int:
    """Return the most programs that have keys: of 16 and more each, for each KV head and row tile."""
    num_rows = case.q.shape[1] * case.q.shape[2] // case.k.shape[2]
    row_tiles = -(-num_rows // block_m(case)) * case.k.shape[2]
    return sum(row_tiles * -(-(prefix + case.q.shape[1]) // 16) for prefix in case.prefix)


@pytest.mark.parametrize("num_nodes", [1, 16, 63, 65])
@pytest.mark.parametrize("prefix", [0, 1, 100, 777])
def test_splits_cost_little(prefix, num_nodes) -> None:
    """With the shipped parameters and room for long prefixes.

    What each program reads to learn where its row ends, 4 bytes, or 8 where it works, is counted apart: of a call over
    two keys, where most have nothing to do, that is a fifth.
    """
    case = make_case(1, (prefix,), num_nodes, (4, 1), (128, 128), BF16)
    case.k, case.v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 4096)) for x in (case.k, case.v))
    with measure() as launches:
        attend(case)
    lengths = [launch.moved("prefix_len_ptr") for launch in launches]
    ratio = (sum(launch.moved() for launch in launches) - sum(lengths)) / unavoidable(case)
    print(f"P{prefix} T{num_nodes}: {ratio:.4f}, {'split' if 'partial_ptr' in launches[0].traffic else 'not split'}")
    assert lengths[0] <= 4 * (launches[0].programs + working_programs(case))
    assert lengths[1] == 4 * launches[1].programs
    assert [launch.kernel for launch in launches] == ["_tree_attention_kernel", "merge_splits_kernel"]
    assert ratio <= 1.10


def test_the_bounds_can_fail(monkeypatch) -> None:
    """Tiles a quarter as high read every key four times; splits a tenth as long write more than they save."""
    case = make_case(1, (300,), 16, (4, 1), (64, 64), BF16)
    least = unavoidable(case)
    force_plan(monkeypatch, target_programs=1)
    assert moved(case) <= 1.05 * least
    force_plan(monkeypatch, block_m=16)
    assert moved(case) > 3 * least
    monkeypatch.undo()
    assert moved(case) <= 1.10 * least
    force_splits(monkeypatch, 32)
    assert moved(case) > 1.10 * least


def test_splits_move_what_the_rule_says(monkeypatch) -> None:
    """Each split writes, and the merge reads, one fp32 row of results; nothing that was not written is read."""
    force_splits(monkeypatch, 64)
    case = make_case(2, (187, 30), 5, (4, 2), (64, 64), BF16, trees=2)  # three splits of 64 keys; none
    with measure() as launches:
        attend(case)
    attention, merge = launches
    num_rows = 5 * 4
    assert attention.traffic["partial_ptr"].stored == merge.traffic["partial_ptr"].loaded == 3 * num_rows * 64 * 4
    assert attention.traffic["out_ptr"].stored == merge.traffic["out_ptr"].stored == num_rows * 64 * 2


def test_pages_cost_their_table(monkeypatch) -> None:
    """A page id for each page, when pages are as large as a tile; one for each row when they are smaller."""
    force_plan(monkeypatch, target_programs=1)
    case = make_case(1, (300,), 1, (4, 1), (64, 64), BF16)
    contiguous = moved(case)
    assert moved(case, page=256) - contiguous == 4 * 10  # tiles of 32 keys
    assert moved(case, page=16) - contiguous <= 4 * -(-301 // 32) * 32


def test_window_skips_the_prefix(monkeypatch) -> None:
    force_plan(monkeypatch, target_programs=1)
    case = make_case(1, (777,), 16, (4, 1), (128, 128), BF16, window=100)
    assert moved(case) <= 1.05 * unavoidable(case)


def test_a_tree_costs_no_more_than_a_causal_mask(monkeypatch) -> None:
    """A chain is the causal mask; a tree of as many nodes sees fewer keys, and its mask takes no other path."""
    force_plan(monkeypatch, target_programs=1)
    tree, causal = (make_case(1, (300,), 26, (4, 1), (64, 64), BF16) for _ in range(2))
    causal.parents = [chain(26)]
    assert moved(tree) <= moved(causal)


@pytest.mark.parametrize("page", [0, 10], ids=["contiguous", "paged"])
def test_masks_and_caches_that_end_with_the_tree(page, monkeypatch) -> None:
    """Nothing lies behind the last row of any argument, and the last tile of keys, mask words and rows is not whole."""
    case = make_case(1, (33,), 17, (9, 3), (64, 64), BF16)
    case.q, case.k, case.v = case.q.clone(), case.k[:, :50].clone(), case.v[:, :50].clone()
    assert moved(case, page=page) >= unavoidable(case)  # raises where anything else is read
    force_splits(monkeypatch, 32)
    moved(case, page=page)


def test_meter_sees_an_access_outside() -> None:
    case = make_case(1, (37,), 5, (4, 1))
    case.k = case.k[:, :40]  # the tree needs 42 rows
    with pytest.raises(Exception, match="load outside every tensor"), measure():
        attend(case)
