"""What one step of a target costs by its number of nodes: transformers' own forward, ours, and ours prepared.

    python -m benchmarks.e2e.steps --nodes 1 8 16 --context 256

Milliseconds, medians; the three take turns.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache

from specdec_kernels.hf import _compat
from specdec_kernels.hf.load import PACKAGED_MODEL, load_model
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.hf.target import HFTarget
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents


def model_step(model, context: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a step of the model's own forward over a dynamic cache, which forgets what the step adds."""
    cache, name = DynamicCache(), _compat.cache_argument(model)

    @torch.no_grad()
    def run(ids: torch.Tensor) -> None:
        model(input_ids=ids, **{name: cache}, use_cache=True)
        for layer in cache.layers:
            layer.keys, layer.values = (t[:, :, : context.shape[1]] for t in (layer.keys, layer.values))

    run(context)
    return run


def target_step(model, context: torch.Tensor, max_nodes: int) -> Callable[[torch.Tensor], None]:
    """Return a step of `HFTarget` over a binary tree."""
    length = context.shape[1]
    target = HFTarget(model, 1, length + max_nodes)
    target.prefill(context, torch.tensor([length], dtype=torch.int32))

    def run(ids: torch.Tensor) -> None:
        parents = [-1, *((node - 1) // 2 for node in range(1, ids.shape[1]))]
        mask = mask_from_parents(torch.tensor([parents], dtype=torch.int32))
        target.forward(ids, mask, depths_from_mask(mask))

    return run


def measure(steps: dict[str, Callable[[torch.Tensor], None]], ids: torch.Tensor, repeats: int) -> dict[str, float]:
    """Return the median time of each step in ms; the steps take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step(ids)
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a line for each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 8, 16, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", default=PACKAGED_MODEL)
    args = parser.parse_args()
    model = load_model(args.model, dtype=torch.bfloat16)
    fast = prepare(copy.deepcopy(model))
    context = torch.randint(model.config.vocab_size, (1, args.context), generator=torch.Generator().manual_seed(0))
    steps = {
        "model.forward": model_step(model, context),
        "ours": target_step(model, context, max(args.nodes)),
        "ours prepared": target_step(fast, context, max(args.nodes)),
    }
    print(f"{'nodes':>5}" + "".join(f"{name:>16}" for name in steps) + "   ms per step")
    for nodes in args.nodes:
        measured = measure(steps, context[:, :nodes], args.repeats)
        print(f"{nodes:>5}" + "".join(f"{measured[name]:>16.1f}" for name in steps), flush=True)


if __name__ == "__main__":
    main()
