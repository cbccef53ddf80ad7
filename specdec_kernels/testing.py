"""Helpers for testing these ops, and ops that claim to match them."""

import torch
from torch import Tensor


def random_parents(num_nodes: int, seed: int, max_depth: int | None = None) -> list[int]:
    """Draw a random topological tree: ``parents[0] == -1`` and ``parents[i] < i``."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [-1], [0]
    while len(parents) < num_nodes:
        parent = int(torch.randint(len(parents), (), generator=generator))
        if max_depth is None or depths[parent] < max_depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def assert_close_to_baseline(actual: Tensor, exact: Tensor, baseline: Tensor, *, factor: float = 2.0) -> None:
    """Require ``|actual − exact| ≤ factor · max|baseline − exact| + 4 ulp``.

    The tolerance is what plain torch reaches in the same dtype, never a number chosen by hand.

    Args:
        actual: the result under test.
        exact: the fp64 reference.
        baseline: plain torch in ``actual``'s dtype.
        factor: how many times the baseline's largest error is allowed.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    exact = exact.double()
    error = (actual.double() - exact).abs()
    ulp = torch.finfo(actual.dtype).eps * exact.abs()
    allowed = factor * (baseline.double() - exact).abs().max() + 4 * ulp
    bad = ~(error <= allowed)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements off, first at {where}: "
            f"got {actual[where].item()}, exact {exact[where].item()}, allowed error {allowed[where].item():.3g}"
        )
