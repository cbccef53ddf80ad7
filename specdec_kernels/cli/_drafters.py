"""Drafters by name, for the commands that decode."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..hf.load import PACKAGED_MODEL
from ..tree import DraftTree
from ._arguments import positive_int, probability

# What comes with the repository; it fits the packaged model only.
_EXAMPLES = Path(__file__).parents[2] / "examples"
SHIPPED_HEADS = _EXAMPLES / "heads" / "smollm2-135m-instruct-medusa"
SHIPPED_ADAPTER = _EXAMPLES / "adapters" / "smollm2-135m-instruct-kangaroo"
SHIPPED_SKIPS = _EXAMPLES / "skips" / "smollm2-135m-instruct"
_SHIPPED = {"heads": SHIPPED_HEADS, "adapter": SHIPPED_ADAPTER, "skips": SHIPPED_SKIPS}
_MADE_BY = {"heads": "train medusa", "adapter": "train kangaroo --exit-layer N", "skips": "search layers"}

NAMES = (
    "medusa", "ngram", "medusa+ngram", "kangaroo", "kangaroo-tree", "kangaroo+ngram", "layer-skip", "draft-model",
    "plain",
)  # fmt: skip
# Of a merged tree: what a CPU verifies without being much slower than for one node.
MERGED_NODES, LOOKUP_DRAFTS, LOOKUP_BRANCHES = 16, 10, 1
# Every level costs the first layers and the adapter, on a CPU nearly the same for a few nodes as for one; a level
# behind an improbable token seldom pays.
KANGAROO_TREE = DraftTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0]])
KANGAROO_THRESHOLD = 0.8


def add_arguments(parser) -> None:
    """Declare what the drafters need."""
    parser.add_argument("--heads", type=Path, help="folder with Medusa heads (default: the shipped ones for smollm2)")
    parser.add_argument("--draft-nodes", type=positive_int, metavar="T", help="for medusa: trees of T nodes, chosen "
                        "anew at each step (default: the tree.json of the heads)")  # fmt: skip
    parser.add_argument("--min-prob", type=probability, metavar="P", help="for medusa's dynamic trees and n-grams: "
                        "leave out nodes that are less likely (default: as tree.json says, and 0.06 for "
                        "n-grams)")  # fmt: skip
    parser.add_argument("--adapter", type=Path, help="for kangaroo: folder with the adapter")
    parser.add_argument("--skips", type=Path, help="for layer-skip: what `specdec-kernels search layers` wrote "
                        "(default: as the heads)")  # fmt: skip
    parser.add_argument("--draft-model", metavar="MODEL", help="for draft-model: a smaller one of the same vocabulary")


def check(name: str, args) -> None:
    """Exit with a line of help unless what a drafter needs is there; loads nothing."""
    if name == "draft-model" and not args.draft_model:
        raise SystemExit("--drafter draft-model needs --draft-model MODEL")
    option = _folder_option(name)
    if option is not None and not folder_of(option, args).exists():
        raise SystemExit(f"there {_is_no(option)} at {folder_of(option, args)}")


def make(name: str, args, model) -> Any:
    """Return a drafter of `NAMES` for a loaded model; exit with a line of help when its files do not fit the model."""
    try:
        return _make(name, args, model)
    except ValueError as error:
        raise SystemExit(f"--drafter {name}: {error}") from error


def _make(name: str, args, model) -> Any:
    from ..decoding import DynamicTree, drafters

    if name == "plain":
        return drafters.PlainDrafter()
    if name == "ngram":
        return drafters.NGramDrafter(max_drafts=LOOKUP_DRAFTS, **_probability(args))
    if name == "draft-model":
        return drafters.DraftModelDrafter(_draft_target(args.draft_model, model))
    if name == "layer-skip":
        return drafters.LayerSkipDrafter.from_pretrained(folder_of("skips", args))
    if name.startswith("kangaroo"):
        own: Any = _kangaroo(folder_of("adapter", args), model, KANGAROO_TREE if name == "kangaroo-tree" else None)
    else:
        tree = None if args.draft_nodes is None else DynamicTree(args.draft_nodes, **_probability(args))
        own = drafters.MedusaDrafter.from_pretrained(folder_of("heads", args), model, tree=tree)
        if args.min_prob is not None and tree is None and isinstance(own.tree, DynamicTree):
            tree = replace(own.tree, **_probability(args))
            own = drafters.MedusaDrafter.from_pretrained(folder_of("heads", args), model, tree=tree)
    if not name.endswith("+ngram"):
        return own
    lookup = drafters.NGramDrafter(max_drafts=LOOKUP_DRAFTS, num_branches=LOOKUP_BRANCHES, **_probability(args))
    return drafters.MergedDrafter(own, lookup, max_nodes=max(MERGED_NODES, own.max_nodes))


def _probability(args) -> dict[str, Any]:
    return {} if args.min_prob is None else {"min_prob": args.min_prob}


def folder_of(option: str, args) -> Path:
    """Return the folder of the heads, the adapter or the skips; exit with a line of help when none are shipped."""
    given = getattr(args, option)
    if given:
        return given
    shipped = _SHIPPED[option]
    if args.model == PACKAGED_MODEL and shipped.exists():
        return shipped
    if args.model == PACKAGED_MODEL and not _EXAMPLES.exists():
        raise SystemExit(f"what is shipped lies in a clone of the repository (examples); pass --{option} FOLDER")
    raise SystemExit(
        f"there {_is_no(option)} shipped for {args.model}; make {'one' if option == 'adapter' else 'some'} with "
        f"`specdec-kernels {_MADE_BY[option]} --model {args.model} --out FOLDER`, then pass --{option} FOLDER"
    )


def home_of(names: Sequence[str], args) -> Path:
    """Return the folder of what is measured of drafters: that of the heads, unless only others have one."""
    options = [option for name in names if (option := _folder_option(name)) is not None]
    return folder_of("heads" if "heads" in options or not options else options[0], args)


def _is_no(option: str) -> str:
    return "is no adapter" if option == "adapter" else f"are no {option}"


def _folder_option(name: str) -> str | None:
    """Return the option that names the folder of a drafter, if it has one."""
    kinds = {"medusa": "heads", "kangaroo": "adapter", "kangaroo-tree": "adapter", "layer-skip": "skips"}
    return kinds.get(name.removesuffix("+ngram"))


def _kangaroo(folder: Path, model, tree: DraftTree | None) -> Any:
    """Return a drafter that stops by `KANGAROO_THRESHOLD`; a ``tree.json`` in the folder is preferred to the tree."""
    from ..decoding import drafters
    from ..decoding.drafters.medusa import TREE_FILE
    from ..decoding.exits import ExitRule

    tree = None if (folder / TREE_FILE).exists() else tree
    rule = ExitRule(threshold=KANGAROO_THRESHOLD, target_rate=None)
    return drafters.KangarooDrafter.from_pretrained(folder, model, tree=tree, exit_rule=rule)


def _draft_target(name: str, model):
    from functools import partial

    from ..hf.load import load_model
    from ..hf.target import HFTarget

    parameter: torch.Tensor = next(model.parameters())
    return partial(HFTarget, load_model(name, dtype=parameter.dtype, device=str(parameter.device)))
