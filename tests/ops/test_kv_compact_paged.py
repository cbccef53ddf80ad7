"""`paged_kv_compact_`: pages of any size and order, paths across page borders."""

import pytest
import torch

from specdec_kernels import kv_compact_, paged_kv_compact_
from specdec_kernels._ops import ops
from specdec_kernels.reference.kv_compact import paged_kv_compact_ref

from .kv_caches import carve, gather_pages, int32, make_storage, pad_paths, random_step, shuffled_table

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

# Page size, heads, width, dtype, layout, shift in elements: NHD is bshd, HND is bhsd.
CASES = [
    (1, 2, 64, BF16, "bshd", 0),
    (2, 3, 17, torch.float16, "bhsd", 1),
    (7, 2, 24, FP8, "bshd", 8),
    (16, 2, 64, BF16, "bshd", 0),
    (16, 5, 20, torch.float32, "bhsd", 1),
    (64, 1, 13, torch.int8, "padded", 3),
    (256, 2, 8, torch.uint8, "sbhd", 0),
]
IDS = [f"page{p}-H{h}-D{d}-{str(t)[6:]}-{layout}-off{shift}" for p, h, d, t, layout, shift in CASES]


def check_against_gather(case, block_table, accepted, num_accepted, prefix_len, device) -> None:
    """Compact two pools of one layout; their whole storage, guards included, must match the gather."""
    page_size, heads, width, *rest = case
    spec = ((block_table.numel() + 2, page_size, heads, width), *rest)
    storages = [make_storage(*spec) for _ in range(2)]
    expected = [storage.clone() for storage in storages]
    step = (block_table, accepted, num_accepted, prefix_len)
    for storage in expected:
        gather_pages(carve(storage, *spec), *step)
    actual = [storage.to(device, copy=True) for storage in storages]
    paged_kv_compact_([carve(storage, *spec) for storage in actual], *(t.to(device) for t in step))
    for have, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(have.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_matches_gather(case, backend, device) -> None:
    page_size = case[0]
    max_pages = -(-60 // page_size)
    for seed in range(8):
        accepted, num_accepted = random_step(3, 20, seed)
        prefix_len = torch.randint(max_pages * page_size - 20 + 1, (3,), dtype=torch.int32)
        table = shuffled_table(3, max_pages, seed)
        check_against_gather(case, table, accepted, num_accepted, prefix_len, device)


@pytest.mark.parametrize("prefix", [62, 63, 64, 125, 126, 127])
def test_paths_across_page_borders(prefix, backend, device) -> None:
    """Pages of 64 slots: sources and targets on both sides of a border, and on it."""
    accepted, num_accepted = pad_paths([[2, 3, 5], [1, 2, 4]])
    case = (64, 2, 8, BF16, "bshd", 0)
    check_against_gather(case, shuffled_table(2, 3, 5), accepted, num_accepted, int32(prefix, prefix - 61), device)


def test_one_page_equals_dense(backend, device) -> None:
    """A page as long as the sequence, in order, is a dense cache."""
    pool = torch.randn(3, 40, 2, 8).to(device)
    dense = pool.clone()
    step = [t.to(device) for t in (*random_step(3, 13, 2), int32(3, 0, 20))]
    paged_kv_compact_([pool], torch.arange(3, dtype=torch.int32, device=device).unsqueeze(1), *step)
    kv_compact_([dense], *step)
    assert torch.equal(pool, dense)


def test_pools_may_differ(backend, device) -> None:
    """Rows of 4-bit values packed in bytes, and their scales, in pools of different length; also as one tensor."""
    table = int32(4, 0, 2).view(1, 3)
    step = (table, *pad_paths([[3, 4, 6]]), int32(1))
    packed, scales = torch.randint(256, (5, 4, 2, 5), dtype=torch.uint8), torch.randn(9, 4, 2, dtype=torch.float16)
    expected = [packed.clone(), scales.clone()]
    for pool in expected:
        gather_pages(pool, *step)
    actual = [packed.to(device, copy=True), scales.to(device, copy=True)]
    paged_kv_compact_(actual, *(t.to(device) for t in step))
    assert torch.equal(actual[0].cpu(), expected[0])
    assert torch.equal(actual[1].cpu(), expected[1])
    stacked = torch.stack([packed, packed.flip(0)]).to(device)
    paged_kv_compact_(stacked, *(t.to(device) for t in step))
    assert torch.equal(stacked[0].cpu(), expected[0])


def test_unused_table_entries_are_not_read(backend, device) -> None:
    """Entries of no page around those that are needed, and a row of a batch that has no pages at all."""
    table = int32(-1, 3, 1, -7, -1, -1, -1, -1).view(2, 4)
    accepted, num_accepted = pad_paths([[2, 5], []])
    check_against_gather((4, 1, 4, BF16, "bshd", 0), table, accepted, num_accepted, int32(4, 0), device)


@pytest.mark.parametrize("table", [(0, -1), (0, 4), (-5, 1), (2**31 - 1, 1)])
def test_skips_bad_pages_where_values_are_not_read(table, backend, device) -> None:
    """A direct call of the op, as on a GPU: with prefix 1, entry 0 moves 3 -> 2, entry 1 moves 5 -> 3."""
    pool = torch.arange(16.0, device=device).view(4, 4, 1)
    step = (int32(*table).view(1, 2), int32(2, 4).view(1, 2), int32(2), int32(1))
    ops.paged_kv_compact_.default([pool], *(t.to(device) for t in step))
    want = torch.arange(16.0).view(4, 4, 1)
    if table[0] == 0:
        want[0, 2] = 3
    assert torch.equal(pool.cpu(), want)


def test_skips_positions_beyond_the_table(backend, device) -> None:
    pool = torch.arange(16.0, device=device).view(4, 4, 1)
    step = (int32(2).view(1, 1), int32(2, 3).view(1, 2), int32(2), int32(1))
    ops.paged_kv_compact_.default([pool], *(t.to(device) for t in step))
    want = torch.arange(16.0).view(4, 4, 1)
    want[2, 2] = 11  # position 3 -> 2; position 4 has no page
    assert torch.equal(pool.cpu(), want)


@pytest.mark.parametrize(
    ("batch", "pages", "heads", "longest"), [(0, 4, 2, 3), (2, 0, 2, 3), (2, 4, 0, 3), (2, 4, 2, 0)]
)
def test_empty(batch, pages, heads, longest, backend, device) -> None:
    pool = torch.randn(pages, 4, heads, 8).to(device)
    before = pool.clone()
    accepted = torch.full((batch, longest), -1, dtype=torch.int32, device=device)
    zeros = torch.zeros(batch, dtype=torch.int32, device=device)
    for max_pages in (0, 3):
        table = torch.zeros(batch, max_pages, dtype=torch.int32, device=device)
        paged_kv_compact_([pool], table, accepted, zeros, zeros)
        paged_kv_compact_([], table, accepted, zeros, zeros)
        paged_kv_compact_(pool[None][:0], table, accepted, zeros, zeros)
    assert torch.equal(pool, before)


def test_offsets_beyond_2_to_the_31(backend, device) -> None:
    """Pages behind 2^31 elements; the memory is virtual, few pages of it are touched."""
    num_pages = 2**19 + 2
    pool = torch.empty(num_pages, 16, 256, dtype=torch.int8, device=device)
    pool[num_pages - 1, 1] = 1
    pool[num_pages - 2, 3] = 7
    table = int32(num_pages - 1, num_pages - 2).view(1, 2)
    paged_kv_compact_([pool], *(t.to(device) for t in (table, int32(19).view(1, 1), int32(1), int32(0))))
    assert pool[num_pages - 1, 1].unique().tolist() == [7]


def small_step(device):
    table = int32(3, 0, 1, 2, 4, 5).view(2, 3)
    return [t.to(device) for t in (table, *pad_paths([[2, 5], [4]]), int32(3, 2))]


def test_opcheck(backend, device) -> None:
    pools = [torch.randn(6, 3, 4, 8, device=device).transpose(1, 2), torch.randn(7, 4, 4, device=device)]
    torch.library.opcheck(ops.paged_kv_compact_.default, (pools, *small_step(device)))


@pytest.mark.parametrize("stacked", [False, True])
def test_compiles_and_exports(stacked, backend, device) -> None:
    pools, step = torch.randn(4, 6, 4, 3, 8).to(device), small_step(device)
    expected = pools.clone()
    paged_kv_compact_(expected, *step)

    class Step(torch.nn.Module):
        def forward(self, pools, block_table, accepted, num_accepted, prefix_len):
            paged_kv_compact_(pools, block_table, accepted, num_accepted, prefix_len)
            return prefix_len + 1 + num_accepted

    for make in (
        lambda args: torch.compile(Step(), fullgraph=True, backend="aot_eager"),
        lambda args: torch.export.export(Step(), args).module(),
    ):
        actual = pools.clone()
        argument = actual if stacked else list(actual.unbind())
        make((argument, *step))(argument, *step)
        assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph() -> None:
    pool, step = torch.randn(6, 4, 3, 8, device="cuda"), small_step("cuda")
    paged_kv_compact_([pool.clone()], *step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_kv_compact_([pool], *step)
    for paths in ([[1, 2], []], [[], [6, 7]], [[3, 4], [2, 3]]):
        for have, want in zip(step[1:3], pad_paths(paths, width=2), strict=True):
            have.copy_(want)
        expected = pool.clone()
        paged_kv_compact_ref([expected], *step)
        graph.replay()
        assert torch.equal(pool, expected)


POOL = torch.zeros(4, 4, 2, 8)


def step_of(table=(3, 0, 1), accepted=(2, 5), num_accepted=2, prefix_len=3):
    return int32(*table).view(1, -1), int32(*accepted).view(1, -1), int32(num_accepted), int32(prefix_len)


REJECTED = {
    "caches-none": (
        (None, *step_of()),
        TypeError,
        "caches must be a list or tuple of tensors, or one tensor, got NoneType",
    ),
    "table-sparse": (([POOL], step_of()[0].to_sparse(), *step_of()[1:]), TypeError, "block_table must be a dense"),
    "cache-kind": (([None], *step_of()), TypeError, r"caches\[0\] must be a torch.Tensor, got NoneType"),
    "cache-dims": (([POOL[0, 0, 0]], *step_of()), ValueError, "2, 3 or 4 dimensions"),
    "page-zero": (([POOL[:, :0]], *step_of()), ValueError, r"one page size of at least 1, got \[0\]"),
    "page-sizes": (([POOL, POOL[:, :2]], *step_of()), ValueError, r"one page size of at least 1, got \[4, 2\]"),
    "stacked-dims": ((POOL, *step_of()), ValueError, r"caches must have shape \(2L, pages, page, H, D\)"),
    "last-stride": (([POOL.transpose(2, 3)], *step_of()), ValueError, r"caches\[0\] must have stride 1"),
    "expanded": (([POOL[:1].expand(4, 4, 2, 8)], *step_of()), ValueError, "must not be expanded"),
    "element-size": (([POOL.to(torch.complex128)], *step_of()), ValueError, "elements of 1, 2, 4 or 8 bytes"),
    "grad": (([POOL.clone().requires_grad_()], *step_of()), RuntimeError, r"caches\[0\] requires grad"),
    "table-dims": (([POOL], int32(0), *step_of()[1:]), ValueError, r"block_table must have shape \(1, max_pages\)"),
    "table-dtype": (([POOL], step_of()[0].long(), *step_of()[1:]), TypeError, "block_table must be int32"),
    "table-device": (([POOL], step_of()[0].to("meta"), *step_of()[1:]), ValueError, "block_table must be on cpu"),
    "not-increasing": (([POOL], *step_of(accepted=(5, 2))), ValueError, r"increase strictly from 1 up, got \[5, 2\]"),
    "num-range": (([POOL], *step_of(num_accepted=3)), ValueError, r"num_accepted must be in \[0, 2\], got 3"),
    "prefix-negative": (([POOL], *step_of(prefix_len=-1)), ValueError, "prefix_len must be at least 0, got -1"),
    "table-short": (([POOL], *step_of(prefix_len=7)), ValueError, "more than 3 columns to cover position 12 of row 0"),
    "no-page": (([POOL], *step_of(table=(3, 0, -1))), ValueError, r"pages in \[0, 3\], got \[0, -1\] in row 0"),
    "page-beyond": (([POOL], *step_of(table=(3, 4, 1))), ValueError, r"pages in \[0, 3\], got \[4, 1\] in row 0"),
    "smallest-pool": (([POOL, POOL[:1]], *step_of()), ValueError, r"pages in \[0, 0\]"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), REJECTED.values(), ids=REJECTED.keys())
def test_rejects(arguments, kind, message) -> None:
    before = POOL.clone()
    with pytest.raises(kind, match=f"^paged_kv_compact_: .*{message}"):
        paged_kv_compact_(*arguments)
    assert torch.equal(POOL, before)
