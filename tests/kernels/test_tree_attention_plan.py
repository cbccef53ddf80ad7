"""The arithmetic of a launch: how many programs a call makes on an H200, and which parameters it gets."""

import pytest
import torch

from specdec_kernels.cli._kernel_cases import tf32_allowed
from specdec_kernels.kernels import _aot, _common
from specdec_kernels.kernels import tree_attention as module

MULTIPROCESSORS = 132
OPTIONS = dict.fromkeys(("scale", "softcap", "window", "sinks", "k_scale", "v_scale"))
LLAMA_3_8B, LLAMA_3_70B_RANK = (32, 8), (8, 1)  # query heads, KV heads; the second is one rank of eight
PREFIXES = [4096, 8192, 32768, 131072]


def grids(monkeypatch, heads, num_nodes: int, num_keys: int, batch: int = 1, dtype=torch.bfloat16, page=0) -> list:
    """Return the grids of a call, without compiling anything."""
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr(module, "launch", lambda kernel, grid, *rest: found.append(grid))
    q = torch.empty(batch, num_nodes, heads[0], 128, dtype=dtype)
    mask = torch.empty(1, num_nodes, (num_nodes + 63) // 64, dtype=torch.int64)
    prefix_len = torch.empty(batch, dtype=torch.int32)
    with _common.pretend_device(_aot.ARCHITECTURES["sm_90"].device):
        if page:
            pages = torch.empty(1, page, heads[1], 128, dtype=dtype).expand(num_keys // page, -1, -1, -1)
            table = torch.empty(batch, num_keys // page, dtype=torch.int32)
            module.paged_tree_attention_triton(q, pages, pages, table, mask, prefix_len, **OPTIONS)
        else:
            cache = torch.empty(1, 1, heads[1], 128, dtype=dtype).expand(batch, num_keys, -1, -1)
            module.tree_attention_triton(q, cache, cache, mask, prefix_len, **OPTIONS)
    return found


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("num_nodes", [1, 8, 16, 26, 64, 128])
def test_one_sequence_fills_the_device(num_nodes, prefix, monkeypatch) -> None:
    x, y, z = grids(monkeypatch, LLAMA_3_8B, num_nodes, prefix + num_nodes)[0]
    assert 0.95 * MULTIPROCESSORS <= x * y * z <= MULTIPROCESSORS


@pytest.mark.parametrize("prefix", PREFIXES)
def test_one_kv_head_fills_the_device(prefix, monkeypatch) -> None:
    """Plain decoding does from 4096 keys on; trees, whose partial results are larger, from 34 000 on."""
    x, y, z = grids(monkeypatch, LLAMA_3_70B_RANK, 1, prefix + 1)[0]
    assert 0.95 * MULTIPROCESSORS <= x * y * z <= MULTIPROCESSORS
    for num_nodes in (8, 16, 26, 64, 128):
        x, y, z = grids(monkeypatch, LLAMA_3_70B_RANK, num_nodes, prefix + num_nodes)[0]
        assert x * y * z >= 0.95 * MULTIPROCESSORS * min(1, prefix / 34000)


def test_the_grid_follows_shapes_only(monkeypatch) -> None:
    """A captured graph is replayed with other prefixes; a row's bits do not depend on the batch: same splits."""
    alone = grids(monkeypatch, LLAMA_3_8B, 26, 8192)
    assert [grid[:2] for grid in grids(monkeypatch, LLAMA_3_8B, 26, 8192, batch=8)] == [
        grid[:2] for grid in alone[:1]
    ] + [(alone[1][0], 8)]
    assert grids(monkeypatch, LLAMA_3_8B, 26, 8192, page=16) == alone


@pytest.mark.parametrize("num_keys", [1, 100, 778, 1023])
def test_few_keys_are_not_split_at_any_price(num_keys, monkeypatch) -> None:
    """Below 1024 keys partial results are at most a tenth of the bytes."""
    for num_nodes in (1, 16, 64):
        x, _, _ = grids(monkeypatch, LLAMA_3_8B, num_nodes, max(num_keys, num_nodes))[0]
        num_rows = min(4 * num_nodes, 64)
        num_splits = x // -(-4 * num_nodes // 64) if num_nodes > 4 else x
        assert num_splits == 1 or num_splits * num_rows * 128 * 8 <= 0.1 * num_keys * 256 * 2


@pytest.mark.parametrize("what", ["dims", "value dims", "strides", "address"])
def test_unaligned_memory_has_a_tile_of_its_own(what: str) -> None:
    memory = torch.empty(1, 64, 2, 160, dtype=torch.bfloat16)
    q = k = v = memory[..., :128]
    with _common.pretend_device(_aot.ARCHITECTURES["sm_90"].device):
        assert module.plan_of(q, k, v).block_m == 64
        if what == "dims":
            q, k = memory[..., :120], memory[..., :120]
        elif what == "value dims":
            v = memory[..., :100]
        elif what == "strides":
            v = torch.empty(1, 64, 2, 129, dtype=torch.bfloat16)[..., :128]
        else:
            q = memory[..., 1:129]
        assert module.plan_of(q, k, v).block_m == 16


def test_tf32_only_when_asked() -> None:
    q, device = torch.empty(1, 1, 1, 64), _aot.ARCHITECTURES["sm_90"].device
    with _common.pretend_device(device):
        assert module.plan_of(q, q, q).precision == "ieee"
        with tf32_allowed(True):
            assert module.plan_of(q, q, q).precision == "tf32"
            wide, gaps = torch.empty(1, 1, 1, 192), torch.empty(1, 1, 2, 65)[..., :64]
            assert module.plan_of(wide, wide, wide).precision == module.plan_of(gaps, gaps, gaps).precision == "ieee"
            assert module.plan_of(q.bfloat16(), q.bfloat16(), q.bfloat16()).precision == "ieee"
    with tf32_allowed(True), _common.pretend_device(_aot.ARCHITECTURES["gfx950"].device):  # has no such instruction
        assert module.plan_of(q, q, q).precision == "ieee"
