"""Random shapes, rows, temperatures, uniforms, strides, trees and draft vocabularies, at each rule: a minute in CI."""

import dataclasses
import math
import os
import random
import time
import unittest.mock

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import Verification
from specdec_kernels.reference import verify as reference
from specdec_kernels.reference._verify_probs import target_probs

from ..marks import needs_native
from .conftest import levels, limited_isa
from .test_verify import CALLS, make_inputs

SECONDS = 60.0
TINY, ALMOST_ONE = 2.0**-24, 1 - 2.0**-24
ROUNDING = 2.0**-48
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# One id, two, small ones, borders of the blocks of 4096, several blocks with a rest.
VOCABS = [1, 2, 3, 7, 16, 33, 1000, 4096, 4097, 8193, 32_001]
TEMPERATURES = [0.0, 1e-7, 9e-6, 1.1e-5, 1e-3, 0.5, 1.0, 30.0, 1e5, 1e30, 3e38]
# What logits become, of the target and of the drafter; the random bits are those of the call's seed.
KINDS = ["normal", "wide", "ties", "flat", "one-hot", "sparse", "nan", "inf", "minus-inf", "all-minus-inf", "extreme"]


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about a call, in numbers that can be read and typed: a failure prints it."""

    rule: str
    seed: int
    num_rows: int
    num_nodes: int
    vocab: int
    dtypes: tuple[torch.dtype, torch.dtype]
    target: str
    draft: str
    draft_is_near: bool
    temperatures: tuple[float, float, float]
    uniforms: tuple[float, ...]
    double_uniforms: bool
    few_ids: bool
    strided: bool
    flat_tree: bool
    num_columns: int | None


calls = st.builds(
    Call,
    rule=st.sampled_from(list(CALLS)),
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(0, 5),
    num_nodes=st.integers(1, 12),
    vocab=st.sampled_from(VOCABS),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 2),
    target=st.sampled_from(KINDS),
    draft=st.sampled_from(KINDS),
    draft_is_near=st.booleans(),
    temperatures=st.tuples(*[st.sampled_from(TEMPERATURES)] * 3),
    # Replace some of the random uniforms.
    uniforms=st.lists(st.sampled_from([0.0, TINY, 0.5, ALMOST_ONE]), max_size=3).map(tuple),
    double_uniforms=st.booleans(),
    few_ids=st.booleans(),
    strided=st.booleans(),
    flat_tree=st.booleans(),
    num_columns=st.none() | st.integers(1, 40),
)


def _spoilt(logits: Tensor, kind: str) -> Tensor:
    """Return logits of a kind; a part of the rows stays as it was."""
    odd = {"nan": torch.nan, "inf": torch.inf, "minus-inf": -torch.inf, "extreme": 65504.0}
    if kind == "normal":
        return logits
    if kind in odd:
        return logits.masked_fill(torch.rand(logits.shape) < 2 / logits.shape[-1], odd[kind])
    changed = {
        "wide": lambda: 30 * logits,
        "ties": lambda: logits.round(),
        "flat": lambda: torch.zeros_like(logits),
        "one-hot": lambda: logits.masked_fill(logits < logits.amax(-1, keepdim=True), -torch.inf),
        "sparse": lambda: logits.masked_fill(torch.rand(logits.shape) < 0.9, -torch.inf),
        "all-minus-inf": lambda: torch.full_like(logits, -torch.inf),
    }[kind]()
    return torch.where(torch.rand(logits.shape[:2])[..., None] < 0.7, changed, logits)


def _strided(logits: Tensor) -> Tensor:
    """Return the same logits cut out of a wider tensor of NaN in which rows and nodes have changed places."""
    num_rows, num_nodes, size = logits.shape
    roomy = torch.full((num_nodes + 1, num_rows, size + 5), torch.nan, dtype=logits.dtype)
    part = roomy[1:, :, 3 : 3 + size].transpose(0, 1)
    return part.copy_(logits)


def arguments_of(call: Call) -> dict[str, object]:
    """Return the arguments of a call, options included."""
    torch.manual_seed(call.seed)
    inputs = make_inputs(call.num_rows, call.num_nodes, call.vocab)
    if call.flat_tree:
        inputs["parents"].clamp_(max=0)
    if call.few_ids:
        inputs["ids"].remainder_(min(call.vocab, 3))
    inputs["ids"].masked_fill_(torch.rand(inputs["ids"].shape) < 0.05, -1)
    inputs["temperature"] = torch.tensor(call.temperatures).repeat(2)[: call.num_rows]
    for u in call.uniforms:
        inputs["uniforms"].masked_fill_(torch.rand(inputs["uniforms"].shape) < 0.3, u)
    if call.double_uniforms:
        inputs["uniforms"] = inputs["uniforms"].double()
    target = inputs["target_logits"]
    draft = target + (1e-3 if call.draft_is_near else 1.0) * torch.randn(target.shape)
    options = {}
    if call.num_columns is not None and call.rule in ("chain", "block", "tree", "tree-with-replacement"):
        ids = torch.randint(call.vocab, (call.num_columns,))
        draft = draft[..., ids]
        options["draft_vocab_map"] = ids - torch.arange(call.num_columns)
        drafted = ids[torch.randint(call.num_columns, inputs["ids"].shape)]
        inputs["ids"] = torch.where(torch.rand(drafted.shape) < 0.7, drafted, inputs["ids"])
    layout = _strided if call.strided else lambda logits: logits
    inputs["target_logits"] = layout(_spoilt(target, call.target).to(call.dtypes[0]))
    inputs["draft_logits"] = layout(_spoilt(draft, call.draft).to(call.dtypes[1]))
    _, fixed, arguments = CALLS[call.rule]
    return arguments(inputs) | fixed | options


def check_layout(result: Verification, args: dict, vocab: int) -> None:
    """No id outside [-1, V), −1 behind the counts, and accepted nodes that are a path with these ids."""
    drafts = args["ids"][:, 1:] if "ids" in args else args["draft_ids"]
    num_drafts = drafts.shape[1]
    for row, count in enumerate(result.num_accepted.tolist()):
        nodes, ids = result.accepted[row].tolist(), result.output_ids[row].tolist()
        assert all(0 <= x < vocab for x in ids[: count + 1]) or ids == [-1] * (num_drafts + 1)
        assert ids[count + 1 :] == [-1] * (num_drafts - count)
        assert nodes[count:] == [-1] * (num_drafts - count)
        path = [0, *nodes[:count]]
        if "parents" in args:
            assert [args["parents"][row, node].item() for node in path[1:]] == path[:-1]
        else:
            assert path == list(range(count + 1))
        assert [drafts[row, node - 1].item() for node in path[1:]] == ids[:count]


def _row(result: Verification, row: int) -> list:
    return [tensor[row].tolist() for tensor in result]


def _near(ref, args: dict, row: int) -> list[list]:
    """Return what the reference makes of a row when uniforms move by 2 fp32 steps: all, or one of them.

    And when p moves by a few float64 steps: where it agrees with q, which ids a residual has left is their rounding.
    """
    own = {k: v[row : row + 1] if isinstance(v, Tensor) and k != "draft_vocab_map" else v for k, v in args.items()}
    uniforms, found = own["uniforms"].double(), []
    for sign in (-1, 1):
        step = uniforms * 2.0**-22
        moved = (uniforms + sign * step).clamp(0, 1 - 2.0**-53)
        for choice in (torch.ones(uniforms.shape[1]), *torch.eye(uniforms.shape[1])):
            found.append(_row(ref(**own | {"uniforms": torch.where(choice > 0, moved, uniforms)}), 0))
        with unittest.mock.patch.object(
            reference, "target_probs", lambda *at, s=sign: target_probs(*at) * (1 + s * ROUNDING)
        ):
            found.append(_row(ref(**own), 0))
    return found


def check_call(call: Call) -> None:
    args = arguments_of(call)
    op = CALLS[call.rule][0]
    before = {name: value.clone() for name, value in args.items() if isinstance(value, Tensor)}
    ref = getattr(reference, f"{op.__name__}_ref")
    expected = Verification(*ref(**args))
    check_layout(expected, args, call.vocab)
    for level in levels()[:1] + levels()[-1:]:
        with limited_isa(level):
            result = op(**args)
        check_layout(result, args, call.vocab)
        for row in range(call.num_rows):
            if _row(result, row) != _row(expected, row):
                assert "uniforms" in args
                assert _row(result, row) in _near(ref, args, row), (level, _row(result, row), _row(expected, row))
    for name, value in before.items():
        torch.testing.assert_close(args[name], value, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(call=calls)
def test_fuzz(call):
    check_call(call)


@pytest.mark.parametrize(
    ("dtype", "sizes", "uniforms"),
    [
        (torch.float32, {"seed": 194, "num_rows": 4, "num_nodes": 3, "vocab": 7}, (0.0, 0.0)),
        (torch.float16, {"seed": 50320, "num_rows": 3, "num_nodes": 3, "vocab": 8193}, (0.0,)),
    ],
    ids=["1e-313", "2^-1020.03"],
)
def test_weights_of_nearly_nothing(dtype, sizes, uniforms) -> None:
    """At u = 0 an id of such a probability is drawn, or the next one; runs of the minute below have found these."""
    normal = {"target": "normal", "draft": "normal", "draft_is_near": False, "dtypes": (dtype, torch.float32)}
    flags = {"double_uniforms": False, "few_ids": False, "strided": False, "flat_tree": False, "num_columns": None}
    check_call(Call("chain", temperatures=(0.0, 0.0, 0.001), uniforms=uniforms, **sizes, **normal, **flags))


def test_residual_of_rounding() -> None:
    """What p has more than q is 1e-16 of one id or nothing; such a draft was rejected with probability 1e-236."""
    normal = {"target": "sparse", "draft": "normal", "draft_is_near": True, "dtypes": (torch.float32,) * 2}
    flags = {"double_uniforms": False, "few_ids": False, "strided": False, "flat_tree": False, "num_columns": 10}
    sizes = {"seed": 10, "num_rows": 2, "num_nodes": 10, "vocab": 3}
    check_call(Call("chain", temperatures=(0.001, 0.0, 0.0), uniforms=(), **sizes, **normal, **flags))


@pytest.mark.parametrize("rule", ["chain", "block", "tree", "tree-with-replacement"])
@pytest.mark.parametrize("log2_q", [-1019.5, -1020.5, -1030.0, -1060.0])
def test_draft_of_nearly_nothing(rule, log2_q) -> None:
    """Below 2^-1020 of the likeliest id it cannot have been drawn: it is judged as chosen, whatever exp2 returns."""
    inputs = make_inputs(1, 2, 7)
    inputs["ids"][:] = 3
    inputs["num_nodes"][:] = 2
    inputs["temperature"][:] = 1.0
    inputs["uniforms"][:] = 0.5
    inputs["target_logits"].zero_()  # p = 1/7: a chosen draft is rejected, one drawn from q accepted
    inputs["draft_logits"].fill_(-torch.inf)[..., 0] = 0.0
    inputs["draft_logits"] = inputs["draft_logits"].double()
    inputs["draft_logits"][..., 3] = log2_q * math.log(2)
    op, fixed, arguments = CALLS[rule]
    args = arguments(inputs) | fixed
    count = int(log2_q > -1020)
    assert Verification(*getattr(reference, f"{op.__name__}_ref")(**args)).num_accepted.tolist() == [count]
    for level in levels():
        with limited_isa(level):
            assert op(**args).num_accepted.tolist() == [count], level


@pytest.mark.slow
@needs_native
def test_fuzz_for_a_minute():
    """As many calls as fit in; other ones with another SPECDEC_FUZZ_SEED. A failure prints the call and its portion."""

    def fuzz(call):
        check_call(call)

    portions = random.Random(os.environ.get("SPECDEC_FUZZ_SEED", "0"))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        portion = portions.randrange(2**32)
        print(f"seed {portion}")
        seed(portion)(settings(max_examples=200, deadline=None, database=None)(given(call=calls)(fuzz)))()
