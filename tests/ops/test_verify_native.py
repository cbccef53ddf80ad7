"""The native CPU kernels of verification on every instruction set: the reference's integers, and safe when misused."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels import verify_chain, verify_tree, verify_tree_typical
from specdec_kernels._ops import ops
from specdec_kernels.reference import verify as reference

from ..marks import needs_native
from .conftest import levels, limited_isa
from .test_verify import CALLS, assert_same, make_inputs
from .verify_law import Setting

pytestmark = needs_native

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# One logit, borders of registers and of the kernel's blocks of 4096 ids, several blocks.
VOCABS = [1, 2, 3, 15, 16, 17, 33, 1000, 4095, 4096, 4097, 8193]


def both(name, inputs, **more):
    """Return what the kernel and what the reference make of the arguments of a call."""
    op, options, arguments = CALLS[name]
    args, options = arguments(inputs), options | more
    return op(**args, **options), getattr(reference, f"{op.__name__}_ref")(**args, **options)


@st.composite
def calls(draw):
    """Every rule, dtype, and kind of shape; trees of good and bad drafts; uniforms that accept and that reject."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    num_nodes = draw(st.integers(1, 12))
    vocab = draw(st.sampled_from(VOCABS))
    inputs = make_inputs(draw(st.integers(0, 4)), num_nodes, vocab, draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        inputs["parents"].clamp_(max=draw(st.integers(0, 2)))
    inputs["uniforms"] = inputs["uniforms"] ** draw(st.sampled_from([0.02, 1.0, 8.0]))
    inputs["uniforms"].clamp_(max=1 - 2.0**-24)
    inputs["temperature"] *= draw(st.sampled_from([1.0, 0.01, 30.0]))
    if draw(st.booleans()):
        inputs["ids"] %= min(vocab, 3)
    if draw(st.booleans()):
        inputs["draft_logits"] = inputs["target_logits"] + 0.1 * torch.randn(inputs["target_logits"].shape)
    for key in ("target_logits", "draft_logits"):
        share = draw(st.sampled_from([0.0, 0.5, 0.98]))
        inputs[key] = inputs[key].masked_fill(torch.rand(inputs[key].shape) < share, -torch.inf)
    if draw(st.booleans()):
        inputs["uniforms"] = inputs["uniforms"].double()
    return draw(st.sampled_from(list(CALLS))), inputs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(call=calls())
def test_agrees_with_the_reference(call):
    name, inputs = call
    for level in levels():
        with limited_isa(level):
            assert_same(*both(name, inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("vocab", [3, 17, 4097])
def test_many_rows(isa, vocab, dtype):
    """One draft and siblings, all rules, many uniforms: rejections with every kind of rest."""
    torch.manual_seed(vocab)
    inputs = make_inputs(24, 4, vocab, dtype)
    inputs["num_nodes"].fill_(4)
    for name in CALLS:
        assert_same(*both(name, inputs))


@pytest.mark.parametrize("name", ["tree", "tree-with-replacement", "tree-chosen"])
def test_every_sibling_is_rejected(isa, name):
    """Uniforms next to 1 reject the likeliest again and again: what is left shrinks to nothing but rounding."""
    logits = torch.linspace(0, -60, 9, dtype=torch.float64).expand(4, 9, 9).clone()
    inputs = make_inputs(4, 9, 9, torch.float64) | {"target_logits": logits, "temperature": torch.ones(4)}
    inputs["ids"] = torch.arange(-1, 8).expand(4, 9).clone()
    inputs["parents"] = torch.tensor([[-1, *[0] * 8]], dtype=torch.int32)
    inputs["num_nodes"].fill_(9)
    inputs["draft_logits"] = 1.1 * logits
    inputs["uniforms"] = torch.full((4, 9), 1 - 2.0**-53, dtype=torch.float64)
    inputs["uniforms"][:, 0] = torch.tensor([0.0, 0.3, 0.9, 1 - 2.0**-20])
    kernel, expected = both(name, inputs)
    assert_same(kernel, expected)
    assert (kernel.output_ids[:, 0] != 0).all()


@pytest.mark.parametrize("order", ["rising", "shuffled"])
@pytest.mark.parametrize("name", ["chain", "block", "tree", "tree-with-replacement"])
def test_draft_vocabulary(isa, name, order):
    """Columns in any order, two of them for one id, and (unchecked) some for no id."""
    op, options, arguments = CALLS[name]
    vocab, columns = 9000, 5000
    inputs = make_inputs(12, 5, vocab)
    ids = torch.randperm(vocab)[:columns]
    ids = ids.sort().values if order == "rising" else ids
    ids[7] = ids[6]
    offsets = ids - torch.arange(columns)
    offsets[[0, 99]] = torch.tensor([2**63 - 1, -(2**62)])
    inputs["draft_logits"] = inputs["target_logits"][..., ids] + 0.1
    inputs["ids"] = ids[torch.randint(columns, inputs["ids"].shape)]
    inputs["ids"][:, 1] = ids[6]
    args = arguments(inputs)
    options = {"block": False, "with_replacement": False} | options | {"draft_vocab_map": offsets}
    options.pop("with_replacement" if op is verify_chain else "block")
    expected = getattr(reference, f"{op.__name__}_ref")(**args, **options)
    assert_same(getattr(ops, op.__name__).default(*args.values(), **options), expected)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_threads_do_not_matter(num_rows):
    """A vocabulary large enough to be shared out: the reference's result, and no other on more threads."""
    inputs = make_inputs(num_rows, 3, 70_001)
    inputs["num_nodes"].fill_(3)
    inputs["temperature"].fill_(1.0)
    before = torch.get_num_threads()
    try:
        for name in ("tree", "block", "greedy", "typical"):
            op, options, arguments = CALLS[name]
            kernel, expected = both(name, inputs)
            assert_same(kernel, expected)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert_same(op(**arguments(inputs), **options), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sampled", [False, True], ids=["chosen", "drawn"])
@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, 0, 0, 1)], ids=["chain2", "fork"])
def test_law_on_a_coarse_grid(isa, parents, sampled):
    """fp32 logits, uniforms on a grid of 1/1024: the law of what is emitted is the target's to within the grid."""
    setting = Setting(parents, 3, dtype=torch.float32)
    rule = setting.error if sampled else setting.worst_error
    assert rule(bits=10, sampled=sampled) < 1e-3


def test_law_control():
    """Negative control for the grid: chosen drafts judged as drawn."""
    setting = Setting((-1, 0), 3, dtype=torch.float32)
    setting.draw_from(setting.probs, chosen={1: 0})
    assert setting.error() > 0.01


def test_typical_threshold_by_hand(isa):
    """The entropy of a long flat row: exp(-H) is the share of one token of those that are left."""
    p = torch.full((2, 2, 10_000), -torch.inf)
    p[0, :, 17:5017] = 3.0
    p[1, :, 17:5017] = 3.0
    p[:, :, 4500] = 3.0 + math.log(2)
    ids, parents = torch.tensor([[9, 4500], [9, 4499]]), torch.tensor([[-1, 0]], dtype=torch.int32)
    uniforms = torch.full((2, 2), 0.5)
    result = verify_tree_typical(ids, parents, p, torch.ones(2), uniforms, epsilon=0.9, delta=1.5)
    assert result.num_accepted.tolist() == [1, 0]


GARBAGE = """
import torch
from specdec_kernels._ops import ops
torch.manual_seed(0)
wild = lambda shape, dtype: torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape).to(dtype)
for trial in range(100):
    b, t, v, c = (int(x) for x in torch.randint(1, 9, (4,)))
    v = v * 1000 if trial % 3 == 0 else v
    near = trial % 2
    ids = torch.randint(-2, v + 2, (b, t)) if near else wild((b, t), torch.int64)
    parents = torch.randint(-2, t + 2, (b, t)).int() if near else wild((b, t), torch.int32)
    lens = torch.randint(-2, t + 3, (b,)).int() if near else wild((b,), torch.int32)
    offsets = torch.randint(-c, v + 2, (c,)) if near else wild((c,), torch.int64)
    p, q, s = (torch.randn(b, t, n).mul(8).view(torch.int32) for n in (v, v, c))
    for logits in (p, q, s):
        wrong = torch.rand(logits.shape) < 0.02
        logits[wrong] = wild(logits.shape, torch.int32)[wrong]
    p, q, s = (x.view(torch.float32) for x in (p, q, s))
    temperature = wild((b,), torch.int32).view(torch.float32) if trial % 5 == 0 else torch.rand(b)
    uniforms = wild((b, t), torch.int32).view(torch.float32) if trial % 7 == 0 else torch.rand(b, t)
    results = [ops.verify_tree_greedy.default(ids, parents, p, lens)]
    rest = temperature, uniforms, lens
    results.append(ops.verify_tree_typical.default(ids, parents, p, *rest, epsilon=0.09, delta=0.3))
    for law, table in ((None, None), (q, None), (s, offsets)):
        for flag in (False, True):
            options = dict(draft_vocab_map=table)
            args = ids, parents, p, law, *rest
            results.append(ops.verify_tree.default(*args, with_replacement=flag, **options))
            args = ids[:, 1:], p, law if law is None else law[:, 1:], *rest
            results.append(ops.verify_chain.default(*args, block=flag, **options))
    for output, count, accepted in results:
        assert ((output >= -1) & (output < v)).all(), output
        assert ((count >= 0) & (count < t)).all(), count
        assert ((accepted >= -1) & (accepted < t)).all(), accepted
print("survived")
"""


def test_garbage_is_survived():
    """Every integer and every bit pattern of a logit, below the checks of values: no crash, no id outside [-1, V)."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", GARBAGE], env=env, capture_output=True, text=True)
    assert done.stdout == "survived\n", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ids": torch.zeros(2, 3, dtype=torch.int32)}, "ids has the wrong dtype"),
        ({"parents": torch.zeros(3, 3, dtype=torch.int32)}, "parents must have shape"),
        ({"target_logits": torch.zeros(2, 2, 5)}, "target_logits must have shape"),
        ({"target_logits": torch.zeros(2, 3, 5, dtype=torch.int32)}, "target_logits has an unsupported dtype"),
        ({"target_logits": torch.zeros(2, 5, 3).mT}, "target_logits must be contiguous"),
        ({"draft_logits": torch.zeros(2, 3, 4)}, "draft_logits must have 5 ids, got 4"),
        ({"temperature": torch.zeros(3)}, "temperature must have 2 elements"),
        ({"uniforms": torch.zeros(2, 2)}, "uniforms must have shape"),
        ({"num_nodes": torch.zeros(1, dtype=torch.int32)}, "num_nodes must have 1 dimensions and 2 rows"),
    ],
)
def test_second_wall(change, text):
    """Shapes that the public function refuses are refused below it, too."""
    args = CALLS["tree"][2](make_inputs(2, 3, 5)) | change
    with pytest.raises(RuntimeError, match=text):
        ops.verify_tree.default(*args.values(), with_replacement=False, draft_vocab_map=None)


def test_empty_first_column(isa):
    """A row of −inf up to the last id of a block, and strides of zero."""
    p = torch.full((1, 1, 12_289), -torch.inf)
    p[..., [4095, 8192, 12_288]] = torch.tensor([0.0, 0.0, 1.0])
    u = torch.rand(64, 2, dtype=torch.float64)
    ids = torch.tensor([[8192]]).expand(64, 1)
    args = ids, p.expand(64, 2, -1), None, torch.ones(1).expand(64), u
    assert_same(verify_chain(*args), reference.verify_chain_ref(*args))
    parents = torch.tensor([[-1, 0]], dtype=torch.int32)
    tree = verify_tree(torch.tensor([[0, 8192]]).expand(64, 2), parents, *args[1:])
    assert set(tree.output_ids[:, 0].tolist()) == {4095, 8192, 12_288}
