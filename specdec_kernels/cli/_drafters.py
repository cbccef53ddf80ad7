"""Drafters by name, for the commands that decode."""

from pathlib import Path
from typing import Any

import torch

from ..hf.load import PACKAGED_MODEL

# Heads that come with the repository; they fit the packaged model only.
SHIPPED_HEADS = Path(__file__).parents[2] / "examples" / "heads" / "smollm2-135m-instruct-medusa"

NAMES = ("medusa", "ngram", "medusa+ngram", "draft-model", "plain")
# Of a merged tree: what a CPU verifies without being much slower than for one node.
MERGED_NODES, LOOKUP_DRAFTS, LOOKUP_BRANCHES = 32, 10, 2


def add_arguments(parser) -> None:
    """Declare what the drafters need."""
    parser.add_argument("--heads", type=Path, help="folder with Medusa heads (default: the shipped ones for smollm2)")
    parser.add_argument("--draft-model", metavar="MODEL", help="for draft-model: a smaller one of the same vocabulary")


def check(name: str, args) -> None:
    """Exit with a line of help unless what a drafter needs is there; loads nothing."""
    if name == "draft-model" and not args.draft_model:
        raise SystemExit("--drafter draft-model needs --draft-model MODEL")
    if name.startswith("medusa") and not heads_of(args).exists():
        raise SystemExit(f"there are no heads at {heads_of(args)}")


def make(name: str, args, model) -> Any:
    """Return a drafter of `NAMES` for a loaded model."""
    from ..decoding.drafters import DraftModelDrafter, MedusaDrafter, MergedDrafter, NGramDrafter, PlainDrafter

    if name == "plain":
        return PlainDrafter()
    if name == "ngram":
        return NGramDrafter(max_drafts=LOOKUP_DRAFTS)
    if name == "draft-model":
        return DraftModelDrafter(_draft_target(args.draft_model, model))
    medusa = MedusaDrafter.from_pretrained(heads_of(args), model)
    if name == "medusa":
        return medusa
    lookup = NGramDrafter(max_drafts=LOOKUP_DRAFTS, num_branches=LOOKUP_BRANCHES)
    return MergedDrafter(medusa, lookup, max_nodes=max(MERGED_NODES, medusa.max_nodes))


def heads_of(args) -> Path:
    """Return the folder of the heads; exit with a line of help when none are shipped for the model."""
    if args.heads:
        return args.heads
    if args.model != PACKAGED_MODEL:
        raise SystemExit(
            f"no heads are shipped for {args.model}; train some with "
            f"`specdec-kernels train medusa --model {args.model} --out HEADS`, then pass --heads HEADS"
        )
    if not SHIPPED_HEADS.exists():
        raise SystemExit("the shipped heads lie in a clone of the repository (examples/heads); pass --heads FOLDER")
    return SHIPPED_HEADS


def _draft_target(name: str, model):
    from functools import partial

    from ..hf.load import load_model
    from ..hf.target import HFTarget

    parameter: torch.Tensor = next(model.parameters())
    return partial(HFTarget, load_model(name, dtype=parameter.dtype, device=str(parameter.device)))
