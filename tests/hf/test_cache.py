"""The cache: where rows go, what is never touched, and what is refused."""

import pytest
import torch

from specdec_kernels.hf.cache import TreeCache

LAYERS, HEADS, SIZE = 2, 3, 4


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def states(batch, num_nodes, seed=0, heads=HEADS, size=SIZE, dtype=torch.float32):
    """Keys and values as a model hands them over: ``(B, Hk, T, D)`` views of ``(B, T, Hk, D)``."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, num_nodes, heads, size)
    return tuple(torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(2))


def write(cache, num_nodes, seed=0):
    """Write one step to all layers; return what every layer was given."""
    given = [states(cache.batch_size, num_nodes, seed * 10 + layer) for layer in range(len(cache))]
    for layer, pair in enumerate(given):
        cache.update(*pair, layer)
    return given


def filled(lengths, capacity=16):
    """A cache whose rows have these lengths, and a copy of all its bytes."""
    cache = TreeCache(LAYERS, len(lengths), capacity)
    write(cache, max(lengths))
    cache.advance(max(lengths))
    cache.truncate(int32(*lengths))
    return cache, cache.buffers.clone()


@pytest.mark.parametrize("lengths", [[4], [4, 4], [5, 1, 9], [0, 3]], ids=str)
def test_update_writes_behind_each_row_and_nowhere_else(lengths):
    cache, before = filled(lengths)
    given = write(cache, 3, seed=1)
    expected = before
    for layer, pair in enumerate(given):
        for which, new in enumerate(pair):
            for row, length in enumerate(lengths):
                expected[2 * layer + which, row, :, length : length + 3] = new[row]
    torch.testing.assert_close(cache.buffers, expected, rtol=0, atol=0, equal_nan=True)
    assert cache.prefix_len.tolist() == lengths, "writing commits nothing"


def test_update_returns_the_buffers_themselves():
    cache, _ = filled([2, 3])
    keys, values = cache.update(*states(2, 1), 1)
    assert keys.data_ptr() == cache.buffers[2].data_ptr()
    assert values.data_ptr() == cache.buffers[3].data_ptr()
    assert keys.shape == (2, HEADS, 16, SIZE)


def test_writing_again_replaces_the_step():
    cache, _ = filled([2, 3])
    write(cache, 4, seed=1)
    given = write(cache, 2, seed=2)
    assert torch.equal(cache.buffers[2][1, :, 3:5], given[1][0][1])


@pytest.mark.parametrize("lengths", [[14], [14, 3]], ids=str)
def test_capacity_is_checked_before_anything_is_written(lengths):
    """Case 48: capacity 16, 14 rows, 6 nodes."""
    cache, before = filled(lengths)
    with pytest.raises(ValueError, match="6 nodes after 14 rows need 20 rows, but the capacity is 16"):
        write(cache, 6, seed=1)
    torch.testing.assert_close(cache.buffers, before, rtol=0, atol=0, equal_nan=True)
    write(cache, 2, seed=1)
    cache.advance(2)
    with pytest.raises(ValueError, match="1 nodes after 16 rows need 17 rows"):
        write(cache, 1)


def test_commit_moves_each_row_by_its_own_amount():
    """Case 80: three rows with paths of 0, 2 and 1 nodes; a fourth one has ended."""
    lengths = [5, 0, 9, 4]
    cache, _ = filled(lengths)
    write(cache, 6, seed=1)
    before = cache.buffers.clone()
    old_lengths = cache.prefix_len
    accepted = torch.tensor([[-1, -1], [2, 5], [3, -1], [2, 4]], dtype=torch.int32)
    cache.commit(accepted, int32(0, 2, 1, 2), torch.tensor([True, True, True, False]))
    assert cache.prefix_len.tolist() == [6, 3, 11, 4]
    assert old_lengths.tolist() == lengths, "a tensor handed out earlier stays as it was"
    expected = before.clone()
    expected[:, 1, :, 1], expected[:, 1, :, 2] = before[:, 1, :, 2], before[:, 1, :, 5]
    expected[:, 2, :, 10] = before[:, 2, :, 12]
    torch.testing.assert_close(cache.buffers, expected, rtol=0, atol=0, equal_nan=True)
    assert cache.get_seq_length() == 11


def test_commit_needs_something_written():
    with pytest.raises(RuntimeError, match="nothing was written"):
        TreeCache(1, 1, 4).commit(torch.zeros(1, 1, dtype=torch.int32), int32(0), torch.tensor([True]))


def test_crop_follows_transformers_5():
    """Case 76: 0 changes nothing, a positive number was a final length once, more than there is raises."""
    cache, _ = filled([5, 3])
    cache.crop(0)
    assert cache.prefix_len.tolist() == [5, 3]
    cache.crop(-2)
    assert cache.prefix_len.tolist() == [3, 1]
    assert cache.get_seq_length() == 3
    with pytest.raises(ValueError, match="must be negative or 0, got 2"):
        cache.crop(2)
    with pytest.raises(ValueError, match="cannot remove 2 rows of 1"):
        cache.crop(-2)
    assert cache.prefix_len.tolist() == [3, 1]


def test_reset_keeps_the_memory():
    cache, _ = filled([5, 3])
    memory = cache.buffers.data_ptr()
    cache.reset()
    assert cache.prefix_len.tolist() == [0, 0]
    assert cache.get_seq_length() == 0
    write(cache, 16)
    assert cache.buffers.data_ptr() == memory


def test_dtype_of_the_cache_is_chosen():
    cache = TreeCache(1, 2, 8, dtype=torch.bfloat16)
    cache.update(*states(2, 3), 0)
    cache.advance(3)
    cache.truncate(int32(3, 1))
    pair = states(2, 2, seed=1)
    keys, _ = cache.update(*pair, 0)
    assert keys.dtype == torch.bfloat16
    assert torch.equal(keys[1, :, 1:3], pair[0][1].bfloat16())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"heads": 3}, {"heads": 1}),
        ({"size": 4}, {"size": 8}),
        ({}, {"dtype": torch.bfloat16}),
    ],
    ids=["heads", "size", "dtype"],
)
def test_layers_that_differ_get_a_tensor_each(first, second):
    cache = TreeCache(2, 2, 8)
    pairs = states(2, 3, **first), states(2, 3, seed=1, **second)
    for layer, pair in enumerate(pairs):
        cache.update(*pair, layer)
    assert [t.shape[1] for t in cache.buffers] == [8] * 4
    cache.commit(int32(2, 2)[:, None], int32(1, 1), torch.tensor([True, True]))
    for layer, pair in enumerate(pairs):
        for which, given in enumerate(pair):
            assert torch.equal(cache.buffers[2 * layer + which][:, :2], given.transpose(1, 2)[:, [0, 2]])


def test_keys_and_values_may_differ_in_size():
    cache = TreeCache(1, 1, 8)
    keys, values = cache.update(states(1, 2, size=8)[0], states(1, 2, size=4)[1], 0)
    assert keys.shape[-1] == 8
    assert values.shape[-1] == 4


@pytest.mark.parametrize("wrong", [{"heads": 1}, {"size": 1}], ids=str)
def test_update_refuses_what_would_broadcast(wrong):
    cache, _ = filled([2])
    with pytest.raises(ValueError, match=r"layer 1 holds K \(1, 3, 16, 4\)"):
        cache.update(*states(1, 2, **wrong), 1)


def test_update_refuses_another_batch():
    cache, _ = filled([2])
    with pytest.raises(ValueError, match=r"got states \(2, 3, 2, 4\)"):
        cache.update(*states(2, 2), 1)
    with pytest.raises(ValueError, match="batch size 1, got 2"):
        TreeCache(1, 1, 8).update(*states(2, 2), 0)


def test_update_refuses_fewer_values_than_keys():
    """One value would be copied to all nodes."""
    cache = TreeCache(1, 1, 8)
    with pytest.raises(ValueError, match="K has 3 nodes, but V has 1"):
        cache.update(states(1, 3)[0], states(1, 1)[1], 0)


def test_advance_commits_only_what_was_written():
    cache, _ = filled([3])
    with pytest.raises(ValueError, match=r"count must be in \[0, 0\]"):
        cache.advance(1)
    write(cache, 2)
    for count in (3, -1):
        with pytest.raises(ValueError, match=rf"count must be in \[0, 2\], .* got {count}"):
            cache.advance(count)
    cache.advance(2)
    assert cache.prefix_len.tolist() == [5]


@pytest.mark.parametrize("name", ["num_layers", "batch_size", "capacity"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"TreeCache: {name} must be at least 1, got 0"):
        TreeCache(**{"num_layers": 1, "batch_size": 1, "capacity": 1, name: 0})


def test_what_transformers_asks_a_cache():
    cache, _ = filled([5, 3])
    assert len(cache) == LAYERS
    assert cache.batch_size == 2
    assert cache.is_initialized
    assert cache.is_croppable
    assert cache.get_mask_sizes(4, 0) == (16, 0)
    assert cache.get_max_length() == cache.get_max_cache_shape() == 16
    assert not cache.is_compileable
    for call in (
        lambda: cache.reorder_cache(None),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(None),
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_lengths_on_a_device_are_read_only_when_the_bound_reaches_the_end(monkeypatch):
    cache, _ = filled([2, 1])
    cache._lengths_readable = False
    reads = []
    for name in ("tolist", "item", "__int__", "__bool__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, m=method, n=name: (reads.append(n), m(self))[1])
    for step in range(4):
        given = [states(2, 4, seed=10 * step + layer) for layer in range(LAYERS)]
        reads.clear()
        for layer, pair in enumerate(given):
            cache.update(*pair, layer)
        assert reads == (["__int__"] if step == 3 else []), "the bound is 2, 6, 10, 14: the fourth step may not fit"
        assert torch.equal(cache.buffers[0][1, :, 1 + step : 5 + step], given[0][0][1])
        cache.commit(torch.full((2, 3), -1, dtype=torch.int32), int32(0, 0), torch.tensor([True, True]))
    assert cache.prefix_len.tolist() == [6, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_a_gpu_does_not_wait():
    cache = TreeCache(LAYERS, 2, 16, device="cuda")
    accepted, active = int32(2, 2)[:, None].cuda(), torch.tensor([True, True]).cuda()
    count = int32(1, 0).cuda()
    pair = tuple(t.cuda() for t in states(2, 3))
    for layer in range(LAYERS):
        cache.update(*pair, layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.commit(accepted, count, active)
        for layer in range(LAYERS):
            cache.update(*pair, layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.prefix_len.tolist() == [2, 1]
    assert torch.equal(cache.buffers[1][1, :, 1:4], pair[1][1])
