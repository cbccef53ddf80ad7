"""Drafters by name, for the commands that decode."""

from pathlib import Path
from typing import Any

import torch

from ..hf.load import PACKAGED_MODEL

# Heads that come with the repository; they fit the packaged model only.
SHIPPED_HEADS = Path(__file__).parents[2] / "examples" / "heads" / "smollm2-135m-instruct-medusa"

NAMES = ("medusa", "ngram", "medusa+ngram", "kangaroo", "kangaroo+ngram", "layer-skip", "draft-model", "plain")
# Of a merged tree: what a CPU verifies without being much slower than for one node.
MERGED_NODES, LOOKUP_DRAFTS, LOOKUP_BRANCHES = 32, 10, 2


def add_arguments(parser) -> None:
    """Declare what the drafters need."""
    parser.add_argument("--heads", type=Path, help="folder with Medusa heads (default: the shipped ones for smollm2)")
    parser.add_argument("--adapter", type=Path, help="for kangaroo: folder with the adapter")
    parser.add_argument("--skips", type=Path, help="for layer-skip: what `specdec-kernels search layers` wrote")
    parser.add_argument("--draft-model", metavar="MODEL", help="for draft-model: a smaller one of the same vocabulary")


def check(name: str, args) -> None:
    """Exit with a line of help unless what a drafter needs is there; loads nothing."""
    needed = {"draft-model": ("draft_model", "MODEL"), "layer-skip": ("skips", "FOLDER")}
    needed |= dict.fromkeys(("kangaroo", "kangaroo+ngram"), ("adapter", "FOLDER"))
    option, what = needed.get(name, (None, None))
    if option is not None and not getattr(args, option):
        raise SystemExit(f"--drafter {name} needs --{option.replace('_', '-')} {what}")
    if name.startswith("medusa") and not heads_of(args).exists():
        raise SystemExit(f"there are no heads at {heads_of(args)}")


def make(name: str, args, model) -> Any:
    """Return a drafter of `NAMES` for a loaded model."""
    from ..decoding import drafters

    if name == "plain":
        return drafters.PlainDrafter()
    if name == "ngram":
        return drafters.NGramDrafter(max_drafts=LOOKUP_DRAFTS)
    if name == "draft-model":
        return drafters.DraftModelDrafter(_draft_target(args.draft_model, model))
    if name == "layer-skip":
        return drafters.LayerSkipDrafter.from_pretrained(args.skips)
    if name.startswith("kangaroo"):
        own: Any = drafters.KangarooDrafter.from_pretrained(args.adapter, model)
    else:
        own = drafters.MedusaDrafter.from_pretrained(heads_of(args), model)
    if not name.endswith("+ngram"):
        return own
    lookup = drafters.NGramDrafter(max_drafts=LOOKUP_DRAFTS, num_branches=LOOKUP_BRANCHES)
    return drafters.MergedDrafter(own, lookup, max_nodes=max(MERGED_NODES, own.max_nodes))


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
