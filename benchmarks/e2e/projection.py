"""What speculation would bring on a GPU, computed from bytes and operations. A projection: nothing here was measured.

    python -m benchmarks.e2e.projection
    python -m benchmarks.e2e.projection --accuracy examples/heads/smollm2-135m-instruct-medusa/accuracy.json

A step of B rows with T nodes behind P tokens reads the weights once and every row's cache once, and multiplies each
weight with B·T rows; linear layers and attention follow one another, each bound by its bytes or by its operations:

    step  =  max(weights / bandwidth, 2 · weights · B·T / rate)
             + max(cache · B·P / bandwidth, 4 · B·T·P · Hq·D·L / rate)

Bandwidth and rate are the data sheet's times the share of them that good kernels reach (assumed). Drafting with four
Medusa heads on the shared vocabulary projection counts. Left out: launches (a captured graph has next to none), norms
and other small kernels, sampling, and communication between tensor-parallel ranks.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import MODELS, Model
from specdec_kernels.decoding.budget import NodeBudget
from specdec_kernels.tree import grow_tree

BYTES = 2  # bf16, weights and cache
NUM_HEADS, NUM_RANKS, LARGEST = 4, 10, 128


@dataclass(frozen=True)
class Device:
    """Peak rates of a data sheet, and the share of them to reckon with."""

    name: str
    bandwidth: float
    rate: float
    memory: float
    bandwidth_share: float = 0.8
    rate_share: float = 0.6

    def seconds(self, num_bytes: float, num_operations: float) -> float:
        """Return the time of work that is bound by one or the other."""
        return max(num_bytes / (self.bandwidth * self.bandwidth_share), num_operations / (self.rate * self.rate_share))


# NVIDIA H200 SXM: 4.8 TB/s, 989 Tflop/s in bf16 without sparsity, 141 GB.
H200 = Device("H200", 4.8e12, 989e12, 141e9)
# How often each head's best candidate is right. Both are assumptions, the second like the best published heads.
HEADS = {"modest heads": (0.50, 0.35, 0.25, 0.20), "strong heads": (0.75, 0.60, 0.50, 0.40)}


def accuracies_of(best: Sequence[float]) -> list[list[float]]:
    """Return accuracies by rank.

    The second candidate is right 0.35 times as often as the first, but in at most 0.3 of what that one misses; each
    further one 0.6 times as often as the one before.
    """
    return [[p, *(min(0.35 * p, 0.3 * (1 - p)) * 0.6**rank for rank in range(NUM_RANKS - 1))] for p in best]


def num_weights(model: Model) -> int:
    """Return the weights that a step multiplies with: linear layers and the vocabulary projection."""
    width, heads = model.hidden_size, model.num_heads + 2 * model.num_kv_heads
    attention = width * model.head_dim * (heads + model.num_heads)
    return model.num_layers * (attention + 3 * width * model.intermediate_size) + model.vocab_size * width


def cache_bytes(model: Model) -> int:
    """Return the bytes of one token's K and V in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * BYTES


def step_us(model: Model, device: Device, num_nodes: int, batch_size: int, context_len: int) -> float:
    """Return the time of a step; of one with more than one node, drafting included."""
    rows = batch_size * num_nodes
    weights = num_weights(model)
    linear = device.seconds(weights * BYTES, 2.0 * weights * rows)
    operations = 4.0 * rows * context_len * model.num_heads * model.head_dim * model.num_layers
    attention = device.seconds(batch_size * context_len * cache_bytes(model), operations)
    return 1e6 * (linear + attention + (draft_seconds(model, device, batch_size) if num_nodes > 1 else 0.0))


def draft_seconds(model: Model, device: Device, batch_size: int) -> float:
    """Return the time of the heads: a residual block each, and the vocabulary projection once for all of them."""
    blocks, projection = NUM_HEADS * model.hidden_size**2, model.vocab_size * model.hidden_size
    operations = 2.0 * batch_size * (blocks + NUM_HEADS * projection)
    return device.seconds((blocks + projection) * BYTES, operations)


def fits(model: Model, device: Device, batch_size: int, context_len: int) -> bool:
    """Say whether weights and cache fit into the memory, a tenth of it left for the rest."""
    held = num_weights(model) * BYTES + batch_size * context_len * cache_bytes(model)
    return held <= 0.9 * device.memory


def budget_of(model: Model, device: Device, accuracies: Sequence[Sequence[float]]) -> NodeBudget:
    """Return the budget of the best trees, every size allowed."""
    _, gains = grow_tree(accuracies, LARGEST)
    return NodeBudget(
        gains, lambda nodes, rows, context: step_us(model, device, nodes, rows, context), sizes=range(1, LARGEST)
    )


def best_size(budget: NodeBudget, batch_size: int, context_len: int) -> int:
    """Return the fastest number of nodes at exactly this context."""
    return max(budget.sizes, key=lambda size: budget.tokens_per_s(size, batch_size, context_len))


def last_batch(pays: Callable[[int], bool], largest: int = 1 << 16) -> int | None:
    """Return the largest batch size that pays, None when there is no end to them; larger ones never pay more."""
    if pays(largest):
        return None
    low, high = 0, largest - 1
    while low < high:
        batch = (low + high + 1) // 2
        low, high = (batch, high) if pays(batch) else (low, batch - 1)
    return low


def speed_up(budget: NodeBudget, batch_size: int, context_len: int) -> float:
    """Return how much faster the best tree is than plain decoding."""
    size = best_size(budget, batch_size, context_len)
    speeds = [budget.tokens_per_s(nodes, batch_size, context_len) for nodes in (size, 1)]
    return speeds[0] / speeds[1]


def table(budgets: dict[str, NodeBudget], model: Model, device: Device, contexts: Sequence[int]) -> list[str]:
    """Return a table in Markdown: nodes and speed-up by batch size, and the batch size where it ends."""
    batches = (1, 4, 16, 64, 256)
    lines = [
        "| heads | context | " + " | ".join(f"B = {b}" for b in batches) + " | room for | 1.1 × up to | pays up to |",
        "|---" * (len(batches) + 5) + "|",
    ]
    for name, budget in budgets.items():
        for context in contexts:
            cells = [_cell(budget, model, device, batch, context) for batch in batches]
            ends = [
                last_batch(lambda b, c=context: fits(model, device, b, c)),  # type: ignore[misc]
                *(
                    last_batch(lambda b, c=context, g=gain, own=budget: speed_up(own, b, c) >= g)  # type: ignore[misc]
                    for gain in (1.1, 1.001)
                ),
            ]
            shown = ["no end" if end is None else f"B = {end}" for end in ends]
            lines.append(f"| {name} | {context} | " + " | ".join([*cells, *shown]) + " |")
    return lines


def _cell(budget: NodeBudget, model: Model, device: Device, batch_size: int, context_len: int) -> str:
    if not fits(model, device, batch_size, context_len):
        return "no room"
    return f"{best_size(budget, batch_size, context_len)}: {speed_up(budget, batch_size, context_len):.2f} ×"


def report(accuracies: dict[str, list[list[float]]]) -> str:
    """Return all tables, as they stand in ``docs/performance.md``."""
    parts = []
    for title, name in (("Llama-3-8B", "llama3_8b"), ("Llama-3-70B, one of 8 tensor-parallel ranks", "llama3_70b_tp8")):
        model = MODELS[name]
        budgets = {heads: budget_of(model, H200, table) for heads, table in accuracies.items()}
        plain = step_us(model, H200, 1, 1, 1024) / 1e3
        parts.append(
            f"{title}, {H200.name}, bf16: {num_weights(model) * BYTES / 1e9:.1f} GB of weights, a plain step of one "
            f"row behind 1024 tokens {plain:.2f} ms\n\n" + "\n".join(table(budgets, model, H200, (256, 1024, 8192)))
        )
    return "\n\n".join(parts)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy", type=Path, help="of heads that were measured, as `train medusa` writes it")
    args = parser.parse_args()
    accuracies = {name: accuracies_of(best) for name, best in HEADS.items()}
    if args.accuracy is not None:
        accuracies = {"measured heads": json.loads(args.accuracy.read_text())["heads"]}
    print(report(accuracies))


if __name__ == "__main__":
    main()
