"""Launches that take the short way past Triton's look at the arguments end in the same call of the driver."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from specdec_kernels.cli._layer_cases import LinearCase, NormCase, RotationCase
from specdec_kernels.kernels import _aot, _launch
from specdec_kernels.kernels.layers import decoder_layers_triton
from specdec_kernels.kernels.tree_attention import paged_tree_attention_triton, tree_attention_triton

from ..ops.test_layers import make_inputs

NONE = dict.fromkeys(("scale", "softcap", "window", "sinks", "k_scale", "v_scale"))


def call(gap: int = 0, offset: int = 0, page: int = 0, dtype=torch.float16, num_nodes: int = 3, **options) -> None:
    """Launch over a cache with gaps between its rows, at an offset from an aligned address."""
    q = torch.empty(2, num_nodes, 4, 64, dtype=dtype)
    k, v = (torch.empty(2, 2048 + offset, 2, 64 + gap, dtype=dtype).flatten()[offset:] for _ in range(2))
    k, v = (x[: 2 * 2048 * 2 * (64 + gap)].view(2, 2048, 2, 64 + gap)[..., :64] for x in (k, v))
    mask, prefix_len = torch.empty(1, num_nodes, 1, dtype=torch.int64), torch.empty(2, dtype=torch.int32)
    if page:
        table = torch.empty(2, 2048 // page, dtype=torch.int32)
        pages = (x.reshape(-1, page, 2, 64) for x in (k, v))
        paged_tree_attention_triton(q, *pages, table, mask, prefix_len, **(NONE | options))
    else:
        tree_attention_triton(q, k, v, mask, prefix_len, **(NONE | options))


CALLS = [
    {},
    {"gap": 8},  # rows not a multiple of 16 elements
    {"offset": 1},  # addresses not a multiple of 16 bytes
    {"softcap": 30.0, "window": 3000},
    {"sinks": torch.empty(4)},
    {"page": 64},
]


def plain(argument: object) -> object:
    """Return what two calls must agree in."""
    if isinstance(argument, tuple):
        return tuple(map(plain, argument))
    return (argument.shape, argument.stride(), argument.dtype) if isinstance(argument, torch.Tensor) else argument


_started: list[tuple] = []  # one for all tests, because a binary keeps the launcher that it got first


def started(calls: list[dict], launch: Callable[..., None] = call) -> list[list]:
    """Make the calls; return the arguments of the driver's."""
    _started.clear()
    with _aot.stub_driver("sm_80", "launch", lambda *args: _started.append(args)):
        for options in calls:
            launch(**options)
    return [[plain(argument) for i, argument in enumerate(args) if i != 6] for args in _started]  # 6: for profilers


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch) -> dict:
    known: dict = {}
    monkeypatch.setattr(_launch, "_known", known)
    return known


def test_the_short_way_starts_the_same(monkeypatch, nothing_known) -> None:
    """Each call twice, in turn: binaries, grids and arguments are those of Triton's own way."""
    calls = [*CALLS, *CALLS]
    short = started(calls)
    assert len(nothing_known) == len(CALLS) + 3  # and the merge: with and without a window, and for unaligned memory
    monkeypatch.setattr(_launch, "_LIMIT", 0)  # keeps the last only
    nothing_known.clear()
    assert short == started(calls)
    assert len(short) == 4 * len(CALLS)
    # Each has its own binary, but for the second and third, which both may not load 16 bytes at once.
    assert len({args[4] for args in short}) == len(CALLS) + 1


def test_the_short_way_is_taken(monkeypatch) -> None:
    started([{}])
    monkeypatch.setattr("triton.JITFunction.run", None)
    assert len(started([{}])) == 2
    with pytest.raises(TypeError):
        started([{"page": 64}])


LAYER = [NormCase("bf16", 576), RotationCase("bf16", (64, 64), normed=True)]
LAYER += [LinearCase("bf16", 16, 2048), LinearCase("bf16", 16, 2048, gated=True)]


@pytest.mark.parametrize("case", LAYER, ids=str)
def test_a_layer_takes_it(case, monkeypatch) -> None:
    """Arguments in tuples among them."""
    first = started([{}], case.launch)
    monkeypatch.setattr("triton.JITFunction.run", None)
    assert started([{}], case.launch) == first
    assert len(first) == 1


def test_whole_layers_take_it(monkeypatch) -> None:
    """Each layer starts what the first one does; with other strides, another binary."""
    inputs = make_inputs(((2, 5, 64, 96, 4, 2, 16), 3, torch.bfloat16, (0, 6), False, False))
    inputs |= {"windows": [0, 0, 0], "rotated": [1, 1, 1]}
    whole = partial(decoder_layers_triton, **inputs)
    first = started([{}], whole)
    assert len(first) == 3 * 8
    assert first[:8] == first[8:16] == first[16:]
    monkeypatch.setattr("triton.JITFunction.run", None)
    assert started([{}], whole) == first
    inputs["weights"][13] = inputs["weights"][13].contiguous()
    with pytest.raises(TypeError):
        started([{}], whole)


def test_known_launches_are_bounded(monkeypatch, nothing_known) -> None:
    monkeypatch.setattr(_launch, "_LIMIT", 3)
    started([{}, {"gap": 16}, {"gap": 32}, {"gap": 48}])
    assert len(nothing_known) <= 3
