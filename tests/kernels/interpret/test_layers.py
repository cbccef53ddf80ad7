"""Whole layers in Triton: the bits of the launchers one after the other, whatever the layers have in common."""

import pytest
import torch

from specdec_kernels import decoder_layers_
from specdec_kernels.reference.layers import decoder_layers_ref
from specdec_kernels.testing import assert_close_to_baseline
from tests.kernels.meter import measure
from tests.ops.test_layers import call, chain, make_inputs, on_cpu, results

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# As in `tests.ops.test_layers`.
CASES = {
    "tree": ((1, 6, 32, 48, 4, 2, 16), 3, BF16, (), False, False),
    "ragged-some-biases": ((3, 5, 40, 24, 4, 2, 10), 3, FP16, (0, 6), False, False),
    "slots-normed-heads": ((2, 3, 48, 40, 6, 3, 8), 3, FP32, (0, 1, 2, 3, 4, 5), True, True),
}
LAUNCHES = ["_rms_norm_kernel", "_linear_kernel", "_rotary_cache_write_kernel", "_tree_attention_kernel"]
LAUNCHES += ["_linear_kernel", "_rms_norm_kernel", "_gated_linear_kernel", "_linear_kernel"]


OTHERS = {
    "fp64": ((1, 2, 24, 30, 2, 1, 12), 2, FP64, (), False, False),
    "wide-heads": ((1, 2, 8, 8, 1, 1, 260), 1, BF16, (), False, False),
}


def reference(inputs) -> None:
    decoder_layers_ref(**inputs)


@pytest.fixture(params=CASES)
def inputs(request) -> dict:
    """Three layers, of which the last two are prepared together."""
    return make_inputs(CASES[request.param]) | {"windows": [7, 0, 0], "rotated": [False, True, True]}


def test_has_the_bits_of_the_launchers(inputs, backend) -> None:
    exact, plain = (results(reference, on_cpu(inputs, dtype)) for dtype in (FP64, None))
    with measure() as launches:  # raises where anything else than the arguments is read
        found = results(call, inputs)
    assert [launch.kernel for launch in launches if launch.kernel != "merge_splits_kernel"] == LAUNCHES * 3
    for have, one_by_one, want, baseline in zip(found, results(chain, inputs), exact, plain, strict=True):
        assert torch.equal(have, one_by_one)
        assert_close_to_baseline(have, want, baseline)


def test_layers_of_any_layout(backend) -> None:
    """Other strides, other alignment, one tensor in two places and in two layers."""
    inputs = make_inputs(CASES["tree"]) | {"windows": [0, 0, 0], "rotated": [True, True, True]}
    weights, caches = inputs["weights"], inputs["caches"]
    weights[5] = weights[0]
    weights[9:18] = [weight.clone(memory_format=torch.contiguous_format) for weight in weights[9:18]]
    weights[18] = weights[0]
    caches[4:] = [cache.contiguous() for cache in caches[4:]]
    found, expected = results(call, inputs), results(chain, inputs)
    assert all(torch.equal(have, want) for have, want in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", OTHERS)
def test_the_reference_takes_the_rest(name, backend) -> None:
    inputs = make_inputs(OTHERS[name])
    with measure() as launches:
        found = results(call, inputs)
    assert not launches
    assert all(torch.equal(have, want) for have, want in zip(found, results(reference, inputs), strict=True))


def test_no_rows(backend) -> None:
    inputs = make_inputs(CASES["tree"])
    inputs |= {name: inputs[name][:0] for name in ("hidden", "prefix_len", "tree_mask")}
    with measure() as launches:
        decoder_layers_(**inputs | {"caches": [cache[:0] for cache in inputs["caches"]]})
    assert not launches
