"""`kv_compact_`: the six of every op, and what is special about moving rows in place."""

import pytest
import torch

from specdec_kernels import kv_compact_
from specdec_kernels._ops import ops
from specdec_kernels.reference.kv_compact import kv_compact_ref

from .kv_caches import bits, carve, gather_rows, int32, make_storage, pad_paths, random_step

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

# (B, S, H, D), dtype, layout, shift in elements, and why.
CASES = [
    ((1, 16, 1, 1), torch.uint8, "bshd", 0),  # one byte a row
    ((2, 37, 2, 64), BF16, "bhsd", 0),  # the common cache
    ((3, 31, 3, 17), torch.float16, "bhsd", 1),  # 34-byte rows: lanes of 2 bytes
    ((2, 33, 5, 20), torch.float32, "bshd", 0),  # heads side by side: one 400-byte row
    ((2, 33, 5, 20), torch.float32, "bshd", 1),  # the same, 4 bytes off: lanes of 4 bytes
    ((2, 29, 2, 24), FP8, "sbhd", 8),  # 8-byte lanes, sequence outermost
    ((1, 64, 7, 13), torch.int8, "bhsd", 3),  # odd everything
    ((3, 40, 2, 80), BF16, "padded", 0),  # rows with gaps: the gaps are guards
    ((2, 32, 1, 3), torch.int64, "bshd", 0),  # 8-byte elements
    ((4, 63, 1, 256), torch.int32, "bhsd", 2),
]
IDS = [f"B{s[0]}-S{s[1]}-H{s[2]}-D{s[3]}-{str(d)[6:]}-{layout}-off{shift}" for s, d, layout, shift in CASES]


def check_against_gather(case, accepted, num_accepted, prefix_len, device) -> None:
    """Compact three caches of one storage layout each; the whole storage, guards included, must match the gather."""
    storages = [make_storage(*case) for _ in range(3)]
    expected = [storage.clone() for storage in storages]
    for storage in expected:
        gather_rows(carve(storage, *case), accepted, num_accepted, prefix_len)
    actual = [storage.to(device, copy=True) for storage in storages]
    kv_compact_(
        [carve(storage, *case) for storage in actual],
        *(t.to(device) for t in (accepted, num_accepted, prefix_len)),
    )
    for have, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(have.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_matches_gather(case, backend, device) -> None:
    batch, capacity = case[0][:2]
    for seed in range(4):
        accepted, num_accepted = random_step(batch, 13, seed)
        longest = max(0, capacity - 13)
        prefix_len = torch.randint(longest + 1, (batch,), dtype=torch.int32)
        check_against_gather(case, accepted, num_accepted, prefix_len, device)


@pytest.mark.parametrize("seed", range(40))
def test_random_trees(seed, backend, device) -> None:
    accepted, num_accepted = random_step(5, 3 + seed, seed)
    prefix_len = int32(0, 7, 1, 20, 3)
    check_against_gather(((5, 24 + seed, 2, 8), BF16, "bhsd", 0), accepted, num_accepted, prefix_len, device)


@pytest.mark.parametrize(
    ("paths", "prefix"),
    [
        ([[3, 4, 5]], [10]),  # rows 13, 14, 15 -> 11, 12, 13: row 13 is a source and a target
        ([[1, 2, 5]], [0]),  # the first two are in place
        ([[1, 2, 3, 4, 5]], [4]),  # all in place
        ([list(range(2, 30))], [0]),  # longer than any unrolling; a shift by one
        ([[], [2, 5], [1]], [5, 0, 9]),  # rows by different amounts, the first not at all
    ],
    ids=["overlap", "prefix-in-place", "all-in-place", "long", "ragged"],
)
def test_overlap(paths, prefix, backend, device) -> None:
    accepted, num_accepted = pad_paths(paths)
    case = ((len(paths), 41, 2, 8), torch.float32, "bhsd", 0)
    check_against_gather(case, accepted, num_accepted, int32(*prefix), device)


def test_layers_may_differ(backend, device) -> None:
    """Keys of 16, values of 8, hidden states, scales and token ids move in one call; a buffer may have its own S."""
    accepted, num_accepted = pad_paths([[2, 3], [1, 4]])
    prefix_len = int32(3, 0)
    caches = [
        torch.randn(2, 3, 20, 16, dtype=BF16).transpose(1, 2),
        torch.randn(2, 3, 20, 8).transpose(1, 2),
        torch.randn(2, 31, 48),
        torch.randn(2, 20, 1, dtype=torch.float16),
        torch.randint(1000, (2, 20)),
        torch.randn(2, 20, 0),
    ]
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        gather_rows(cache, accepted, num_accepted, prefix_len)
    caches = [cache.to(device) for cache in caches]
    kv_compact_(caches, *(t.to(device) for t in (accepted, num_accepted, prefix_len)))
    for have, want in zip(caches, expected, strict=True):
        assert torch.equal(have.cpu(), want)


def test_stacked_equals_list(backend, device) -> None:
    stacked = torch.randn(6, 2, 3, 20, 8).to(device)
    views = stacked.clone()
    step = [t.to(device) for t in (*pad_paths([[2, 5], [4]]), int32(3, 9))]
    kv_compact_(stacked, *step)
    kv_compact_([layer.transpose(1, 2) for layer in views], *step)
    assert torch.equal(stacked, views)


def test_index_tensors_may_be_strided(backend, device) -> None:
    accepted = int32(3, 9, 4, 9, 5, 9).view(3, 2)[:, :1].t().to(device)
    counts = int32(3, 0)[::2].to(device)
    assert accepted.stride() != (3, 1)
    cache = torch.arange(12.0, device=device).view(1, 12, 1)
    kv_compact_([cache], accepted, counts, int32(4).to(device))
    assert cache.flatten().tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 8, 9, 10, 11]


@pytest.mark.parametrize("num_accepted", [(3, -5), (99, 0)])
def test_skips_bad_moves_where_values_are_not_read(num_accepted, backend, device) -> None:
    """A direct call of the op is what a GPU or a compiled graph does: bad entries move nothing, good ones move."""
    cache = torch.arange(24.0, device=device).view(2, 12, 1)
    accepted = torch.tensor([[3, 1, 9], [3, 4, 5]], dtype=torch.int32, device=device)
    ops.kv_compact_.default([cache], accepted, int32(*num_accepted).to(device), int32(4, 2).to(device))
    want = torch.arange(24.0).view(2, 12, 1)
    want[0, 5] = 7  # entry 0; entry 1 would move upwards, entry 2 comes from row 13 of 12
    assert torch.equal(cache.cpu(), want)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_refuses_a_quantizer(backend) -> None:
    """Torch's own indexing of such a tensor ends the process, so a direct call is refused too."""
    cache = torch.empty(1, 12, 1, dtype=torch.qint8)
    for compact in (kv_compact_, ops.kv_compact_.default):
        with pytest.raises(TypeError, match="quantizer"):
            compact([cache], *step_of())


@pytest.mark.parametrize("prefix", [-1, -(2**31), 2**31 - 1])
def test_skips_prefixes_outside(prefix, backend, device) -> None:
    cache = torch.arange(12.0, device=device).view(1, 12, 1)
    step = (t.to(device) for t in (int32(2, 5).view(1, 2), int32(2), int32(prefix)))
    ops.kv_compact_.default([cache], *step)
    assert torch.equal(cache.cpu(), torch.arange(12.0).view(1, 12, 1))


@pytest.mark.parametrize(
    ("batch", "capacity", "heads", "width", "longest"),
    [(0, 8, 2, 4, 3), (2, 0, 2, 4, 3), (2, 8, 0, 4, 3), (2, 8, 2, 0, 3), (2, 8, 2, 4, 0)],
    ids=["B0", "S0", "H0", "D0", "N0"],
)
def test_empty(batch, capacity, heads, width, longest, backend, device) -> None:
    cache = torch.randn(batch, capacity, heads, width).to(device)
    before = cache.clone()
    accepted = torch.full((batch, longest), -1, dtype=torch.int32, device=device)
    zeros = torch.zeros(batch, dtype=torch.int32, device=device)
    kv_compact_([cache], accepted, zeros, zeros)
    kv_compact_([], accepted, zeros, zeros)
    kv_compact_(cache.transpose(1, 2)[None][:0], accepted, zeros, zeros)
    assert torch.equal(cache, before)


def test_offsets_beyond_2_to_the_31(backend, device) -> None:
    """The last rows of 2^31 + elements; the memory is virtual, few pages of it are touched."""
    capacity, width = 2**23 + 64, 256
    cache = torch.empty(1, capacity, width, dtype=torch.int8, device=device)
    prefix = capacity - 8
    cache[0, prefix + 1] = 1
    cache[0, prefix + 7] = 7
    kv_compact_([cache], *(t.to(device) for t in (int32(7).view(1, 1), int32(1), int32(prefix))))
    assert cache[0, prefix + 1].unique().tolist() == [7]


def test_opcheck(backend, device) -> None:
    caches = [torch.randn(2, 3, 20, 8, device=device).transpose(1, 2), torch.randn(2, 20, 4, device=device)]
    step = [t.to(device) for t in (*pad_paths([[2, 5], [4]]), int32(3, 9))]
    torch.library.opcheck(ops.kv_compact_.default, (caches, *step))


@pytest.mark.parametrize("stacked", [False, True])
def test_compiles_and_exports(stacked, backend, device) -> None:
    caches = torch.randn(4, 2, 3, 20, 8).to(device)
    step = [t.to(device) for t in (*pad_paths([[2, 5], [4]]), int32(3, 9))]
    expected = caches.clone()
    kv_compact_(expected, *step)

    class Step(torch.nn.Module):
        def forward(self, caches, accepted, num_accepted, prefix_len):
            kv_compact_(caches, accepted, num_accepted, prefix_len)
            return prefix_len + 1 + num_accepted

    for make in (
        lambda args: torch.compile(Step(), fullgraph=True, backend="aot_eager"),
        lambda args: torch.export.export(Step(), args).module(),
    ):
        actual = caches.clone()
        argument = actual if stacked else [layer.transpose(1, 2) for layer in actual.unbind()]
        make((argument, *step))(argument, *step)
        assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph() -> None:
    """Capture at one path, replay with others: nothing but the index tensors changes."""
    cache = torch.randn(4, 2, 3, 40, 8, device="cuda")
    accepted, num_accepted, prefix_len = (t.cuda() for t in (*pad_paths([[2, 5, 6], [4]]), int32(3, 9)))
    kv_compact_(cache.clone(), accepted, num_accepted, prefix_len)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_compact_(cache, accepted, num_accepted, prefix_len)
    for paths in ([[1, 2, 3], []], [[], [7, 8]], [[9], [3, 4, 5]]):
        step = pad_paths(paths, width=3)
        accepted.copy_(step[0])
        num_accepted.copy_(step[1])
        expected = cache.clone()
        kv_compact_ref([layer.transpose(1, 2) for layer in expected], accepted, num_accepted, prefix_len)
        graph.replay()
        assert torch.equal(cache, expected)


def step_of(accepted=((2, 5),), num_accepted=(2,), prefix_len=(3,)):
    return torch.tensor(accepted, dtype=torch.int32), int32(*num_accepted), int32(*prefix_len)


CACHE = torch.zeros(1, 12, 2, 4)
REJECTED = {
    "caches-none": (
        (None, *step_of()),
        TypeError,
        "caches must be a list or tuple of tensors, or one tensor, got NoneType",
    ),
    "caches-iterator": ((iter([CACHE]), *step_of()), TypeError, "caches must be a list or tuple .* got list_iterator"),
    "sparse": (
        ([CACHE.to_sparse()], *step_of()),
        TypeError,
        r"caches\[0\] must be a dense tensor, got layout torch.sparse_coo",
    ),
    "prefix-sparse": (([CACHE], *step_of()[:2], step_of()[2].to_sparse()), TypeError, "prefix_len must be a dense"),
    "cache-kind": (([None], *step_of()), TypeError, r"caches\[0\] must be a torch.Tensor, got NoneType"),
    "cache-dims": (([CACHE[0, 0, 0]], *step_of()), ValueError, r"2, 3 or 4 dimensions, got shape \(4,\)"),
    "cache-batch": (([CACHE, CACHE.repeat(2, 1, 1, 1)], *step_of()), ValueError, r"caches\[1\] .* \(1, S, H, D\)"),
    "stacked-dims": ((CACHE, *step_of()), ValueError, r"caches must have shape \(2L, 1, H, S, D\)"),
    "stacked-batch": ((CACHE.expand(2, 2, 12, 2, 4), *step_of()), ValueError, r"\(2L, 1, H, S, D\)"),
    "stacked-expanded": ((CACHE.expand(2, 1, 12, 2, 4), *step_of()), ValueError, "must not be expanded"),
    "last-stride": (([CACHE.transpose(2, 3)], *step_of()), ValueError, r"caches\[0\] must have stride 1"),
    "expanded": (([CACHE[:, :1].expand(1, 12, 2, 4)], *step_of()), ValueError, "must not be expanded"),
    "element-size": (([CACHE.to(torch.complex128)], *step_of()), ValueError, "elements of 1, 2, 4 or 8 bytes"),
    "device": (([CACHE.to("meta")], *step_of()), ValueError, r"caches\[0\] must be on cpu, got meta"),
    "grad": (([CACHE.clone().requires_grad_()], *step_of()), RuntimeError, r"caches\[0\] requires grad"),
    "accepted-dims": (([CACHE], int32(2, 5), *step_of()[1:]), ValueError, r"accepted must have shape \(B, N\)"),
    "accepted-dtype": (([CACHE], step_of()[0].long(), *step_of()[1:]), TypeError, "accepted must be int32, got int64"),
    "num-shape": (([CACHE], *step_of(num_accepted=(2, 2))), ValueError, r"num_accepted must have shape \(1,\)"),
    "prefix-shape": (([CACHE], *step_of(prefix_len=(3, 3))), ValueError, r"prefix_len must have shape \(1,\)"),
    "num-range": (([CACHE], *step_of(num_accepted=(3,))), ValueError, r"num_accepted must be in \[0, 2\], got 3"),
    "num-negative": (([CACHE], *step_of(num_accepted=(-1,))), ValueError, "got -1 in row 0"),
    "cycle": (([CACHE], *step_of(((2, 1),))), ValueError, r"increase strictly from 1 up, got \[2, 1\] in row 0"),
    "repeated": (([CACHE], *step_of(((2, 2),))), ValueError, "increase strictly"),
    "root": (([CACHE], *step_of(((0, 2),))), ValueError, "increase strictly from 1 up"),
    "prefix-negative": (([CACHE], *step_of(prefix_len=(-1,))), ValueError, "prefix_len must be at least 0, got -1"),
    "capacity": (([CACHE], *step_of(prefix_len=(7,))), ValueError, r"below the capacity 12, got 7 \+ 5 in row 0"),
    "smallest-capacity": (([CACHE, CACHE[:, :8]], *step_of()), ValueError, "below the capacity 8"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), REJECTED.values(), ids=REJECTED.keys())
def test_rejects(arguments, kind, message) -> None:
    before = CACHE.clone()
    with pytest.raises(kind, match=f"^kv_compact_: .*{message}"):
        kv_compact_(*arguments)
    assert torch.equal(CACHE, before)


def test_grad_mode_off_accepts_parameters() -> None:
    cache = torch.nn.Parameter(torch.arange(12.0).view(1, 12, 1))
    with torch.no_grad():
        kv_compact_([cache], *step_of())
    assert cache.flatten().tolist()[:7] == [0, 1, 2, 3, 5, 8, 6]


def test_special_bit_patterns_survive(backend, device) -> None:
    """Signalling NaNs, infinities and negative zero are bytes like others."""
    patterns = torch.tensor([0x7F800001, 0x7FC0BEEF, 0x7F800000, -0x80000000], dtype=torch.int32)
    cache = patterns.view(torch.float32).repeat(1, 12, 1).to(device)
    cache[0, 4] = 0
    kv_compact_([cache], *(t.to(device) for t in step_of()))
    assert torch.equal(bits(cache[0, 4].cpu()), bits(patterns))
