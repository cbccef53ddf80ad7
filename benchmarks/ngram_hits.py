"""Count how often a text goes on as it did behind an earlier n-gram: what `NGramDrafter` makes of a match.

``python -m benchmarks.ngram_hits --prompts FILE`` decodes greedily, in bf16, and looks up each position of the texts.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.e2e.prompts import encode, read_prompts
from benchmarks.harness import RESULTS, write_records
from benchmarks.machine import describe_machine
from specdec_kernels.decoding.drafters import NGramDrafter
from specdec_kernels.decoding.drafters.ngram import SuffixIndex
from specdec_kernels.hf import speculative_generate
from specdec_kernels.hf.load import PACKAGED_MODEL, load_model, load_tokenizer
from specdec_kernels.hf.prepare import prepare


class Hits(NamedTuple):
    """Positions at which a suffix of one length had occurred before.

    Attributes:
        first: how many of them went on as its newest earlier occurrence had.
        positions: all of them.
        next: drafted tokens behind the first one that were right, up to the first wrong one of each position.
        drafted: those, and the wrong ones.
    """

    first: int
    positions: int
    next: int
    drafted: int


def count_hits(text: Sequence[int], prompt_len: int, max_ngram: int = 3, max_drafts: int = 10) -> dict[int, Hits]:
    """Return the hits by the length of the longest suffix that had occurred before.

    Args:
        text: the prompt and what followed it.
        prompt_len: its first tokens, which are only looked up in.
        max_ngram: the longest suffix.
        max_drafts: drafted at each position.
    """
    index = SuffixIndex(1, max_ngram, text[: prompt_len + 1])
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for position in range(prompt_len + 1, len(text)):
        room = min(max_drafts, len(text) - position)
        # Asked for as many tokens as the suffix is long, a continuation tells its length.
        length = len(next(index.continuations({n: n for n in range(1, max_ngram + 1)}), []))
        if length:
            draft = next(index.continuations(room))
            right = next((i for i in range(room) if draft[i] != text[position + i]), room)
            counts[length][0] += right > 0
            counts[length][1] += 1
            counts[length][2] += max(0, right - 1)
            counts[length][3] += min(right, room - 1) if right else 0
        index.extend([text[position]])
    return {length: Hits(*numbers) for length, numbers in sorted(counts.items())}


def added(parts: Sequence[Mapping[int, Hits]]) -> dict[int, Hits]:
    """Add the hits of several texts."""
    lengths = sorted({length for part in parts for length in part})
    found = {length: [part[length] for part in parts if length in part] for length in lengths}
    return {length: Hits(*map(sum, zip(*hits, strict=True))) for length, hits in found.items()}


def texts(questions: list[dict], max_new_tokens: int) -> list[tuple[list[int], int]]:
    """Return greedy texts, prompts included, and the lengths of the prompts."""
    tokenizer, model = load_tokenizer(PACKAGED_MODEL), prepare(load_model(PACKAGED_MODEL))
    rows = []
    for ids in encode(tokenizer, [question["turns"][0] for question in questions]):
        text = model.generate(
            torch.tensor([ids]),
            custom_generate=speculative_generate,
            drafter=NGramDrafter(),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        rows.append((text[0].tolist(), len(ids)))
        print(f"\r{len(rows)}/{len(questions)}", end="", flush=True)
    print()
    return rows


def main() -> None:
    """Print the shares, and save the counts if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines in the format of Spec-Bench")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<device>/ngram_hits.jsonl")
    args = parser.parse_args()
    rows = texts(read_prompts(args.prompts, None), args.max_new_tokens)
    hits = added([count_hits(*row) for row in rows])
    for length, (first, positions, following, drafted) in hits.items():
        print(
            f"suffix of {length}: {first / positions:.2f} of {positions}, then {following / drafted:.2f} of {drafted}"
        )
    if args.save:
        machine = describe_machine(torch.device("cpu"))
        command = f"python -m benchmarks.ngram_hits --prompts {args.prompts.name} --save"
        path = RESULTS / machine.slug / "ngram_hits.jsonl"
        lines = [{"machine": asdict(machine), "command": command, "texts": len(rows)}]
        lines += [{"suffix": length, **counts._asdict()} for length, counts in hits.items()]
        write_records(path, lines)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
