"""Every documented error of the verification ops, raised before anything runs; and what is deliberately not one."""

import pytest
import torch

from specdec_kernels import verify_chain, verify_tree, verify_tree_greedy, verify_tree_typical

B, T, V = 2, 3, 5


def tree_inputs():
    return {
        "ids": torch.zeros(B, T, dtype=torch.int64),
        "parents": torch.tensor([[-1, 0, 1]], dtype=torch.int32),
        "target_logits": torch.randn(B, T, V),
        "draft_logits": torch.randn(B, T, V),
        "temperature": torch.ones(B),
        "uniforms": torch.rand(B, T),
        "num_nodes": torch.full((B,), T, dtype=torch.int32),
        "draft_vocab_map": None,
    }


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# What is replaced, by what, the error and its text.
TREE_ERRORS = {
    "ids-not-a-tensor": ({"ids": [[0, 0, 0]] * B}, TypeError, "ids must be a torch.Tensor, got list"),
    "ids-shape": ({"ids": torch.zeros(B, dtype=torch.int64)}, ValueError, r"ids must have shape \(B, T\), got \(2,\)"),
    "ids-dtype": ({"ids": torch.zeros(B, T, dtype=torch.uint8)}, TypeError, "ids must be int64, got uint8"),
    "no-root": (
        {"ids": torch.zeros(B, 0, dtype=torch.int64), "target_logits": torch.randn(B, 0, V)},
        ValueError,
        r"with the root, T >= 1, got \(2, 0\)",
    ),
    "target-shape": ({"target_logits": torch.randn(B, 2, V)}, ValueError, r"\(2, 3, V\), got \(2, 2, 5\)"),
    "target-dtype": ({"target_logits": torch.zeros(B, T, V, dtype=torch.int32)}, TypeError, "got int32"),
    "target-stride": ({"target_logits": torch.randn(B, V, T).mT}, ValueError, "stride 1 in its last dimension"),
    "no-vocabulary": ({"target_logits": torch.randn(B, T, 0)}, ValueError, r"V >= 1, got \(2, 3, 0\)"),
    "target-grad": (
        {"target_logits": torch.randn(B, T, V, requires_grad=True)},
        RuntimeError,
        "target_logits requires",
    ),
    "draft-shape": ({"draft_logits": torch.randn(B, T, 4)}, ValueError, r"\(2, 3, 5\), got \(2, 3, 4\)"),
    "draft-dtype": ({"draft_logits": torch.zeros(B, T, V, dtype=torch.int64)}, TypeError, "draft_logits must be"),
    "draft-stride": ({"draft_logits": torch.randn(B, V, T).mT}, ValueError, "draft_logits must have stride 1"),
    "draft-grad": ({"draft_logits": torch.randn(B, T, V, requires_grad=True)}, RuntimeError, "draft_logits requires"),
    "draft-device": ({"draft_logits": torch.empty(B, T, V, device="meta")}, ValueError, "must be on cpu, got meta"),
    "temperature-shape": ({"temperature": torch.ones(B, 1)}, ValueError, r"temperature must have shape \(2,\)"),
    "temperature-dtype": ({"temperature": torch.ones(B).half()}, TypeError, "float32, got float16"),
    "temperature-negative": ({"temperature": torch.tensor([1.0, -1.0])}, ValueError, "at least 0, got -1.0"),
    "temperature-nan": ({"temperature": torch.tensor([1.0, torch.nan])}, ValueError, "at least 0, got nan"),
    "temperature-inf": ({"temperature": torch.tensor([1.0, torch.inf])}, ValueError, "finite and .* got inf"),
    "uniforms-shape": ({"uniforms": torch.rand(B, 2)}, ValueError, r"uniforms must have shape \(2, 3\)"),
    "uniforms-dtype": ({"uniforms": torch.rand(B, T).half()}, TypeError, "float32 or float64, got float16"),
    "uniforms-one": ({"uniforms": torch.ones(B, T)}, ValueError, r"uniforms must be in \[0, 1\), got 1.0"),
    "uniforms-negative": ({"uniforms": -torch.ones(B, T)}, ValueError, r"in \[0, 1\), got -1.0"),
    "lengths-shape": ({"num_nodes": int32(1)}, ValueError, r"num_nodes must have shape \(2,\), got \(1,\)"),
    "lengths-dtype": ({"num_nodes": torch.tensor([1, 1])}, TypeError, "num_nodes must be int32, got int64"),
    "lengths-large": ({"num_nodes": int32(1, 4)}, ValueError, r"num_nodes must be in \[0, 3\], got 4"),
    "lengths-negative": ({"num_nodes": int32(-1, 3)}, ValueError, r"num_nodes must be in \[0, 3\], got -1"),
    "parents-shape": ({"parents": int32(-1, 0, 1)}, ValueError, r"parents must have shape \(2, 3\), got \(3,\)"),
    "parents-dtype": ({"parents": torch.tensor([[-1, 0, 1]])}, TypeError, "parents must be int32, got int64"),
    "parents-root": ({"parents": int32(0, 0, 1)[None]}, ValueError, "got parent 0 of node 0 in row 0"),
    "parents-later": ({"parents": int32(-1, 2, 0)[None]}, ValueError, "got parent 2 of node 1 in row 0"),
    "parents-itself": ({"parents": int32(-1, 0, 2)[None]}, ValueError, "got parent 2 of node 2 in row 0"),
    "parents-negative": (
        {"parents": torch.stack([int32(-1, 0, 1), int32(-1, 0, -1)])},
        ValueError,
        "got parent -1 of node 2 in row 1",
    ),
    "map-without-draft": (
        {"draft_logits": None, "draft_vocab_map": torch.zeros(V, dtype=torch.int64)},
        ValueError,
        "draft_vocab_map must be None when draft_logits is None",
    ),
    "map-shape": ({"draft_vocab_map": torch.zeros(1, V, dtype=torch.int64)}, ValueError, r"\(V'\,\), got \(1, 5\)"),
    "map-dtype": ({"draft_vocab_map": torch.zeros(V, dtype=torch.int32)}, TypeError, "must be int64, got int32"),
    "map-empty": ({"draft_vocab_map": torch.zeros(0, dtype=torch.int64)}, ValueError, "V' >= 1, got"),
    "map-absolute-ids": ({"draft_vocab_map": torch.arange(V)}, ValueError, r"in \[0, 4\], got 8"),
    "map-negative": ({"draft_vocab_map": torch.tensor([-1, 0, 0, 0, 0])}, ValueError, r"in \[0, 4\], got -1"),
    "map-draft-shape": ({"draft_vocab_map": torch.zeros(2, dtype=torch.int64)}, ValueError, r"\(2, 3, 2\), got"),
}


@pytest.mark.parametrize(("changes", "error", "text"), TREE_ERRORS.values(), ids=TREE_ERRORS)
def test_tree(changes, error, text):
    inputs = tree_inputs()
    verify_tree(**inputs)
    with pytest.raises(error, match=f"^verify_tree: .*{text}"):
        verify_tree(**inputs | changes)


SHARED = [name for name in TREE_ERRORS if not name.startswith(("draft", "map", "temperature", "uniforms"))]


@pytest.mark.parametrize("name", SHARED)
def test_greedy(name):
    changes, error, text = TREE_ERRORS[name]
    inputs = {k: tree_inputs()[k] for k in ("ids", "parents", "target_logits", "num_nodes")}
    with pytest.raises(error, match=f"^verify_tree_greedy: .*{text}"):
        verify_tree_greedy(**inputs | changes)


@pytest.mark.parametrize("name", [n for n in TREE_ERRORS if not n.startswith(("draft", "map"))])
def test_typical(name):
    changes, error, text = TREE_ERRORS[name]
    inputs = {k: v for k, v in tree_inputs().items() if not k.startswith("draft")}
    with pytest.raises(error, match=f"^verify_tree_typical: .*{text}"):
        verify_tree_typical(**inputs | changes, epsilon=0.1, delta=0.1)


@pytest.mark.parametrize("thresholds", [(-0.1, 0.3), (0.1, -0.3), (float("nan"), 0.3)])
def test_typical_thresholds(thresholds):
    inputs = {k: v for k, v in tree_inputs().items() if not k.startswith("draft")}
    epsilon, delta = thresholds
    with pytest.raises(ValueError, match=r"^verify_tree_typical: (epsilon|delta) must be at least 0, got "):
        verify_tree_typical(**inputs, epsilon=epsilon, delta=delta)


CHAIN_ERRORS = {
    "ids-shape": ({"draft_ids": torch.zeros(B, dtype=torch.int64)}, ValueError, r"draft_ids must have shape \(B, N\)"),
    "ids-dtype": ({"draft_ids": torch.zeros(B, 2)}, TypeError, "draft_ids must be int64, got float32"),
    "target-shape": ({"target_logits": torch.randn(B, 2, V)}, ValueError, r"\(2, 3, V\), got \(2, 2, 5\)"),
    "draft-shape": ({"draft_logits": torch.randn(B, 3, V)}, ValueError, r"\(2, 2, 5\), got \(2, 3, 5\)"),
    "draft-grad": ({"draft_logits": torch.randn(B, 2, V, requires_grad=True)}, RuntimeError, "requires grad"),
    "temperature": ({"temperature": torch.tensor([1.0, -1.0])}, ValueError, "at least 0, got -1.0"),
    "uniforms-shape": ({"uniforms": torch.rand(B, 2)}, ValueError, r"uniforms must have shape \(2, 3\)"),
    "lengths-large": ({"draft_len": int32(0, 3)}, ValueError, r"draft_len must be in \[0, 2\], got 3"),
    "lengths-negative": ({"draft_len": int32(0, -1)}, ValueError, r"draft_len must be in \[0, 2\], got -1"),
    "map-absolute-ids": ({"draft_vocab_map": torch.arange(V)}, ValueError, r"in \[0, 4\], got 8"),
}


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
@pytest.mark.parametrize(("changes", "error", "text"), CHAIN_ERRORS.values(), ids=CHAIN_ERRORS)
def test_chain(changes, error, text, block):
    inputs = {
        "draft_ids": torch.zeros(B, 2, dtype=torch.int64),
        "target_logits": torch.randn(B, 3, V),
        "draft_logits": torch.randn(B, 2, V),
        "temperature": torch.ones(B),
        "uniforms": torch.rand(B, 3),
        "draft_len": int32(2, 2),
        "draft_vocab_map": None,
    }
    verify_chain(**inputs, block=block)
    with pytest.raises(error, match=f"^verify_chain: .*{text}"):
        verify_chain(**inputs | changes, block=block)


def test_padding_is_not_judged():
    """Parents and ids behind num_nodes may be anything."""
    inputs = tree_inputs() | {"parents": int32(-1, 0, 99)[None], "num_nodes": int32(2, 2)}
    inputs["ids"][:, 2] = -7
    verify_tree(**inputs)


def test_no_grad_allows_parameters():
    inputs = tree_inputs() | {"target_logits": torch.randn(B, T, V, requires_grad=True)}
    with torch.no_grad():
        verify_tree(**inputs)
