"""`decoder_layers_`: the six of every op, and the bits of the ops that it stands for, one after the other."""

import doctest

import pytest
import torch

import specdec_kernels.ops.layers as op_module
from specdec_kernels import (
    decoder_layers_,
    gated_linear,
    linear,
    paged_tree_attention,
    rms_norm,
    rotary_cache_write_,
    tree_attention,
)
from specdec_kernels._ops import ops
from specdec_kernels.testing import assert_close_to_baseline, random_parents
from specdec_kernels.tree.mask import mask_from_parents

from ..marks import needs_native

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# (B, T, C, I, Hq, Hk, D), layers, dtype, which have biases, normed heads, slots, and why.
CASES = {
    "one-node": ((1, 1, 64, 96, 4, 2, 16), 2, BF16, (), False, False),
    "tree": ((1, 16, 192, 512, 3, 1, 64), 3, BF16, (), False, False),
    "ragged-batch-biases": ((3, 9, 40, 72, 4, 2, 10), 2, BF16, (0, 1, 2), False, False),
    "slots-normed-heads": ((2, 5, 48, 100, 6, 3, 8), 2, FP16, (3, 4, 5, 6), True, True),
    "blocks-of-rows": ((1, 150, 320, 640, 2, 2, 32), 2, BF16, (), False, False),
    "odd": ((2, 3, 17, 19, 3, 3, 6), 1, FP32, (0, 3, 6), True, False),
    "double": ((1, 4, 24, 30, 2, 1, 12), 2, FP64, (), False, False),
}
PREFIX, CAPACITY = 70, 240


def make_inputs(case, device="cpu"):
    """Return arguments by name; weights and caches have gaps, the second layer a window, a third no positions."""
    (batch, nodes, width, inner, q, kv, dim), count, dtype, biased, normed, slotted = case

    def random(*shape):
        return torch.randn(*shape[:-1], shape[-1] + 3).to(device, dtype)[..., 3:]

    shapes = [(q * dim, width), (kv * dim, width), (kv * dim, width), (width, q * dim), (inner, width), (inner, width)]
    shapes.append((width, inner))
    weights = []
    for _ in range(count):
        matrices = [random(*shape).mul_(shape[1] ** -0.5) for shape in shapes]
        weights += [random(width), *matrices[:4], random(width), *matrices[4:]]
        weights += [random(dim), random(dim)] if normed else []
    biases = [random(shapes[i][0]) for _ in range(count) for i in biased]
    rows = batch + 2 if slotted else batch
    caches = [random(rows, kv, CAPACITY, dim).transpose(1, 2) for _ in range(2 * count)]
    angle = (torch.rand(1, nodes, dim, device=device) * 100).to(dtype)
    parents = torch.tensor([random_parents(nodes, seed) for seed in range(batch)], dtype=torch.int32, device=device)
    return {
        "hidden": torch.randn(batch, nodes, width, device=device).to(dtype),
        "weights": weights,
        "cos": angle.cos(),
        "sin": angle.sin(),
        "caches": caches,
        "tree_mask": mask_from_parents(parents),
        "prefix_len": torch.tensor([PREFIX, 0, 3][:batch], dtype=torch.int32, device=device),
        "biases": biases,
        "biased": list(biased),
        "slots": torch.tensor([3, 1], dtype=torch.int32, device=device) if slotted else None,
        "windows": [0, 7, 0][:count],
        "rotated": [True, True, False][:count],
        "scale": 0.2,
        "eps": 1e-5,
    }


def copied(inputs):
    changed = {"hidden": inputs["hidden"].clone(), "caches": [cache.clone() for cache in inputs["caches"]]}
    return inputs | changed


def chain(inputs):
    """Run the layers by the ops of their stages."""
    a, x = inputs, inputs["hidden"]
    count, per_layer = len(a["windows"]), len(a["weights"]) // len(a["windows"])
    for layer in range(count):
        w = a["weights"][layer * per_layer :][:per_layer]
        b = dict(zip(a["biased"], a["biases"][layer * len(a["biased"]) :], strict=False))
        k, v = a["caches"][2 * layer : 2 * layer + 2]
        normed = rms_norm(x, w[0], a["eps"])
        qkv = torch.cat([linear(normed, [w[i + 1]], [b[i]] if i in b else []) for i in range(3)], dim=-1)
        qkv = qkv.unflatten(2, (-1, k.shape[3]))
        angles = (a["cos"], a["sin"]) if a["rotated"][layer] else (None, None)
        norms = dict(zip(("q_norm", "k_norm"), w[9:] or (None, None), strict=True))
        rotary_cache_write_(qkv, *angles, k, v, a["prefix_len"], slots=a["slots"], eps=a["eps"], **norms)
        q, options = qkv[:, :, : -2 * k.shape[2]], {"scale": a["scale"], "window": a["windows"][layer] or None}
        tree = a["tree_mask"], a["prefix_len"]
        if a["slots"] is None:
            attended, _ = tree_attention(q, k, v, *tree, **options)
        else:
            attended, _ = paged_tree_attention(q, k, v, a["slots"][:, None], *tree, **options)
        x = linear(attended.flatten(2), [w[4]], [b[3]] if 3 in b else [], residual=x)
        gated = gated_linear(rms_norm(x, w[5], a["eps"]), w[6], w[7], gate_bias=b.get(4), up_bias=b.get(5))
        x = linear(gated, [w[8]], [b[6]] if 6 in b else [], residual=x)
    inputs["hidden"].copy_(x)


def results(run, inputs):
    inputs = copied(inputs)
    run(inputs)
    return [inputs["hidden"], *inputs["caches"]]


def call(inputs):
    decoder_layers_(**inputs)


def on_cpu(inputs, dtype=None):
    def moved(value):
        if isinstance(value, list):
            return [moved(v) for v in value]
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return (
            value.cpu().to(dtype) if is_float and dtype else value.cpu() if isinstance(value, torch.Tensor) else value
        )

    return {name: moved(value) for name, value in inputs.items()}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_chain_of_ops(name, backend, device) -> None:
    inputs = make_inputs(CASES[name], device)
    exact = results(chain, on_cpu(inputs, FP64))
    plain = results(chain, on_cpu(inputs))
    for have, want, baseline in zip(results(call, inputs), exact, plain, strict=True):
        if want.dtype == baseline.dtype:
            torch.testing.assert_close(have.cpu(), want)
        else:
            assert_close_to_baseline(have.cpu(), want, baseline)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_has_the_bits_of_the_chain(name, threads) -> None:
    inputs, before = make_inputs(CASES[name]), torch.get_num_threads()
    expected = results(chain, inputs)
    try:
        torch.set_num_threads(threads)
        found = results(call, inputs)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(have, want) for have, want in zip(found, expected, strict=True))


@needs_native
@pytest.mark.parametrize("name", ["tree", "slots-normed-heads", "odd"])
def test_has_the_bits_of_the_chain_on_every_instruction_set(name, isa) -> None:
    inputs = make_inputs(CASES[name])
    expected = results(chain, inputs)
    assert all(torch.equal(have, want) for have, want in zip(results(call, inputs), expected, strict=True))


@needs_native
def test_nodes_do_not_depend_on_each_other() -> None:
    """A path run node by node gives the bits of the tree."""
    inputs = make_inputs(CASES["tree"])
    inputs["windows"] = [0, 0, 0]
    mask, together = inputs["tree_mask"][0, :, 0], results(call, inputs)[0]
    path = [node for node in range(16) if int(mask[15]) >> node & 1]
    alone = copied(inputs)
    for depth, node in enumerate(path):
        one = alone | {name: alone[name][:, node : node + 1] for name in ("cos", "sin")}
        one["hidden"] = inputs["hidden"][:, node : node + 1].clone()
        one["tree_mask"], one["prefix_len"] = torch.ones(1, 1, 1, dtype=torch.int64), inputs["prefix_len"] + depth
        call(one)
        assert torch.equal(one["hidden"][0, 0], together[0, node])


@pytest.mark.parametrize("name", ["ragged-batch-biases", "slots-normed-heads"])
def test_opcheck(name, backend, device) -> None:
    inputs = make_inputs(CASES[name], device)
    inputs["rotated"] = [int(value) for value in inputs["rotated"]]
    positional = [inputs.pop(name) for name in ("hidden", "weights", "cos", "sin", "caches", "tree_mask", "prefix_len")]
    torch.library.opcheck(ops.decoder_layers_.default, positional, inputs)


class Step(torch.nn.Module):
    def forward(self, hidden, weights, cos, sin, caches, tree_mask, prefix_len):
        hidden = hidden * 2
        decoder_layers_(hidden, weights, cos, sin, caches, tree_mask, prefix_len)
        return hidden + 1, caches[0].sum()


def few_inputs(device):
    inputs = make_inputs(CASES["one-node"], device)
    return [inputs[name] for name in ("hidden", "weights", "cos", "sin", "caches", "tree_mask", "prefix_len")]


def fresh(args):
    return [a if i != 4 else [cache.clone() for cache in a] for i, a in enumerate(args)]


def test_compiles_and_exports(backend, device) -> None:
    args = few_inputs(device)
    expected = Step()(*fresh(args))
    compiled = torch.compile(Step(), fullgraph=True, backend="aot_eager")
    program = torch.export.export(Step(), tuple(fresh(args)))
    assert "specdec_kernels.decoder_layers_" in program.graph_module.code
    for run in (compiled, program.module()):
        torch.testing.assert_close(run(*fresh(args)), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph() -> None:
    inputs = make_inputs(CASES["ragged-batch-biases"], "cuda")
    expected, replayed = results(call, inputs), copied(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(replayed)
    graph.replay()
    torch.testing.assert_close(replayed["hidden"], expected[0], rtol=0, atol=0)


GOOD = make_inputs(CASES["ragged-batch-biases"])


def with_one(name, index, value):
    return {name: [*GOOD[name][:index], value, *GOOD[name][index + 1 :]]}


REJECTED = [
    ({"hidden": GOOD["hidden"].int()}, TypeError, "hidden must be float16 or .*, got int32"),
    ({"hidden": GOOD["hidden"][:, :0]}, ValueError, r"hidden must have shape \(B, T, C\) with T, C >= 1, got"),
    ({"hidden": GOOD["hidden"].repeat(1, 1, 2)[..., :40]}, ValueError, "hidden must be contiguous, got strides"),
    ({"hidden": GOOD["hidden"].clone().requires_grad_()}, RuntimeError, "hidden requires grad"),
    ({"caches": GOOD["caches"][:3]}, ValueError, "caches must be two for each layer, got 3"),
    ({"weights": GOOD["weights"][:10]}, ValueError, "weights must be 9 or 11 for each of 2 layers, got 10"),
    ({"biased": [0, 4]}, ValueError, r"biased must be increasing in \[0, 6\], 4 and 5 both or none, got \[0, 4\]"),
    ({"biases": GOOD["biases"][:5]}, ValueError, "biases must be 6, got 5"),
    ({"windows": [1, -1]}, ValueError, r"windows must be 2 numbers of at least 0, got \[1, -1\]"),
    ({"rotated": [True]}, ValueError, r"rotated must be 2 numbers of at least 0, got \[True\]"),
    (with_one("weights", 11, GOOD["weights"][10]), ValueError, r"weights\[11\] must have shape \(20, 40\), got"),
    (with_one("weights", 8, GOOD["weights"][8].float()), TypeError, r"weights\[8\] must be bfloat16, got float32"),
    (with_one("biases", 5, torch.ones(3).bfloat16()), ValueError, r"biases\[5\] must have shape \(20,\), got \(3,\)"),
    (
        with_one("caches", 3, GOOD["caches"][3][:, 1:]),
        ValueError,
        r"caches\[3\] must have shape \(3, 240, 2, 10\), got",
    ),
    ({"caches": [cache[:2] for cache in GOOD["caches"]]}, ValueError, "caches must have 3 rows, got 2"),
    ({"tree_mask": GOOD["tree_mask"][:, :4]}, ValueError, r"tree_mask must have shape \(3, 9, 1\), got \(3, 4, 1\)"),
    ({"prefix_len": GOOD["prefix_len"].long()}, TypeError, "prefix_len must be int32, got int64"),
    ({"prefix_len": GOOD["prefix_len"] + 200}, ValueError, r"prefix_len must be in \[0, 231\], got 270"),
    ({"slots": torch.tensor([0, 1, 3]).int()}, ValueError, r"slots must be in \[0, 2\], got 3"),
    ({"cos": None}, ValueError, "cos and sin must both be given, or none"),
    ({"cos": GOOD["cos"][..., :3], "sin": GOOD["sin"][..., :3]}, ValueError, "cos must have an even width of at most"),
    ({"eps": "small"}, TypeError, "eps must be a number, got str"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), REJECTED, ids=lambda v: "-".join(v) if type(v) is dict else ""
)
def test_rejects(changes, error, message) -> None:
    with pytest.raises(error, match=f"^decoder_layers_: {message}"):
        decoder_layers_(**(GOOD | changes))


def test_extremes(backend, device) -> None:
    """No batch; padding, which sees nothing; NaN in one row stays there."""
    inputs = make_inputs(CASES["ragged-batch-biases"], device)
    empty = {name: inputs[name][:0] for name in ("hidden", "prefix_len", "tree_mask")}
    call(inputs | empty | {"caches": [cache[:0] for cache in inputs["caches"]]})
    inputs["tree_mask"][0, -1] = 0
    inputs["hidden"][1] = torch.nan
    found, expected = results(call, inputs)[0], results(chain, inputs)[0]
    assert found.isnan().flatten(1).any(1).tolist() == [False, True, False]
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_docstring() -> None:
    assert doctest.testmod(op_module).failed == 0
