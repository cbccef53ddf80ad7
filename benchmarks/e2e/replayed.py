"""Tokens per step of Medusa and n-gram drafts, counted on recorded greedy texts: what trees bring, not what they cost.

    python -m benchmarks.e2e.replayed --prompts FILE --save  # writes benchmarks/results/<device>/e2e_replayed_*

A prepared model in bf16 decodes each prompt once, plainly. Then every drafter drafts for the same texts, and a target
that only looks into the record says what is right, so nothing here depends on how fast a machine is.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.e2e.prompts import OWN_PROMPTS, encode, read_prompts
from benchmarks.e2e.rows import without_folders
from benchmarks.harness import RESULTS, write_records
from benchmarks.machine import describe_machine
from specdec_kernels.cli import _drafters
from specdec_kernels.decoding import DecodeStats, DynamicTree, GreedyAcceptance, decode
from specdec_kernels.decoding.drafters import MedusaDrafter, MergedDrafter, NGramDrafter, PlainDrafter
from specdec_kernels.decoding.protocols import Drafter, Target, TargetOutput
from specdec_kernels.hf.load import PACKAGED_MODEL, load_model, load_tokenizer
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.hf.target import HFTarget
from specdec_kernels.tree import optimize_tree

NODES = (4, 8, 16, 32)
MERGED_NODES = 32


class Text(NamedTuple):
    """A greedy text.

    Attributes:
        prompt: its ids.
        tokens: ``(n,) int64``, what followed.
        hidden: ``(n, C)``; token *i* was chosen from row *i*.
    """

    prompt: list[int]
    tokens: Tensor
    hidden: Tensor


class RecordedTarget:
    """Say behind every node what stands there in the text, from a record; batch 1.

    Behind its end that is ``num_ids``, an id that no drafter knows. Nodes off the text get an answer too, but nobody
    asks for it: their own token is not the one that their parent is answered.
    """

    def __init__(self, text: Text, num_ids: int, capacity: int):
        self.text, self.num_ids, self.capacity = text, num_ids, capacity
        self._done = 0

    @property
    def prefix_len(self) -> Tensor:
        return torch.tensor([len(self.text.prompt) + self._done], dtype=torch.int32)

    def prefill(self, ids: Tensor, lengths: Tensor) -> TargetOutput:
        return self._output(torch.zeros(1, dtype=torch.int64))

    def forward(self, ids: Tensor, tree_mask: Tensor, depths: Tensor) -> TargetOutput:
        return self._output(self._done + depths[0].long() + 1)

    def commit(self, accepted: Tensor, num_accepted: Tensor, active: Tensor) -> None:
        self._done += int(num_accepted[0]) + 1

    def _output(self, chosen: Tensor) -> TargetOutput:
        """Return the output of nodes behind which token ``chosen (T,)`` of the text comes."""
        count = len(self.text.tokens)
        next_ids = F.pad(self.text.tokens, (0, 1), value=self.num_ids)[chosen.clamp_max(count)]
        logits = F.one_hot(next_ids, self.num_ids + 1).float()
        return TargetOutput(logits[None], self.text.hidden[chosen.clamp_max(count - 1)][None])


def record(model, prompt: list[int], max_new_tokens: int) -> Text:
    """Decode a prompt plainly and keep the hidden states, too."""
    target: Target = HFTarget(model, 1, len(prompt) + max_new_tokens)
    stops = model.generation_config.eos_token_id
    tokens, hidden = list[int](), list[Tensor]()
    for step in decode(
        target, PlainDrafter(), torch.tensor([prompt]), torch.tensor([len(prompt)], dtype=torch.int32),
        acceptance=GreedyAcceptance(), max_new_tokens=max_new_tokens,
        eos_ids=[] if stops is None else [stops] if isinstance(stops, int) else stops,
    ):  # fmt: skip
        tokens += step.tokens[0]
        hidden.append(step.output.hidden[0, :1].clone())
    return Text(prompt, torch.tensor(tokens), torch.cat(hidden))


def replay(text: Text, drafter: Drafter, num_ids: int) -> DecodeStats:
    """Let a drafter draft for a text."""
    stats, count = DecodeStats(), len(text.tokens)
    target = RecordedTarget(text, num_ids, len(text.prompt) + count + drafter.max_nodes)
    prompt_len = torch.tensor([len(text.prompt)], dtype=torch.int32)
    steps = decode(
        target, drafter, torch.tensor([text.prompt]), prompt_len, acceptance=GreedyAcceptance(),
        max_new_tokens=count, stats=stats,
    )  # fmt: skip
    tokens = [token for step in steps for token in step.tokens[0]]
    assert tokens == text.tokens.tolist(), "the text of a drafter is not the one that was recorded"
    return stats


@dataclass(frozen=True)
class Count:
    """A drafter on all texts: ``nodes`` it may use for its own tree, and means, of tokens/step over the texts."""

    drafter: str
    nodes: int | None
    tokens_per_step: float
    mean_nodes: float


def count(
    texts: Sequence[Text], drafters: Mapping[tuple[str, int | None], Callable[[], Drafter]], num_ids: int
) -> Iterator[Count]:
    """Replay all texts with every drafter, named ``(name, nodes)``."""
    for (name, nodes), make in drafters.items():
        drafter = make()
        # A text of one token has no steps.
        found = [stats for stats in (replay(text, drafter, num_ids) for text in texts) if stats.num_steps]
        used = sum(width * steps for stats in found for width, steps in enumerate(stats.width_histogram))
        mean = statistics.mean(stats.tokens_per_step for stats in found)
        yield Count(name, nodes, round(mean, 4), round(used / sum(stats.num_steps for stats in found), 3))


def drafters_of(args, model) -> dict[tuple[str, int | None], Callable[[], Drafter]]:
    """Return trees of both kinds and `NODES` sizes, alone and merged with n-grams, and what the commands make."""
    heads = _drafters.folder_of("heads", args)
    accuracies = json.loads((heads / "accuracy.json").read_text())["heads"]

    def medusa(nodes: int, *, dynamic: bool) -> Drafter:
        tree = DynamicTree(nodes) if dynamic else optimize_tree(accuracies, nodes)[0]
        return MedusaDrafter.from_pretrained(heads, model, tree=tree)

    def merged(nodes: int, *, dynamic: bool) -> Drafter:
        lookup = NGramDrafter(max_drafts=_drafters.LOOKUP_DRAFTS, num_branches=_drafters.LOOKUP_BRANCHES, min_prob=0.0)
        return MergedDrafter(medusa(nodes, dynamic=dynamic), lookup, max_nodes=MERGED_NODES)

    kinds = {"fixed tree": False, "dynamic tree": True}
    made: dict[tuple[str, int | None], Callable[[], Drafter]] = {
        (name, nodes): partial(medusa, nodes, dynamic=dynamic) for name, dynamic in kinds.items() for nodes in NODES
    }
    made |= {
        (f"{name}, merged with n-grams", nodes): partial(merged, nodes, dynamic=dynamic)
        for name, dynamic in kinds.items()
        for nodes in NODES
    }
    commands = {(f"`--drafter {name}`", None): name for name in ("ngram", "medusa", "medusa+ngram")}
    return made | {key: partial(_drafters.make, name, args, model) for key, name in commands.items()}


def markdown(path: Path) -> list[str]:
    """Return the table of a result file."""
    counts = [Count(**json.loads(line)) for line in path.read_text().splitlines()[1:]]
    trees = [row for row in counts if row.nodes is not None]
    sizes = sorted({row.nodes for row in trees if row.nodes is not None})
    lines = ["| tokens/step of trees of at most | " + " | ".join(f"{size} nodes" for size in sizes) + " |"]
    lines.append("|---" * (1 + len(sizes)) + "|")
    for name in dict.fromkeys(row.drafter for row in trees):
        found = {row.nodes: f"{row.tokens_per_step:.2f}" for row in trees if row.drafter == name}
        lines.append(f"| {name} | " + " | ".join(found.get(size, "") for size in sizes) + " |")
    lines += ["", "| as the commands draft | tokens/step | nodes on average |", "|---|---|---|"]
    return lines + [
        f"| {row.drafter} | {row.tokens_per_step:.2f} | {row.mean_nodes:.1f} |" for row in counts if row.nodes is None
    ]


def texts_of(model, prompts: Iterable[list[int]], max_new_tokens: int) -> list[Text]:
    """Record all prompts."""
    texts = []
    for number, prompt in enumerate(prompts):
        texts.append(record(model, prompt, max_new_tokens))
        print(f"\r{number + 1} texts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return texts


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--model", default=PACKAGED_MODEL)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/e2e_replayed_*.jsonl")
    _drafters.add_arguments(parser)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    tokenizer, model = load_tokenizer(args.model), prepare(load_model(args.model, dtype=torch.bfloat16))
    prompts = encode(tokenizer, [question["turns"][0] for question in read_prompts(args.prompts, args.limit)])
    texts = texts_of(model, prompts, args.max_new_tokens)
    machine = describe_machine(torch.device("cpu"))
    command = "python -m benchmarks.e2e.replayed " + " ".join(map(without_folders, sys.argv[1:]))
    records: list[dict] = [
        {"machine": asdict(machine), "command": command, "model": Path(args.model).name, "texts": len(texts)}
    ]
    for counted in count(texts, drafters_of(args, model), model.config.vocab_size):
        records.append(asdict(counted))
        print(" ".join(f"{key} {value}" for key, value in records[-1].items()), flush=True)
    if args.save:
        path = RESULTS / machine.slug / "e2e_replayed_bfloat16.jsonl"
        write_records(path, records)
        print(f"wrote {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
