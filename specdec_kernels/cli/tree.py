"""``specdec-kernels tree``: list, draw, convert and optimise draft trees."""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from ..tree import (
    DraftTree,
    draw_svg,
    draw_text,
    expected_tokens,
    optimize_tree,
    preset,
    preset_names,
    preset_source,
)
from ._arguments import add_setting_arguments, positive_int, probability
from ._fastest import DYNAMIC_NODES, LARGEST, calibrated, fastest, fastest_dynamic
from ._tree_tables import describe, measures, print_table

FORMATS = ("choices", "parents", "retrieve_indices")
BUDGETS = (4, 8, 16, 32, 64)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the actions ``list``, ``draw``, ``convert`` and ``optimize``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="show the named trees")

    source = ArgumentParser(add_help=False)
    source.add_argument("tree", metavar="NAME|FILE", help="a named tree, or a JSON file")
    source.add_argument("--from", dest="source_format", choices=FORMATS, help="what a bare JSON list in FILE holds")

    draw = actions.add_parser("draw", parents=[source], help="draw a tree as text, or as SVG")
    draw.add_argument("--svg", type=Path, metavar="OUT", help="write an SVG picture instead of printing text")

    convert = actions.add_parser(
        "convert", parents=[source], help="convert between choices, parents and retrieve_indices"
    )
    convert.add_argument("--to", choices=FORMATS, required=True)
    convert.add_argument("--out", type=Path, help="the JSON file to write (default: print)")

    optimize = actions.add_parser("optimize", help="find the best tree for a node budget from head accuracies")
    accuracies = optimize.add_mutually_exclusive_group(required=True)
    accuracies.add_argument(
        "--accuracy", type=Path, metavar="FILE", help='JSON: {"heads": [[p of rank 0, rank 1, ...], ...]}'
    )
    accuracies.add_argument(
        "--heads", type=Path, metavar="FOLDER", help="read FOLDER/accuracy.json, write FOLDER/tree.json"
    )
    optimize.add_argument("--nodes", type=positive_int, help="node budget, the root included; with --calibration the "
                          f"largest tree tried (default: {LARGEST})")  # fmt: skip
    machine = optimize.add_argument_group("the fastest tree on a machine, by what `specdec-kernels calibrate` measured")
    machine.add_argument("--calibration", type=Path, metavar="FILE|FOLDER", help="choose the size by tokens per second")
    machine.add_argument("--model", help="measure this machine with the model and the drafter, and keep it beside "
                         "the heads, unless that was done; then as --calibration FOLDER")  # fmt: skip
    machine.add_argument("--batch-size", type=positive_int, default=1)
    machine.add_argument("--context", type=positive_int, default=256, help="tokens of each row")
    machine.add_argument("--drafter", default="medusa", help="whose drafting time counts, if it was measured")
    machine.add_argument("--dynamic", action="store_true", help="size a tree that is chosen anew at each step, by how "
                         "often its nodes were accepted; up to the size that was measured (with --model: --nodes, by "
                         f"default {DYNAMIC_NODES})")  # fmt: skip
    machine.add_argument("--min-prob", type=probability, default=0.0, metavar="P", help="with --dynamic: leave out "
                         "nodes that are less likely")  # fmt: skip
    machine.add_argument("--svg", type=Path, metavar="OUT", help="plot tokens per step and per second by nodes")
    add_setting_arguments(machine)
    optimize.add_argument("--max-children", type=positive_int, help="at most this many children for each node")
    optimize.add_argument("--out", type=Path, help="the JSON file to write")


def run(args: Namespace) -> int:
    """Carry out one action; a bad name, file or number is one line on stderr and exit code 2."""
    action = {"list": _list, "draw": _draw, "convert": _convert, "optimize": _optimize}[args.action]
    try:
        action(args)
    except (OSError, TypeError, ValueError) as error:
        print(f"specdec-kernels tree {args.action}: {error}", file=sys.stderr)
        return 2
    return 0


def _list(args: Namespace) -> None:
    rows: list[tuple] = [("name", "nodes", "depth", "leaves", "top-k", "source")]
    for name in preset_names():
        tree = preset(name)
        rows.append((name, tree.num_nodes, tree.max_depth, len(tree.leaves), max(tree.ranks) + 1, preset_source(name)))
    print_table(rows)


def _draw(args: Namespace) -> None:
    tree = _read_tree(args.tree, args.source_format)
    if args.svg is None:
        print(draw_text(tree))
        print(f"\nnode:rank; {describe(tree)}")
    else:
        args.svg.write_text(draw_svg(tree), encoding="utf-8")
        print(f"wrote {args.svg}: {describe(tree)}")


def _convert(args: Namespace) -> None:
    tree = _read_tree(args.tree, args.source_format)
    content: dict[str, list] = {"choices": tree.to_choices()}
    if args.to == "parents":
        content = {"parents": list(tree.parents), "ranks": list(tree.ranks)}
    elif args.to == "retrieve_indices":
        content = {"retrieve_indices": tree.to_retrieve_indices().tolist(), "ranks": list(tree.ranks)}
    text = json.dumps(content)
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {args.out}: {describe(tree)}")


def _optimize(args: Namespace) -> None:
    accuracy_file = args.accuracy if args.heads is None else args.heads / "accuracy.json"
    heads = [] if args.dynamic else _read_accuracies(accuracy_file)
    if args.model is not None:
        args.calibration = calibrated(args)
    if args.dynamic:
        return _save_dynamic(args)
    if args.calibration is not None:
        tree, metadata = fastest(heads, args)
    elif args.nodes is not None:
        tree, metadata = _best(heads, args)
    else:
        raise ValueError("give --nodes, or --calibration or --model to let a machine decide")
    out = args.out or (args.heads / "tree.json" if args.heads is not None else None)
    if out is not None:
        source = f"tree optimize {metadata.pop('how')} from {accuracy_file.name}"
        tree.save(out, **metadata, num_heads=len(heads), top_k=max(map(len, heads)), source=source)
        print(f"wrote {out}")


def _save_dynamic(args: Namespace) -> None:
    tree, metadata = fastest_dynamic(args)
    out = args.out or (args.heads / "tree.json" if args.heads is not None else None)
    if out is not None:
        tree.save(out, **metadata)
        print(f"wrote {out}")


def _best(heads: list[list[float]], args: Namespace) -> tuple[DraftTree, dict[str, Any]]:
    """Return the tree of a node budget."""
    tree, tokens = optimize_tree(heads, args.nodes, max_children=args.max_children)
    print(draw_text(tree))
    print(f"\nnode:rank; {describe(tree)}, {tokens:.4f} expected tokens per step\n")
    rows: list[tuple] = [("budget", "nodes", "depth", "leaves", "expected tokens per step")]
    for budget in sorted({*BUDGETS, args.nodes}):
        rows.append((budget, *measures(*optimize_tree(heads, budget, max_children=args.max_children))))
    chain = DraftTree.chain(len(heads))
    rows.append(("chain", *measures(chain, expected_tokens(chain, heads))))
    print_table(rows)
    return tree, {"expected_tokens_per_step": tokens, "how": f"--nodes {args.nodes}"}


def _read_tree(name_or_file: str, source_format: str | None) -> DraftTree:
    if not Path(name_or_file).is_file():
        return preset(name_or_file)
    content = _read_json(Path(name_or_file))
    if not isinstance(content, list):
        return DraftTree.load(name_or_file)
    if source_format is None:
        raise ValueError(f"{name_or_file} is a bare list: say with --from which of {', '.join(FORMATS)} it is")
    return getattr(DraftTree, f"from_{source_format}")(content)


def _read_accuracies(path: Path) -> list[list[float]]:
    content = _read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("heads"), list):
        raise ValueError(f'{path}: must hold {{"heads": [[probability of rank 0, of rank 1, ...], ...]}}')
    return content["heads"]


def _read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
