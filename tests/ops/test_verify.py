"""The contract of the verification ops: definition, registration, compilation, refusals."""

import doctest
import itertools
import math

import pytest
import torch

import specdec_kernels.ops._verify_philox
import specdec_kernels.ops.verify
from specdec_kernels import Verification, verify_chain, verify_tree, verify_tree_greedy, verify_tree_typical
from specdec_kernels._ops import ops
from specdec_kernels.reference import verify as reference
from specdec_kernels.testing import random_parents

THRESHOLDS = {"epsilon": 0.09, "delta": 0.3}
# B, T, V, dtype of the logits. A one, primes, a word edge of nodes, a vocabulary that fills no tile.
CASES = [
    (1, 1, 1, torch.float32),
    (2, 2, 2, torch.float64),
    (3, 7, 7, torch.bfloat16),
    (5, 17, 101, torch.float16),
    (1, 33, 64, torch.float32),
    (2, 6, 8193, torch.bfloat16),
]


def case_id(case):
    num_rows, num_nodes, vocab, dtype = case
    return f"B{num_rows}-T{num_nodes}-V{vocab}-{str(dtype).removeprefix('torch.')}"


def make_inputs(num_rows, num_nodes, vocab, dtype=torch.float32, device="cpu"):
    """Return arguments in which about every third draft is what the target likes; every third row is greedy."""
    trees = [random_parents(num_nodes, seed) for seed in range(num_rows)]
    parents = torch.tensor(trees, dtype=torch.int32).reshape(num_rows, num_nodes)
    target = 2 * torch.randn(num_rows, num_nodes, vocab)
    ids = torch.randint(vocab, (num_rows, num_nodes))
    liked = target.argmax(-1).gather(1, parents.long().clamp(min=0))
    ids = torch.where(torch.rand(ids.shape) < 0.3, liked, ids)
    temperature = torch.tensor([0.7, 0.0, 1.3]).repeat(num_rows + 1)[:num_rows]
    inputs = {
        "ids": ids,
        "parents": parents,
        "target_logits": target.to(dtype),
        "draft_logits": (target + torch.randn_like(target)).to(dtype),
        "temperature": temperature,
        "uniforms": torch.rand(num_rows, num_nodes),
        "num_nodes": torch.randint(0, num_nodes + 1, (num_rows,), dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def as_chain(inputs):
    """Return the arguments of verify_chain for the same logits."""
    return {
        "draft_ids": inputs["ids"][:, 1:],
        "target_logits": inputs["target_logits"],
        "draft_logits": inputs["draft_logits"][:, :-1],
        "temperature": inputs["temperature"],
        "uniforms": inputs["uniforms"],
        "draft_len": (inputs["num_nodes"] - 1).clamp(min=0),
    }


def pick(inputs, *names):
    return {name: inputs[name] for name in names}


# Op, its options, and its arguments out of make_inputs.
TREE = ("ids", "parents", "target_logits", "draft_logits", "temperature", "uniforms", "num_nodes")
CALLS = {
    "chain": (verify_chain, {}, as_chain),
    "chain-chosen": (verify_chain, {}, lambda i: as_chain(i) | {"draft_logits": None, "draft_len": None}),
    "block": (verify_chain, {"block": True}, as_chain),
    "tree": (verify_tree, {}, lambda i: pick(i, *TREE)),
    "tree-chosen": (verify_tree, {}, lambda i: pick(i, *TREE) | {"draft_logits": None, "num_nodes": None}),
    "tree-with-replacement": (verify_tree, {"with_replacement": True}, lambda i: pick(i, *TREE)),
    "greedy": (verify_tree_greedy, {}, lambda i: pick(i, "ids", "parents", "target_logits", "num_nodes")),
    "typical": (verify_tree_typical, THRESHOLDS, lambda i: pick(i, *TREE[:3], *TREE[4:])),
}
DEFAULTS = {
    "verify_chain": {"block": False, "draft_vocab_map": None},
    "verify_tree": {"with_replacement": False, "draft_vocab_map": None},
}


def assert_same(actual, expected):
    for name, a, e in zip(Verification._fields, actual, expected, strict=True):
        assert a.dtype == e.dtype, name
        assert torch.equal(a.cpu(), e.cpu()), f"{name}: {a} against {e}"


def slow_tree(ids, parents, target, laws, temperature, uniforms, num_nodes, with_replacement=False):
    """Follow the definition for one row, in Python numbers; return the emitted ids and the accepted nodes."""

    def softmax(row):
        if temperature < 1e-5:
            return [float(x == row.index(max(row))) for x in range(len(row))]
        weights = [math.exp((v - max(row)) / temperature) for v in row]
        return [w / sum(weights) for w in weights]

    node, accepted = 0, []
    p, q = softmax(target[0]), laws and softmax(laws[0])
    for child in range(1, num_nodes):
        if parents[child] != node:
            continue
        x = ids[child]
        law = q if q and q[x] > 0 and temperature >= 1e-5 else [float(v == x) for v in range(len(p))]
        if (0 if temperature < 1e-5 else uniforms[child]) * law[x] < p[x]:
            node, accepted = child, [*accepted, child]
            p, q = softmax(target[child]), laws and softmax(laws[child])
            continue
        rest = [max(a - b, 0) for a, b in zip(p, law, strict=True)]
        p = [r / sum(rest) for r in rest] if sum(rest) > 0 else p
        if q and not with_replacement:
            q = [0.0 if v == x else mass for v, mass in enumerate(q)]
            q = [mass / (sum(q) or 1) for mass in q]
    level = uniforms[0] * sum(p)
    final = next(x for x, total in enumerate(itertools.accumulate(p)) if total > level)
    return [*(ids[i] for i in accepted), final], accepted


@pytest.mark.parametrize("case", CASES[:5], ids=case_id)
@pytest.mark.parametrize("name", ["tree", "tree-chosen", "tree-with-replacement"])
def test_follows_the_definition(backend, name, case):
    op, options, arguments = CALLS[name]
    inputs = arguments(make_inputs(*case[:3], torch.float64))
    result = op(**inputs, **options)
    lists = {k: t.tolist() for k, t in inputs.items() if t is not None}
    for row in range(case[0]):
        count = min(lists["num_nodes"][row], case[1]) if "num_nodes" in lists else case[1]
        laws = lists["draft_logits"][row] if "draft_logits" in lists else None
        args = [lists[k][row] for k in ("ids", "parents", "target_logits")]
        emitted, accepted = slow_tree(*args, laws, lists["temperature"][row], lists["uniforms"][row], count, **options)
        assert result.num_accepted[row] == len(accepted)
        assert result.accepted[row].tolist() == accepted + [-1] * (case[1] - 1 - len(accepted))
        assert result.output_ids[row].tolist() == emitted + [-1] * (case[1] - len(emitted))


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("name", CALLS)
def test_matches_reference(backend, device, name, case):
    op, options, arguments = CALLS[name]
    inputs = arguments(make_inputs(*case, device=device))
    on_cpu = {key: value if value is None else value.cpu() for key, value in inputs.items()}
    assert_same(op(**inputs, **options), getattr(reference, f"{op.__name__}_ref")(**on_cpu, **options))


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(backend, device, name):
    op, options, arguments = CALLS[name]
    inputs = tuple(arguments(make_inputs(2, 5, 11, device=device)).values())
    options = DEFAULTS.get(op.__name__, {}) | options
    torch.library.opcheck(getattr(ops, op.__name__).default, inputs, options)


@pytest.mark.parametrize("name", CALLS)
def test_compiles(backend, device, name):
    op, options, arguments = CALLS[name]
    inputs = arguments(make_inputs(2, 5, 11, device=device))
    expected = op(**inputs, **options)
    assert_same(torch.compile(op, fullgraph=True, backend="aot_eager")(**inputs, **options), expected)


@pytest.mark.parametrize("name", ["chain", "tree", "greedy", "typical"])
def test_exports(backend, name):
    op, options, arguments = CALLS[name]
    inputs = arguments(make_inputs(2, 5, 11))

    class Step(torch.nn.Module):
        def forward(self, **tensors):
            return op(**tensors, **options)

    exported = torch.export.export(Step(), (), inputs).module()
    assert_same(exported(**inputs), op(**inputs, **options))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CALLS)
def test_cuda_graph(name):
    op, options, arguments = CALLS[name]
    inputs = arguments(make_inputs(3, 9, 101, device="cuda"))
    op(**inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(**inputs, **options)
    fresh = arguments(make_inputs(3, 9, 101, device="cuda"))
    for key, value in fresh.items():
        if value is not None:
            inputs[key].copy_(value)
    graph.replay()
    assert_same(captured, op(**inputs, **options))


@pytest.mark.parametrize("module", [specdec_kernels.ops.verify, specdec_kernels.ops._verify_philox])
def test_docstring_examples(module):
    assert doctest.testmod(module).failed == 0
