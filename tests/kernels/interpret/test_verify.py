"""The Triton verification kernels on the interpreter: the reference's integers, the exact law, and nothing outside."""

from dataclasses import replace

import pytest
import torch

from specdec_kernels import Verification, verify_chain, verify_tree, verify_tree_greedy
from specdec_kernels.kernels import verify as module
from specdec_kernels.kernels._verify_columns import columns_by_id
from specdec_kernels.reference import verify as reference
from specdec_kernels.reference._verify_probs import residual
from tests.kernels.meter import measure
from tests.ops.test_verify import CALLS, DEFAULTS, assert_same, make_inputs
from tests.ops.test_verify_boundaries import uniforms_around
from tests.ops.verify_law import Setting

REFERENCE = (reference.verify_chain_ref, reference.verify_tree_ref)


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """Let a vocabulary of some tens span several tiles, and a program own more than one."""
    choose = module.choose_plan
    plan = {"block": 16, "block_nodes": 4, "target_programs": 6}
    monkeypatch.setattr(module, "choose_plan", lambda *args: replace(choose(*args), **plan))


def both(name: str, inputs: dict, **more):
    op, options, arguments = CALLS[name]
    args, options = arguments(inputs), DEFAULTS.get(op.__name__, {}) | options | more
    kernel = getattr(module, f"{op.__name__}_triton")(**args, **options)
    return Verification(*kernel), getattr(reference, f"{op.__name__}_ref")(**args, **options)


def rejecting_inputs(num_rows=3, num_nodes=6, vocab=37, dtype=torch.float32, seed=0) -> dict:
    """Return inputs of which many drafts are siblings, twice the same, filtered, or rejected by uniforms next to 1."""
    torch.manual_seed(seed)
    inputs = make_inputs(num_rows, num_nodes, vocab, dtype)
    inputs["parents"].clamp_(max=seed % 3)
    inputs["ids"] %= 5
    inputs["num_nodes"].fill_(num_nodes)
    inputs["uniforms"] = (inputs["uniforms"] ** 0.3).clamp(max=1 - 2.0**-24)
    inputs["draft_logits"] = inputs["target_logits"] + 0.3 * torch.randn(inputs["target_logits"].shape).to(dtype)
    for key in ("target_logits", "draft_logits"):
        inputs[key] = inputs[key].masked_fill(torch.rand(inputs[key].shape) < 0.3, -torch.inf)
    return inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_the_reference(small_tiles, name, dtype) -> None:
    seed = 3 * list(CALLS).index(name) + dtype.itemsize
    assert_same(*both(name, rejecting_inputs(dtype=dtype, seed=seed)))


@pytest.mark.parametrize("name", ["chain", "tree", "tree-chosen", "block", "typical"])
def test_agrees_on_shipped_tiles(name) -> None:
    """Two tiles and one id more; uniforms as doubles."""
    inputs = rejecting_inputs(2, 5, 8193, torch.bfloat16)
    inputs["uniforms"] = inputs["uniforms"].double()
    assert_same(*both(name, inputs))


@pytest.mark.parametrize("name", ["tree", "tree-with-replacement", "tree-chosen"])
def test_every_sibling_is_rejected(small_tiles, name) -> None:
    """Uniforms next to 1 reject the likeliest again and again: sums are made anew where subtraction would cancel."""
    logits = torch.linspace(0, -40, 9).repeat_interleave(4).expand(2, 9, 36).clone()
    inputs = make_inputs(2, 9, 36) | {
        "target_logits": logits,
        "temperature": torch.ones(2),
        "draft_logits": logits * 1.1,
    }
    inputs["ids"] = (4 * torch.arange(-1, 8)).clamp(min=0).expand(2, 9).clone()
    inputs["parents"] = torch.tensor([[-1, *[0] * 8]], dtype=torch.int32)
    inputs["num_nodes"].fill_(9)
    inputs["uniforms"] = torch.full((2, 9), 1 - 2.0**-24)
    inputs["uniforms"][:, 0] = torch.tensor([0.3, 0.999])
    kernel, expected = both(name, inputs)
    assert_same(kernel, expected)
    # What q has lost may be accepted of its own accord.
    assert name != "tree-chosen" or (kernel.num_accepted == 0).all()


@pytest.mark.parametrize("name", ["chain", "block", "tree", "tree-with-replacement"])
def test_draft_vocabulary(small_tiles, name) -> None:
    """Columns in any order, two of them for one id, and (unchecked) some for no id."""
    vocab, columns = 50, 21
    inputs = rejecting_inputs(4, 5, vocab)
    ids = torch.randperm(vocab)[:columns]
    ids[7] = ids[6]
    offsets = ids - torch.arange(columns)
    offsets[[0, 9]] = torch.tensor([2**63 - 1, -(2**62)])
    inputs["draft_logits"] = torch.randn(4, 5, columns)
    inputs["ids"] = ids[torch.randint(columns, inputs["ids"].shape)]
    inputs["ids"][:, 1] = ids[6]
    assert_same(*both(name, inputs, draft_vocab_map=offsets))


def test_inverted_map_follows_its_tensor() -> None:
    """Remembered until the map is written to, for each vocabulary."""
    offsets = torch.tensor([0, 3, 3])
    starts, columns = columns_by_id(offsets, 6)
    assert (starts.tolist(), columns.tolist()) == ([0, 1, 1, 1, 1, 2, 3], [0, 1, 2])
    assert columns_by_id(offsets, 6)[0] is starts
    assert columns_by_id(offsets, 5)[0].tolist() == [0, 1, 1, 1, 1, 2]
    offsets[0] = 2
    assert columns_by_id(offsets, 6)[0].tolist() == [0, 0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
@pytest.mark.parametrize("vocab", [5, 32000])
def test_boundary_of_a_decision(vocab, drawn) -> None:
    """Two fp32 steps inside accepts, outside rejects; at the boundary itself either may happen, but nothing else."""
    logits, draft = 2 * torch.randn(2, 1, 2, vocab)
    p, q = logits[0, 0].double().softmax(-1), draft[0, 0].double().softmax(-1)
    x = int(torch.where(p < q, q, 0).argmax()) if drawn else int(p.argmax())
    boundary = (p[x] / q[x]).item() if drawn else p[x].item()
    below, above = uniforms_around(boundary)
    u = torch.stack([torch.tensor([0.3, v], dtype=torch.float64) for v in (below, boundary, above)])
    law = draft[:, :1].expand(3, -1, -1) if drawn else None
    args = torch.full((3, 1), x), logits.expand(3, -1, -1), law, torch.ones(3), u
    ids, count, _ = module.verify_chain_triton(*args, block=False)
    assert (count[0], count[2]) == (1, 0)
    assert ((ids[:, 0] >= 0) & (ids[:, 0] < vocab)).all()


@pytest.mark.parametrize("vocab", [17, 32000])
@pytest.mark.parametrize("rejected", [False, True], ids=["bonus", "residual"])
def test_boundary_of_the_final_draw(vocab, rejected) -> None:
    """Also for a draft law so close to the target's that differences of fp32 probabilities would be noise."""
    logits = 2 * torch.randn(1, 2, vocab)
    draft = logits + 0.01 * torch.randn(1, 2, vocab)
    p, q = logits[:, 0].double().softmax(-1), draft[:, 0].double().softmax(-1)
    x, count = int((q - p).argmax()), 1 if rejected else 0
    law = residual(p, q, torch.tensor([True]))[0] if rejected else p[0]
    cumulative = law.cumsum(0) / law.sum()
    token = int(torch.where(cumulative < 0.999, law, 0).argmax())
    u = torch.stack([uniforms_around(cumulative[token].item()), torch.full((2,), 1 - 2.0**-24, dtype=torch.float64)], 1)
    args = torch.full((2, count), x), logits[:, : 1 + count].expand(2, -1, -1), draft[:, :count].expand(2, -1, -1)
    ids, accepted, _ = module.verify_chain_triton(*args, torch.ones(2), u[:, : 1 + count], block=False)
    assert accepted.tolist() == [0, 0]
    assert (ids[:, 0] == token).tolist() == [True, False]


LAWS = [
    ("chain1-V3", (-1, 0), 3, {"chain": True}),
    ("block2-V2", (-1, 0, 1), 2, {"chain": True, "block": True}),
    ("siblings2-V3", (-1, 0, 0), 3, {}),
]


@pytest.mark.parametrize(("parents", "vocab", "options"), [law[1:] for law in LAWS], ids=[law[0] for law in LAWS])
def test_law(backend, small_tiles, parents, vocab, options) -> None:
    """The joint law of the emitted tokens is the target's. Breakpoints are asked for on a grid of 1/1024."""
    setting = Setting(parents, vocab, dtype=torch.float32)
    assert setting.error(bits=10, guide=REFERENCE, **options) < 1e-3


def test_law_of_chosen_siblings(backend, small_tiles) -> None:
    """For two fillings, one of them a duplicate; each by itself."""
    setting = Setting((-1, 0, 0), 3, dtype=torch.float32)
    setting.ids, setting.target_logits = setting.ids[[1, 4]], setting.target_logits[[1, 4]]
    setting.draft_logits = setting.draft_logits[[1, 4]]
    assert setting.worst_error(bits=10, guide=REFERENCE, sampled=False) < 1e-3


def test_law_control(backend, small_tiles) -> None:
    """Negative control: chosen drafts judged as drawn."""
    setting = Setting((-1, 0), 3, dtype=torch.float32)
    setting.draw_from(setting.probs, chosen={1: 0})
    assert setting.error(bits=10, guide=REFERENCE) > 0.01


def test_wild_arguments_are_survived(small_tiles) -> None:
    """Every integer and every bit pattern of a logit: no access outside a tensor, no id outside [-1, V)."""
    for trial in range(3):
        wild = {d: lambda *s, d=d: torch.randint(torch.iinfo(d).min, torch.iinfo(d).max, s, dtype=d) for d in INTEGERS}
        shape, vocab, columns = (2, 5), 20, 7
        near = trial % 2
        ids = torch.randint(-2, vocab + 2, shape) if near else wild[torch.int64](*shape)
        parents = torch.randint(-2, 7, shape).int() if near else wild[torch.int32](*shape)
        lengths = torch.randint(-2, 8, shape[:1]).int() if near else wild[torch.int32](2)
        offsets = torch.randint(-columns, vocab, (columns,)) if near else wild[torch.int64](columns)
        p, q, s = (wild[torch.int32](*shape, n).view(torch.float32) for n in (vocab, vocab, columns))
        chance = torch.rand(2), wild[torch.int32](*shape).view(torch.float32), lengths
        with measure():
            results = [module.verify_tree_greedy_triton(ids, parents, p, lengths)]
            results.append(module.verify_tree_typical_triton(ids, parents, p, *chance, epsilon=0.1, delta=0.3))
            for law, table in ((None, None), (q, None), (s, offsets)):
                options = {"draft_vocab_map": table}
                results.append(
                    module.verify_tree_triton(ids, parents, p, law, *chance, with_replacement=False, **options)
                )
                args = ids[:, 1:], p, law if law is None else law[:, 1:], *chance
                results.append(module.verify_chain_triton(*args, block=bool(near), **options))
        for output, count, accepted in results:
            assert ((output >= -1) & (output < vocab)).all()
            assert ((count >= 0) & (count < 5)).all()
            assert ((accepted >= -1) & (accepted < 5)).all()


INTEGERS = (torch.int32, torch.int64)


def test_offsets_beyond_31_bits() -> None:
    """Rows that lie past 2^31 elements; the memory is virtual, only three rows are touched."""
    memory = torch.empty(2**32 + 64, dtype=torch.float16)
    p = memory.as_strided((1, 3, 4), (0, 2**31, 1))
    p[0] = torch.eye(4)[[1, 2, 3]]
    parents = torch.tensor([[-1, 0, 1]], dtype=torch.int32)
    ids, *_ = module.verify_tree_greedy_triton(torch.tensor([[0, 1, 2]]), parents, p)
    assert ids.tolist() == [[1, 2, 3]]


def test_doubles_run_on_the_reference() -> None:
    inputs = make_inputs(2, 3, 5, torch.float64)
    with measure() as launches:
        assert_same(*both("tree", inputs))
    assert launches == []


def test_slot_and_splits_do_not_matter(backend, small_tiles, monkeypatch) -> None:
    """Each row alone, with more programs for its tiles, bit for bit; arguments are left alone."""
    inputs = rejecting_inputs(3, 5, 37)
    before = {key: value.clone() for key, value in inputs.items()}
    together = verify_tree(**inputs)
    assert all(torch.equal(inputs[key], before[key]) for key in inputs)
    for row in (0, 2):
        alone = verify_tree(**{k: v[row : row + 1] for k, v in inputs.items()})
        assert_same(alone, Verification(*(tensor[[row]] for tensor in together)))


def test_empty_batch_and_root_alone(backend) -> None:
    inputs = make_inputs(2, 5, 7)
    assert [t.shape for t in verify_tree(**{k: v[:0] for k, v in inputs.items()})] == [(0, 5), (0,), (0, 4)]
    p, t, u = torch.randn(2, 1, 7), torch.tensor([1.0, 0.0]), torch.rand(2, 1)
    for block in (False, True):
        none = torch.zeros(2, 0, dtype=torch.int64)
        assert_same(
            verify_chain(none, p, torch.randn(2, 0, 7), t, u, block=block),
            reference.verify_chain_ref(none, p, None, t, u),
        )


def test_ties_across_tiles(backend, small_tiles) -> None:
    p = torch.zeros(1, 2, 50)
    p[0, 0, [5, 16, 49]] = 2
    p[0, 1] = -3
    parents = torch.tensor([[-1, 0]], dtype=torch.int32)
    assert verify_tree_greedy(torch.tensor([[0, 5]]), parents, p).output_ids.tolist() == [[5, 0]]
    assert verify_tree_greedy(torch.tensor([[0, 16]]), parents, p).output_ids.tolist() == [[5, -1]]
