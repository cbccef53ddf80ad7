"""`tree_attention` and `paged_tree_attention`: one row for each documented error."""

import pytest
import torch

from specdec_kernels import paged_tree_attention, tree_attention

from .attention_cases import int32, make_case

# What is changed in a valid call -> the error. A callable makes the argument from the valid ones.
REJECTED = [
    ({"q": [1]}, TypeError, "q must be a torch.Tensor, got list"),
    ({"q": torch.zeros(2, 7, 4)}, ValueError, r"q must have shape \(B, T, Hq, D\), got \(2, 7, 4\)"),
    ({"q": torch.zeros(2, 7, 4, 16).long()}, TypeError, "q must be float16 or .*, got int64"),
    ({"q": lambda a: a["q"].mT.contiguous().mT}, ValueError, "q must have stride 1 in its last dimension"),
    ({"q": torch.zeros(2, 0, 4, 16)}, ValueError, r"q and v_cache must not be empty, got \(2, 0, 4, 16\)"),
    ({"q": torch.zeros(2, 7, 3, 16)}, ValueError, "q must have a multiple of k_cache's 2 heads, got 3"),
    ({"q": lambda a: a["q"].clone().requires_grad_()}, RuntimeError, "q requires grad"),
    ({"k_cache": None}, TypeError, "k_cache must be a torch.Tensor, got NoneType"),
    ({"k_cache": torch.zeros(2, 20, 2, 8)}, ValueError, r"k_cache must have shape \(.*, 16\), got \(2, 20, 2, 8\)"),
    ({"k_cache": lambda a: a["k_cache"].half()}, TypeError, "k_cache must be float32 or .* or int8, got float16"),
    ({"k_cache": lambda a: a["k_cache"].to("meta")}, ValueError, "k_cache must be on cpu, got meta"),
    (
        {"v_cache": torch.zeros(2, 19, 2, 16)},
        ValueError,
        r"v_cache must have shape \(.*, 2, Dv\), got \(2, 19, 2, 16\)",
    ),
    ({"v_cache": lambda a: a["v_cache"].double()}, TypeError, "v_cache must be float32, got float64"),
    ({"v_cache": lambda a: a["v_cache"].mT.contiguous().mT}, ValueError, "v_cache must have stride 1"),
    # The mask of another tree; (10, 15) for (10, 20) passes elsewhere.
    ({"tree_mask": torch.ones(1, 8, 1).long()}, ValueError, r"tree_mask must have shape \(1, 7, 1\), got \(1, 8, 1\)"),
    ({"tree_mask": torch.ones(1, 7, 2).long()}, ValueError, r"tree_mask must have shape \(1, 7, 1\), got \(1, 7, 2\)"),
    ({"tree_mask": torch.ones(3, 7, 1).long()}, ValueError, r"tree_mask must have shape \(2, 7, 1\), got \(3, 7, 1\)"),
    ({"tree_mask": torch.ones(1, 7, 1).bool()}, TypeError, "tree_mask must be int64, got bool"),
    ({"prefix_len": int32(3)}, ValueError, r"prefix_len must have shape \(2,\), got \(1,\)"),
    ({"prefix_len": torch.tensor([1, 2])}, TypeError, "prefix_len must be int32, got int64"),
    ({"prefix_len": int32(3, -1)}, ValueError, r"prefix_len must be in \[0, \d+\], got -1"),
    ({"softcap": 0.0}, ValueError, "softcap must be > 0, got 0"),
    ({"window": 0}, ValueError, "window must be >= 1, got 0"),
    ({"sinks": torch.zeros(2)}, ValueError, r"sinks must have shape \(4,\), got \(2,\)"),
    ({"sinks": torch.zeros(4).long()}, TypeError, "sinks must be float16 or .*, got int64"),
    ({"sinks": torch.ones(4, requires_grad=True)}, RuntimeError, "sinks requires grad"),
    ({"k_scale": 0.5}, TypeError, "k_scale must be a torch.Tensor, got float"),
    ({"k_scale": torch.ones(4)}, ValueError, r"k_scale must have shape \(2,\), got \(4,\)"),
    ({"v_scale": torch.ones(2).long()}, TypeError, "v_scale must be float16 or .*, got int64"),
    ({"v_scale": torch.ones(2, device="meta")}, ValueError, "v_scale must be on cpu, got meta"),
]
CONTIGUOUS = [
    ({"prefix_len": int32(3, 14)}, ValueError, r"prefix_len must be in \[0, 13\], got 14"),
    ({"k_cache": torch.zeros(2, 6, 2, 16), "v_cache": torch.zeros(2, 6, 2, 16)}, ValueError, ".* T = 7 rows, got 6"),
]
PAGED = [
    ({"prefix_len": int32(3, 14)}, ValueError, r"prefix_len must be in \[0, 13\], got 14"),
    ({"block_table": [0]}, TypeError, "block_table must be a torch.Tensor, got list"),
    ({"block_table": torch.zeros(2, 5)}, TypeError, "block_table must be int32, got float32"),
    ({"block_table": int32(1, 2)}, ValueError, r"block_table must have shape \(2, max_pages\), got \(2,\)"),
    ({"block_table": torch.zeros(2, 4).int().to("meta")}, ValueError, "block_table must be on cpu, got meta"),
    ({"block_table": torch.zeros(2, 2).int()}, ValueError, r"prefix_len must be in \[0, 1\], got 10"),
    ({"block_table": torch.full((2, 5), 10).int()}, ValueError, r"block_table must be in \[0, 9\], got 10"),
    ({"block_table": torch.full((2, 5), -1).int()}, ValueError, r"block_table must be in \[0, 9\], got -1"),
    ({"k_cache": torch.zeros(9, 0, 2, 16), "v_cache": torch.zeros(9, 0, 2, 16)}, ValueError, ".* at least one row"),
]


def call(op, changes) -> None:
    case = make_case(2, (10, 4), 7, (4, 2))
    arguments = dict(zip(("q", "k_cache", "v_cache", "tree_mask", "prefix_len"), case.args(), strict=True))
    if op is paged_tree_attention:  # the same 20 rows as 5 pages of 4
        arguments |= {name: arguments[name].reshape(10, 4, 2, 16) for name in ("k_cache", "v_cache")}
        arguments["block_table"] = torch.arange(10, dtype=torch.int32).view(2, 5)
    op(**(arguments | {name: change(arguments) if callable(change) else change for name, change in changes.items()}))


def identity(value) -> str | None:
    return "-".join(value) if isinstance(value, dict) else None


@pytest.mark.parametrize(("changes", "error", "message"), REJECTED + CONTIGUOUS, ids=identity)
def test_rejects(changes, error, message) -> None:
    with pytest.raises(error, match=f"^tree_attention: {message}"):
        call(tree_attention, changes)


@pytest.mark.parametrize(("changes", "error", "message"), REJECTED + PAGED, ids=identity)
def test_paged_rejects(changes, error, message) -> None:
    with pytest.raises(error, match=f"^paged_tree_attention: {message}"):
        call(paged_tree_attention, changes)


@pytest.mark.parametrize("op", [tree_attention, paged_tree_attention])
def test_accepts_the_unchanged_call(op) -> None:
    call(op, {})
