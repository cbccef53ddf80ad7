"""The option ``new_len`` of both compaction ops, and many random trees over pages of all sizes."""

import pytest
import torch
from torch import Tensor

from specdec_kernels import kv_compact_, paged_kv_compact_
from specdec_kernels._ops import ops

from .kv_caches import gather_pages, gather_rows, int32, pad_paths, random_step, shuffled_table

FORMS = pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])


def make_call(paged: bool, device, batch: int = 3, seed: int = 0):
    """Return an op, its arguments, and what the caches must be after it."""
    accepted, num_accepted = random_step(batch, 13, seed)
    prefix_len = torch.randint(20, (batch,), dtype=torch.int32)
    caches = [torch.randn(batch * 5, 8, 2, 4) if paged else torch.randn(batch, 40, 2, 4) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    step = (*((shuffled_table(batch, 5, seed),) if paged else ()), accepted, num_accepted, prefix_len)
    for cache in expected:
        (gather_pages if paged else gather_rows)(cache, *step)
    arguments = ([cache.to(device) for cache in caches], *(t.to(device) for t in step))
    return (paged_kv_compact_ if paged else kv_compact_), arguments, expected


def next_lengths(arguments) -> Tensor:
    return arguments[-1] + 1 + arguments[-2]


@FORMS
@pytest.mark.parametrize("seed", range(5))
def test_writes_the_next_lengths(seed, paged, backend, device) -> None:
    compact, arguments, expected = make_call(paged, device, seed=seed)
    before = [t.clone() for t in arguments[1:]]
    storage = torch.full((3, 2), -77, dtype=torch.int32, device=device)
    compact(*arguments, new_len=storage[:, 1])  # strided
    assert torch.equal(storage[:, 1], next_lengths(arguments))
    assert storage[:, 0].eq(-77).all()
    for have, want in zip(arguments[1:], before, strict=True):
        assert torch.equal(have, want)
    for have, want in zip(arguments[0], expected, strict=True):
        assert torch.equal(have.cpu(), want)


@FORMS
def test_two_tensors_take_turns(paged, backend, device) -> None:
    """Steps without a look at any length: the lengths of each are those the step before wrote."""
    compact, (caches, *step), _ = make_call(paged, device, batch=2)
    accepted, counts = (t.to(device) for t in pad_paths([[2, 3], [1]]))
    lengths = [int32(4, 0).to(device), int32(0, 0).to(device)]
    for turn in range(4):
        now, after = lengths[turn % 2], lengths[1 - turn % 2]
        compact(caches, *step[:-3], accepted, counts, now, new_len=after)
    assert lengths[0].tolist() == [4 + 4 * 3, 0 + 4 * 2]


@FORMS
def test_nothing_to_move(paged, backend, device) -> None:
    """No caches, no nodes, no rows: the lengths are written all the same."""
    compact, (caches, *step), _ = make_call(paged, device)
    accepted, counts, prefix_len = step[-3:]
    new_len = torch.zeros_like(prefix_len)
    compact([], *step, new_len=new_len)
    assert torch.equal(new_len, prefix_len + 1 + counts)
    none = torch.zeros_like(counts)
    compact(caches, *step[:-3], accepted[:, :0], none, prefix_len, new_len=new_len)
    assert torch.equal(new_len, prefix_len + 1)
    compact([c[:0] for c in caches], *(t[:0] for t in step), new_len=new_len[:0])
    assert torch.equal(new_len, prefix_len + 1)


@FORMS
def test_rows_that_do_not_grow(paged, backend, device) -> None:
    """A direct call, as on a GPU: a negative count (a row that has ended) or prefix changes nothing; N is the most."""
    _, (caches, *step), _ = make_call(paged, device, batch=4)
    before = [cache.clone() for cache in caches]
    accepted = torch.full((4, 2), -1, dtype=torch.int32, device=device)
    counts, prefix_len = int32(-1, -9, 0, 5).to(device), int32(7, 8, -3, 2**31 - 9).to(device)
    new_len = torch.zeros_like(counts)
    op = ops.paged_kv_compact_ if paged else ops.kv_compact_
    op.default(caches, *step[:-3], accepted, counts, prefix_len, new_len=new_len)
    assert new_len.tolist() == [7, 8, -3, 2**31 - 9 + 3]
    for have, want in zip(caches, before, strict=True):
        assert torch.equal(have, want)


@FORMS
def test_opcheck(paged, backend, device) -> None:
    _, arguments, _ = make_call(paged, device)
    op = ops.paged_kv_compact_ if paged else ops.kv_compact_
    torch.library.opcheck(op.default, arguments, {"new_len": torch.zeros(3, dtype=torch.int32, device=device)})


@FORMS
def test_compiles_and_exports(paged, backend, device) -> None:
    compact, arguments, expected = make_call(paged, device)

    class Step(torch.nn.Module):
        def forward(self, new_len, *arguments):
            compact(*arguments, new_len=new_len)
            return new_len + 0

    for make in (
        lambda args: torch.compile(Step(), fullgraph=True, backend="aot_eager"),
        lambda args: torch.export.export(Step(), args).module(),
    ):
        caches = [cache.clone() for cache in arguments[0]]
        args = (torch.zeros_like(arguments[-1]), caches, *arguments[1:])
        result = make(args)(*args)
        assert torch.equal(args[0], next_lengths(arguments))
        assert torch.equal(result, args[0])
        for have, want in zip(caches, expected, strict=True):
            assert torch.equal(have.cpu(), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@FORMS
def test_cuda_graph(paged) -> None:
    compact, arguments, expected = make_call(paged, "cuda")
    caches, new_len = [cache.clone() for cache in arguments[0]], torch.zeros_like(arguments[-1])
    compact([cache.clone() for cache in caches], *arguments[1:], new_len=new_len)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compact(caches, *arguments[1:], new_len=new_len)
    new_len.zero_()
    graph.replay()
    assert torch.equal(new_len, next_lengths(arguments))
    for have, want in zip(caches, expected, strict=True):
        assert torch.equal(have.cpu(), want)


REJECTED = {
    "kind": (lambda prefix_len: 3, TypeError, "new_len must be a torch.Tensor, got int"),
    "shape": (lambda prefix_len: prefix_len.new_zeros(2), ValueError, r"new_len must have shape \(3,\), got \(2,\)"),
    "dtype": (lambda prefix_len: prefix_len.long(), TypeError, "new_len must be int32, got int64"),
    "device": (lambda prefix_len: prefix_len.to("meta"), ValueError, "new_len must be on cpu, got meta"),
    "expanded": (
        lambda prefix_len: int32(0).expand(3),
        ValueError,
        r"new_len must not be expanded, got strides \(0,\)",
    ),
    "itself": (lambda prefix_len: prefix_len, ValueError, "new_len must have memory of its own"),
    "a view": (lambda prefix_len: prefix_len[:], ValueError, "new_len must have memory of its own"),
}


@FORMS
@pytest.mark.parametrize(("make", "kind", "message"), REJECTED.values(), ids=REJECTED.keys())
def test_rejects(make, kind, message, paged) -> None:
    compact, arguments, _ = make_call(paged, "cpu")
    before = [cache.clone() for cache in arguments[0]]
    with pytest.raises(kind, match=f"^{compact.__name__}: {message}"):
        compact(*arguments, new_len=make(arguments[-1]))
    for have, want in zip(arguments[0], before, strict=True):
        assert torch.equal(have, want)


def shared_memory(name, arguments):
    """Let an argument and ``new_len`` have one element in common; return the arguments and ``new_len``."""
    arguments = list(arguments)
    place = {"block_table": 1, "accepted": -3, "num_accepted": -2, "prefix_len": -1}[name]
    values, count = arguments[place], arguments[place].numel()
    storage = torch.zeros(count + 2, dtype=torch.int32)
    arguments[place] = storage[:count].view(values.shape).copy_(values)
    return arguments, storage[count - 1 :]


@pytest.mark.parametrize(
    ("paged", "name"),
    [(paged, name) for paged in (False, True) for name in ("accepted", "num_accepted", "prefix_len")]
    + [(True, "block_table")],
)
def test_rejects_memory_of_the_inputs(name, paged) -> None:
    """The last element of the argument is the first of ``new_len``; lengths side by side in one buffer are fine."""
    compact, arguments, _ = make_call(paged, "cpu")
    arguments, new_len = shared_memory(name, arguments)
    with pytest.raises(
        ValueError, match=f"^{compact.__name__}: new_len must have memory of its own, got that of {name}$"
    ):
        compact(*arguments, new_len=new_len)
    both = torch.stack([arguments[-1], new_len], dim=1)
    compact(*arguments[:-1], both[:, 0], new_len=both[:, 1])
    assert torch.equal(both[:, 1], both[:, 0] + 1 + arguments[-2])


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64, 256])
def test_many_random_trees(page_size, backend, device) -> None:
    """200 topological trees of 2 to 41 nodes, each in a cache whose every byte counts, dense and in shuffled pages."""
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        num_nodes = 2 + seed % 40
        accepted, num_accepted = random_step(2, num_nodes, seed)
        prefix_len = torch.randint(12, (2,), dtype=torch.int32, generator=generator)
        max_pages = -(-(11 + num_nodes) // page_size)
        table = shuffled_table(2, max_pages, seed)
        pool = torch.randint(256, (2 * max_pages, page_size, 3), dtype=torch.uint8, generator=generator)
        dense = torch.randint(256, (2, 11 + num_nodes, 3), dtype=torch.uint8, generator=generator)
        step = [t.to(device) for t in (accepted, num_accepted, prefix_len)]
        for cache, gather, compact, structure in (
            (pool, gather_pages, paged_kv_compact_, (table,)),
            (dense, gather_rows, kv_compact_, ()),
        ):
            actual = cache.to(device, copy=True)
            compact([actual], *(t.to(device) for t in structure), *step)
            gather(cache, *structure, accepted, num_accepted, prefix_len)
            assert torch.equal(actual.cpu(), cache), f"seed {seed}"
