"""``specdec-kernels search layers``: which blocks a model leaves out while it drafts for itself."""

import sys
from argparse import ArgumentParser, Namespace

from ._arguments import add_prepare_argument, positive_int, prepares
from ._data import RawHelp, add_data_arguments, generation_options, places_and_data

EPILOG = """\
examples:
  specdec-kernels search layers --model smollm2 --out skips/smollm2 --tokens 40000 --trials 400
then
  LayerSkipDrafter.from_pretrained("skips/smollm2")

A search that was stopped, or whose --trials are raised, goes on with the same study and the same measured costs.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what can be searched; so far ``layers``."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    layers = kinds.add_parser("layers", help="skip sets for self-speculation (Draft & Verify)", epilog=EPILOG)
    layers.formatter_class = RawHelp
    add_data_arguments(layers.add_argument_group("data"))
    group = layers.add_argument_group("search")
    group.add_argument("--trials", type=positive_int, default=300, help="skip sets to try, earlier runs included")
    group.add_argument("--contexts", type=positive_int, default=64, help="places in the texts to draft from")
    group.add_argument("--max-context", type=positive_int, default=256, help="longest of them, in tokens")
    group.add_argument("--max-drafts", type=positive_int, default=8, help="drafts from each")
    add_prepare_argument(group, "draft with a prepared model, and count its costs")


def run(args: Namespace) -> int:
    """Search; a bad argument or folder is one line on stderr and exit code 2."""
    from ..training.layer_search import SearchOptions, search_skip_sets

    options = SearchOptions(args.contexts, args.max_context, args.max_drafts, args.seed)
    try:
        search_skip_sets(
            *places_and_data(args), options, num_trials=args.trials, prepared=prepares(args), **generation_options(args)
        )
    except (NotImplementedError, OSError, ValueError) as error:
        print(f"specdec-kernels search {args.kind}: {error}", file=sys.stderr)
        return 2
    print(f'wrote {args.out}; next: LayerSkipDrafter.from_pretrained("{args.out}")')
    return 0
