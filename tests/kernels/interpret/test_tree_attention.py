"""The Triton kernel against the exact answer, pairwise over its options, on the interpreter."""

import math

import pytest
import torch

from specdec_kernels.kernels import _common
from specdec_kernels.kernels.tree_attention import paged_tree_attention_triton, plan_of, tree_attention_triton
from specdec_kernels.reference.tree_attention import tree_attention_ref
from specdec_kernels.tree import pack_mask
from tests.kernels.meter import measure
from tests.kernels.pairwise import pairwise
from tests.ops.attention_cases import Case, chain, check, int32, make_case

from .attention import attend, force_splits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

GRID = pairwise(
    {
        "dtype": [BF16, FP32, FP16],
        "cache": [None, torch.float8_e4m3fn, torch.int8],
        "nodes": [7, 1, 33, 65],
        "prefix": [(63, 1), (0, 100), (64, 37)],
        "heads": [(4, 1), (2, 2), (3, 1)],
        "dims": [(16, 16), (80, 80), (24, 16), (192, 128)],
        "window": [None, 1, 37, 1000],
        "softcap": [None, 2.0],
        "sinks": [False, True],
        "scale": [None, -0.3],
        "page": [0, 16, 1, 64, 256],
        "layout": ["bhsd", "gaps"],
        "split": [False, True],
    }
)


def case_id(options: dict) -> str:
    words = [str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else str(v) for v in options.values()]
    return "-".join(w.replace(" ", "") for w in words)


def quantise(case: Case, dtype: torch.dtype) -> None:
    case.k, case.v = ((x.float() * 20).to(dtype) for x in (case.k, case.v))
    case.options |= {"k_scale": torch.rand(case.k.shape[2]) * 0.05, "v_scale": torch.rand(()) * 0.05}


@pytest.mark.parametrize("o", GRID, ids=case_id)
def test_matches_exact(o: dict, monkeypatch) -> None:
    case = make_case(2, o["prefix"], o["nodes"], o["heads"], o["dims"], o["dtype"], o["layout"], trees=2)
    case.options |= {name: o[name] for name in ("window", "softcap", "scale")}
    if o["sinks"]:
        case.options["sinks"] = torch.randn(o["heads"][0])
    if o["cache"] is not None:
        quantise(case, o["cache"])
    if o["split"]:
        force_splits(monkeypatch, 32)
    with measure():  # raises where anything else than an element of an argument is read or written
        result = attend(case, o["page"], "hnd" if o["layout"] == "gaps" else "nhd")
    check(case, result)


@pytest.mark.parametrize(
    ("nodes", "heads", "dims"),
    [
        *((17, (16, 1), (16, 16)), (3, (64, 1), (16, 16))),
        *((3, (4, 4), (256, 256)), (5, (2, 1), (96, 112)), (5, (4, 2), (64, 64)), (5, (4, 2), (128, 128))),
        *((5, (4, 2), (112, 112)), (5, (4, 2), (192, 192))),
    ],
    ids=["rows-above-256", "group-64", "D256", "D96-Dv112", "D64", "D128", "D112", "D192"],
)
def test_tiles(nodes, heads, dims) -> None:
    case = make_case(2, (70, 5), nodes, heads, dims, BF16, trees=2)
    check(case, attend(case))


@pytest.mark.parametrize(
    ("dims", "layout", "piece"),
    [
        *(((256, 256), "bhsd", 64), ((192, 48), "bhsd", 64), ((48, 256), "bhsd", 64)),
        *(((200, 256), "gaps", 32), ((130, 1), "gaps", 32)),
    ],
)
@pytest.mark.parametrize("page", [0, 4], ids=["contiguous", "paged"])
def test_fp32_takes_many_dims_in_pieces(page, dims, layout, piece) -> None:
    """Each dim once, none of a neighbour: 256 are four pieces of 64, of 200 and 130 the last is not whole."""
    case = make_case(2, (35, 5), 5, (4, 2), dims, FP32, layout, trees=2, window=30)
    assert plan_of(case.q, case.k, case.v).block_d == piece
    with measure():  # raises where anything else is read
        check(case, attend(case, page))


@pytest.mark.parametrize("page", [7, 100])
def test_pages_of_any_size(page) -> None:
    case = make_case(2, (70, 5), 9, (4, 2), dtype=BF16, trees=2)
    case.k, case.v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % page)) for x in (case.k, case.v))
    quantise(case, torch.int8)
    case.options["v_scale"] = torch.rand(2) * 0.05  # one for each head
    check(case, attend(case, page))


@pytest.mark.parametrize("parents", ["chain", "random"])
def test_many_mask_words(parents) -> None:
    case = make_case(1, (13,), 300, (1, 1), (16, 16), FP16)
    if parents == "chain":
        case.parents = [chain(300)]
    check(case, attend(case))


def test_the_widest_mask() -> None:
    case = make_case(1, (13,), 1024, (1, 1), (16, 16), FP16)
    expected = tree_attention_ref(*(x.double() if x.is_floating_point() else x for x in case.args()))
    torch.testing.assert_close(attend(case), (expected[0].half(), expected[1].float()), rtol=2e-3, atol=2e-4)


def test_bytes_of_fp8_on_older_gpus(monkeypatch) -> None:
    """Where Triton cannot convert float8_e4m3fn the kernel takes the bytes apart: all 256 of them, NaN included."""
    every_byte = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    case = make_case(1, (255,), 1, (1, 1), (16, 16), BF16)
    case.q = torch.zeros_like(case.q)  # every key weighs the same
    case.k = torch.zeros(1, 256, 1, 16).to(torch.float8_e4m3fn)
    case.v = torch.zeros(1, 256, 1, 256, dtype=torch.float8_e4m3fn)
    case.v.view(torch.uint8)[0, range(256), 0, range(256)] = every_byte.view(torch.uint8)
    with _common.pretend_device(_common.Device(("default",), 1, has_fp8=False)):
        out, _ = attend(case)
    expected = every_byte.float() / 256
    nan = expected.isnan()
    assert nan.sum() == 2
    assert out[0, 0, 0, nan].isnan().all()
    torch.testing.assert_close(out[0, 0, 0, ~nan].float(), expected[~nan].to(BF16).float(), rtol=0, atol=0)


@pytest.mark.parametrize("split", [False, True], ids=["one-split", "splits"])
def test_unseen_rows_may_be_nan(split, monkeypatch) -> None:
    """Rows behind the tree, rows in front of every window, and pages of nobody."""
    if split:
        force_splits(monkeypatch, 32)
    case = make_case(2, (90, 70), 9, (4, 2), (16, 16), trees=2, window=20)
    expected = attend(case)
    for row, prefix in enumerate(case.prefix):
        for cache in (case.k, case.v):
            cache[row, : prefix - 19] = math.nan
            cache[row, prefix + 9 :] = math.nan
    for page in (0, 16, 64):
        torch.testing.assert_close(attend(case, page, garbage=math.nan), expected, rtol=0, atol=0)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["plain", "sinks"])
def test_padding_nodes_see_nothing(sinks) -> None:
    case = make_case(2, (40, 3), 9, (4, 2), sinks=sinks)
    q, k, v, mask, prefix_len = case.args()
    expected = attend(case)
    mask = mask.expand(2, -1, -1).clone()
    mask[1, 7:] = 0
    k[1, 10:], v[1, 10:] = math.nan, math.nan
    options = dict.fromkeys(("scale", "softcap", "window", "k_scale", "v_scale")) | {"sinks": sinks}
    out, lse = tree_attention_triton(q, k, v, mask, prefix_len, **options)
    kept = torch.ones(2, 9, dtype=torch.bool)
    kept[1, 7:] = False
    torch.testing.assert_close((out[kept], lse[kept]), (expected[0][kept], expected[1][kept]), rtol=0, atol=0)
    assert (out[~kept] == 0).all()
    torch.testing.assert_close(lse[~kept], (torch.full((4,), -math.inf) if sinks is None else sinks).expand(2, 4))


def test_nodes_in_any_order() -> None:
    """The kernel follows the bits; it does not rely on parents coming before their children."""
    case = make_case(1, (21,), 70, (2, 1))
    order = torch.randperm(70)
    q, k, v, mask, prefix_len = case.args()
    dense = torch.zeros(70, 70, dtype=torch.bool)
    for node in range(70):
        for other in range(70):
            dense[node, other] = bool(int(mask[0, node, other // 64]) >> (other % 64) & 1)
    k2, v2 = k.clone(), v.clone()
    k2[:, 21:91], v2[:, 21:91] = k[:, 21 + order], v[:, 21 + order]
    shuffled = pack_mask(dense[order][:, order])[None]
    options = dict.fromkeys(("scale", "softcap", "window", "sinks", "k_scale", "v_scale"))
    out, lse = tree_attention_triton(q[:, order], k2, v2, shuffled, prefix_len, **options)
    expected_out, expected_lse = attend(case)
    torch.testing.assert_close(out, expected_out[:, order])
    torch.testing.assert_close(lse, expected_lse[:, order])


def test_rows_do_not_depend_on_the_batch(monkeypatch) -> None:
    """Bit for bit, with splits: neighbours, slot and batch size change nothing."""
    force_splits(monkeypatch, 32)
    case = make_case(3, (200, 0, 77), 5, (4, 2), dtype=BF16, trees=3)
    together = attend(case)
    for row in range(3):
        alone = attend(case.row(row))
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])


def test_empty_batch() -> None:
    case = make_case(2, (4, 4), 3)
    case.q, case.k, case.v = case.q[:0], case.k[:0], case.v[:0]
    case.prefix = []
    out, lse = attend(case)
    assert (out.shape, lse.shape) == ((0, 3, 4, 16), (0, 3, 4))


@pytest.mark.parametrize("dims", [(8, 8), (320, 16)], ids=["fp64", "D320"])
def test_what_the_kernel_lacks_runs_on_the_reference(dims) -> None:
    case = make_case(1, (9,), 5, dims=dims, dtype=torch.float64 if dims[0] == 8 else FP32)
    check(case, attend(case))
    check(case, attend(case, page=4))


def test_offsets_beyond_31_bits() -> None:
    """A cache whose third row lies past 2^31 elements; the memory is virtual, only three rows are touched."""
    step = 2**30 + 16
    memory = torch.empty(2 * step + 64, dtype=torch.int8)
    k = memory.as_strided((1, 3, 1, 16), (0, step, 16, 1))
    v = memory[32:].as_strided((1, 3, 1, 16), (0, step, 16, 1))
    k.copy_(torch.randint(-5, 5, k.shape)), v.copy_(torch.randint(-50, 50, v.shape))
    case = Case(torch.randn(1, 1, 1, 16), k, v, [[-1]], [2])
    expected = Case(case.q, k.clone(), v.clone(), [[-1]], [2])
    torch.testing.assert_close(attend(case), attend(expected), rtol=0, atol=0)
    q, _, _, mask, prefix_len = case.args()
    options = dict.fromkeys(("scale", "softcap", "window", "sinks", "k_scale", "v_scale"))
    pages = (k.transpose(0, 1), v.transpose(0, 1), int32(0, 1, 2)[None])
    paged = paged_tree_attention_triton(q, *pages, mask, prefix_len, **options)
    torch.testing.assert_close(paged, attend(expected), rtol=0, atol=0)
