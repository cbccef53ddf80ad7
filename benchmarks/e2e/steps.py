"""What one step of a target costs by its number of nodes: transformers' own forward, ours, and ours prepared.

    python -m benchmarks.e2e.steps --nodes 1 8 16 --context 256
    python -m benchmarks.e2e.steps --save                        # writes benchmarks/results/<device>/e2e_steps_*.jsonl

Milliseconds, medians; all take turns. Of the prepared step also its parts: the linear layers' calls of a step whose
layers run one by one, alone, in their order, and those of the attention; the rest is all else: norms, rotary embedding,
Python. A whole step is one call, in which threads are not woken anew for each part, so the rest may be less than
nothing.
"""

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from benchmarks.e2e.rows import without_folders
from benchmarks.harness import RESULTS, write_records
from benchmarks.machine import describe_machine
from specdec_kernels._ops import NAMESPACE
from specdec_kernels.hf import _compat
from specdec_kernels.hf.load import PACKAGED_MODEL, load_model
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.training.layer_costs import timed_us
from specdec_kernels.training.step_costs import StepProbe, median_times

PARTS = {"linear": ("linear", "gated_linear"), "attention": ("tree_attention", "paged_tree_attention")}


@dataclass(frozen=True)
class Step:
    """Microseconds of a step of so many nodes behind a context; linear layers and attention are of the prepared one."""

    num_nodes: int
    context_len: int
    model_us: float
    ours_us: float
    prepared_us: float
    linear_us: float
    attention_us: float

    @property
    def rest_us(self) -> float:
        """What the prepared step takes besides linear layers and attention."""
        return self.prepared_us - self.linear_us - self.attention_us

    @property
    def over(self) -> float:
        """The rest over linear layers and attention."""
        return self.rest_us / (self.linear_us + self.attention_us)


class RecordedCalls(TorchDispatchMode):
    """Keep the calls of this package's ops, with their arguments, to be made again."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[str, Callable[[], Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self._calls.append((func.name().split("::")[1], partial(func, *args, **(kwargs or {}))))
        return func(*args, **(kwargs or {}))

    def of(self, names: Iterable[str]) -> list[Callable[[], Any]]:
        """Return the calls of some ops in their order."""
        return [call for name, call in self._calls if name in names]


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


def measure(model, nodes: Iterable[int], context_len: int, repeats: int) -> Iterable[Step]:
    """Time every number of nodes."""
    fast, largest = prepare(copy.deepcopy(model)), max(nodes)
    ids = torch.randint(model.config.vocab_size, (1, context_len), generator=torch.Generator().manual_seed(0))
    forward = model_step(model, ids)
    plain, prepared = StepProbe(model, 1, context_len, largest), StepProbe(fast, 1, context_len, largest)
    for num_nodes in nodes:
        # Layers with hooks run by themselves.
        handles = [layer.register_forward_hook(lambda *_: None) for layer in fast.base_model.layers]
        with RecordedCalls() as calls:
            prepared.time_us(num_nodes)
        for handle in handles:
            handle.remove()
        probes = [
            partial(_timed, partial(forward, ids[:, :num_nodes])),
            partial(plain.time_us, num_nodes),
            partial(prepared.time_us, num_nodes),
            *(partial(_timed, *calls.of(names)) for names in PARTS.values()),
        ]
        yield Step(num_nodes, context_len, *median_times(probes, repeats))


def _timed(*calls: Callable[[], Any]) -> float:
    @torch.no_grad()
    def run() -> None:
        for call in calls:
            call()

    return timed_us(run, torch.device("cpu"))


def result_file(dtype: str) -> Path:
    """Return this machine's result file."""
    return RESULTS / describe_machine(torch.device("cpu")).slug / f"e2e_steps_{dtype}.jsonl"


def save(path: Path, model: str, steps: Iterable[Step]) -> None:
    """Write the machine, the command and the steps."""
    machine = asdict(describe_machine(torch.device("cpu")))
    command = "python -m benchmarks.e2e.steps " + " ".join(map(without_folders, sys.argv[1:]))
    records = [{"machine": machine, "command": command, "model": model}, *map(asdict, steps)]
    write_records(path, records)


def markdown(path: Path) -> list[str]:
    """Return the table of a result file, in milliseconds."""
    columns = ("nodes", "`model.forward`", "ours", "prepared", "linear", "attention", "rest", "rest / the other two")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for line in path.read_text().splitlines()[1:]:
        step = Step(**json.loads(line))
        times = step.model_us, step.ours_us, step.prepared_us, step.linear_us, step.attention_us, step.rest_us
        cells = [f"{us / 1e3:.1f}" for us in times]
        lines.append(f"| {step.num_nodes} | {' | '.join(cells)} | {step.over * 100:.0f} % |")
    return lines


def main() -> None:
    """Print a line for each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 8, 16, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", default=PACKAGED_MODEL)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/e2e_steps_*.jsonl")
    args = parser.parse_args()
    model, steps = load_model(args.model, dtype=torch.bfloat16), []
    print("nodes   model.forward      ours  prepared = linear + attention + rest     ms   rest over the other two")
    for step in measure(model, args.nodes, args.context, args.repeats):
        steps.append(step)
        ms = [us / 1e3 for us in (step.model_us, step.ours_us, step.prepared_us, step.linear_us, step.attention_us)]
        print(
            f"{step.num_nodes:>5}{ms[0]:>16.1f}{ms[1]:>10.1f}{ms[2]:>10.1f}{ms[3]:>9.1f}{ms[4]:>12.1f}"
            f"{step.rest_us / 1e3:>7.1f}{step.over:>33.0%}",
            flush=True,
        )
    if args.save:
        save(result_file("bfloat16"), Path(args.model).name, steps)
        print(f"\nwrote {os.path.relpath(result_file('bfloat16'))}")


if __name__ == "__main__":
    main()
