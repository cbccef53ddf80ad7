"""What one step of a target costs by its number of nodes: transformers' own forward, ours, and ours prepared.

    python -m benchmarks.e2e.steps --nodes 1 8 16 --context 256

Milliseconds, medians; the three take turns.
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial

import torch
from transformers import DynamicCache

from specdec_kernels.hf import _compat
from specdec_kernels.hf.load import PACKAGED_MODEL, load_model
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.training.layer_costs import timed_us
from specdec_kernels.training.step_costs import StepProbe, median_times


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
    forward = model_step(model, context)
    probes: dict[str, Callable[[int], float]] = {
        "model.forward": lambda nodes: timed_us(lambda: forward(context[:, :nodes]), model.device),
        "ours": StepProbe(model, 1, args.context, max(args.nodes)).time_us,
        "ours prepared": StepProbe(fast, 1, args.context, max(args.nodes)).time_us,
    }
    print(f"{'nodes':>5}" + "".join(f"{name:>16}" for name in probes) + "   ms per step")
    for nodes in args.nodes:
        medians = median_times([partial(probe, nodes) for probe in probes.values()], args.repeats)
        print(f"{nodes:>5}" + "".join(f"{us / 1e3:>16.1f}" for us in medians), flush=True)


if __name__ == "__main__":
    main()
