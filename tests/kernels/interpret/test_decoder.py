"""Norm and rotation in Triton against the exact answer, pairwise over their options, and what they move."""

import pytest
import torch

from specdec_kernels.kernels.decoder import rms_norm_triton, rotary_cache_write_triton
from specdec_kernels.testing import assert_close_to_baseline
from tests.kernels.meter import measure
from tests.kernels.pairwise import pairwise
from tests.ops.test_decoder import law, norm_law

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

GRID = pairwise(
    {
        "dtype": [BF16, FP32, FP16],
        "dims": [(16, 16), (24, 12), (17, 0), (2, 2), (96, 64)],  # of a head, and rotated
        "heads": [(4, 2), (1, 1), (13, 5)],
        "shape": [(2, 3), (1, 1), (3, 5)],
        "norms": ["both", "none", "q"],
        "angles": ["each", "shared"],
        "slots": [False, True],
        "first_node": [0, 2],
        "layout": ["heads-first", "stacked", "plain"],
    }
)


def case_id(options: dict) -> str:
    return "-".join(str(v).removeprefix("torch.").replace(" ", "") for v in options.values())


def make_inputs(o: dict) -> list:
    """Return the arguments as `law` takes them; the caches are NaN, two rows longer than needed."""
    (batch, nodes), (dim, turned), (q, kv) = o["shape"], o["dims"], o["heads"]
    qkv = torch.randn(batch, nodes, (q + 2 * kv) * dim + 3)[..., 3:].to(o["dtype"]).unflatten(2, (q + 2 * kv, dim))
    angles = [None, None]
    if turned:
        angle = torch.rand(1 if o["angles"] == "shared" else batch, nodes, turned) * 100
        angles = [angle.cos().to(o["dtype"]), angle.sin().to(o["dtype"])]
    num_rows, capacity = batch + 2 * o["slots"], nodes + 9
    stacked = torch.full((2, num_rows, capacity, kv, dim), float("nan"), dtype=o["dtype"])
    k, v = stacked if o["layout"] == "stacked" else (c.clone() for c in stacked)
    if o["layout"] == "heads-first":
        k, v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (k, v))
    norms = [torch.randn(dim).to(o["dtype"]) for _ in range(2)]
    norms = {"both": norms, "none": [None, None], "q": [norms[0], None]}[o["norms"]]
    slots = torch.randperm(num_rows).int().repeat_interleave(2)[::2][:batch] if o["slots"] else None
    lengths = torch.randint(0, 8, (2 * batch,)).int()[::2]
    return [qkv, *angles, k, v, lengths, o["first_node"], slots, *norms, 1e-5]


def turn(inputs: list) -> None:
    *tensors, first_node, slots, q_norm, k_norm, eps = inputs
    options = {"first_node": first_node, "slots": slots, "q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    rotary_cache_write_triton(*tensors, **options)


def doubled(inputs: list) -> list:
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]


@pytest.mark.parametrize("o", GRID, ids=case_id)
def test_rotation_matches_exact(o: dict) -> None:
    inputs = make_inputs(o)
    baseline, exact = law(*inputs), law(*doubled(inputs))
    turn(inputs)
    for have, want, rounded in zip((inputs[0], *inputs[3:5]), exact, baseline, strict=True):
        assert torch.equal(have.isnan(), want.isnan())  # rows of the cache that are not the nodes' stay
        if o["norms"] == "none":
            torch.testing.assert_close(have, rounded, rtol=0, atol=0, equal_nan=True)
        else:
            assert_close_to_baseline(have.nan_to_num(), want.nan_to_num(), rounded.nan_to_num())


@pytest.mark.parametrize("dtype", [BF16, FP32, FP16], ids=["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("shape", [(3, 8192), (2, 8200), (1, 20000), (2, 3, 5, 24)], ids=str)
def test_norm_matches_exact(shape, dtype) -> None:
    """One block, more than one, and heads whose rows need three strides."""
    x = torch.randn(*shape[:-1], shape[-1] + 2).to(dtype)[..., 2:]
    if len(shape) == 4:
        x = x[:, :, 1:4]
    weight = torch.randn(shape[-1]).to(dtype)
    exact = norm_law(x.double(), weight.double(), 1e-5)
    assert_close_to_baseline(rms_norm_triton(x, weight, 1e-5), exact, norm_law(x, weight, 1e-5))


def test_rows_do_not_see_each_other() -> None:
    """A row of NaN leaves the bits of the others; one row alone has them, too."""
    x, weight = torch.randn(37, 72).to(BF16), torch.randn(72).to(BF16)
    clean = rms_norm_triton(x, weight, 1e-5)
    for row in (0, 17, 36):
        assert torch.equal(rms_norm_triton(x[row : row + 1], weight, 1e-5), clean[row : row + 1])
    x[5] = float("nan")
    dirty = rms_norm_triton(x, weight, 1e-5)
    assert torch.equal(dirty[6:], clean[6:])
    assert dirty[5].isnan().all()


def test_double_runs_on_the_reference() -> None:
    inputs = doubled(make_inputs(GRID[0]))
    expected = law(*inputs)
    turn(inputs)
    torch.testing.assert_close((inputs[0], *inputs[3:5]), expected, equal_nan=True)
    x, weight = torch.randn(3, 9).double(), torch.randn(9).double()
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-5), norm_law(x, weight, 1e-5))


def test_offsets_beyond_31_bits() -> None:
    """A cache whose second row lies past 2^31 elements; the memory is virtual, only two rows are touched."""
    inputs = make_inputs(GRID[0] | {"shape": (2, 1), "slots": False, "dtype": BF16, "dims": (16, 16), "heads": (4, 2)})
    far = torch.empty(2**31 + 32 * 10, dtype=BF16)
    near = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
    inputs[3], inputs[4] = (far[16 * i :].as_strided((2, 10, 2, 16), (2**31, 32, 16, 1)) for i in (0, 0))
    inputs[4] = near[4].clone()
    turn(inputs), turn(near)
    for batch, row in enumerate((near[5] + near[6]).tolist()):
        assert torch.equal(inputs[3][batch, row], near[3][batch, row])
    x = far.as_strided((2, 16), (2**31, 1))
    x.copy_(torch.randn(2, 16))
    assert torch.equal(rms_norm_triton(x, x[0], 1e-5), rms_norm_triton(x.clone(), x[0], 1e-5))


@pytest.mark.parametrize("width", [576, 16384])
def test_norm_moves_what_it_must(width) -> None:
    """A row once, twice where it is longer than a block; the weight counts once, being in the cache."""
    x, weight = torch.randn(4, width).to(BF16), torch.randn(width).to(BF16)
    with measure() as launches:
        out = rms_norm_triton(x, weight, 1e-5)
    [launch] = launches
    assert launch.traffic["x_ptr"].loaded == x.nbytes * (1 if width <= 8192 else 2)
    assert launch.traffic["weight_ptr"].distinct == weight.nbytes
    assert launch.traffic["out_ptr"].stored == out.nbytes


@pytest.mark.parametrize("dims", [(64, 64), (24, 12), (17, 0)], ids=str)
def test_rotation_moves_what_it_must(dims) -> None:
    """One launch; all of q, k and v read once and written once; angles, once for each node."""
    o = GRID[0] | {"shape": (2, 3), "heads": (4, 2), "dims": dims, "norms": "none", "slots": True, "angles": "each"}
    inputs = make_inputs(o | {"dtype": BF16})
    with measure() as launches:
        turn(inputs)
    [launch] = launches
    traffic, head = launch.traffic, 6 * dims[0] * 2
    assert traffic["qkv_ptr"].loaded == 8 * head
    assert (traffic["qkv_ptr"].stored, traffic["k_ptr"].stored, traffic["v_ptr"].stored) == (4 * head, *(2 * head,) * 2)
    if dims[1]:
        assert traffic["cos_ptr"].distinct == traffic["sin_ptr"].distinct == inputs[1].nbytes
    necessary = (8 + 8) * head + (2 * inputs[1].nbytes if dims[1] else 0) + 4 * 4
    once = sum(t.stored + min(t.loaded, t.distinct) for t in traffic.values())
    assert once == necessary
