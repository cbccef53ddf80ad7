"""Options that are Python numbers: what is none raises an error that names the op and the argument."""

import pytest
import torch

from specdec_kernels import medusa_project_topk, philox_uniforms, tree_attention, verify_tree_typical


def attend(**options):
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 1, 8)
    return tree_attention(q, cache, cache, torch.ones(1, 1, 1).long(), torch.zeros(1).int(), **options)


def rank(k):
    return medusa_project_topk(torch.randn(1, 4), torch.zeros(2, 1, 4, 4), None, torch.randn(9, 4), k)


def draw(count):
    return philox_uniforms(torch.zeros(1).long(), torch.zeros(1).long(), count)


def judge(**options):
    ids, parents = torch.zeros(1, 1).long(), torch.full((1, 1), -1, dtype=torch.int32)
    thresholds = {"epsilon": 0.1, "delta": 0.3} | options
    return verify_tree_typical(ids, parents, torch.randn(1, 1, 5), torch.ones(1), torch.rand(1, 1), **thresholds)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attend(scale="x"), TypeError, "tree_attention: scale must be a number, got str"),
        (lambda: attend(softcap=torch.ones(1)), TypeError, "tree_attention: softcap must be a number, got Tensor"),
        (lambda: attend(window=2.5), TypeError, "tree_attention: window must be an int, got float"),
        (lambda: attend(window=2**70), ValueError, "tree_attention: window must fit in 64 bits"),
        (lambda: rank(None), TypeError, "medusa_project_topk: k must be an int, got NoneType"),
        (lambda: rank(True), TypeError, "medusa_project_topk: k must be an int, got bool"),
        (lambda: draw(1.0), TypeError, "philox_uniforms: count must be an int, got float"),
        (lambda: judge(epsilon=None), TypeError, "verify_tree_typical: epsilon must be a number, got NoneType"),
        (lambda: judge(delta=float("nan")), ValueError, "verify_tree_typical: delta must be at least 0, got nan"),
    ],
)
def test_rejects(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_right_kinds_pass() -> None:
    attend(scale=1, softcap=2.0, window=3), rank(2), draw(0), judge(epsilon=1)
