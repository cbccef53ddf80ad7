"""``specdec-kernels tree``: list, draw, convert and optimise draft trees."""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..tree import DraftTree, draw_svg, draw_text, expected_tokens, optimize_tree, preset, preset_names, preset_source

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
    optimize.add_argument("--nodes", type=int, required=True, help="node budget, the root included")
    optimize.add_argument("--max-children", type=int, help="at most this many children for each node")
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
    _print_table(rows)


def _draw(args: Namespace) -> None:
    tree = _read_tree(args.tree, args.source_format)
    if args.svg is None:
        print(draw_text(tree))
        print(f"\nnode:rank; {_describe(tree)}")
    else:
        args.svg.write_text(draw_svg(tree), encoding="utf-8")
        print(f"wrote {args.svg}: {_describe(tree)}")


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
        print(f"wrote {args.out}: {_describe(tree)}")


def _optimize(args: Namespace) -> None:
    accuracy_file = args.accuracy if args.heads is None else args.heads / "accuracy.json"
    heads = _read_accuracies(accuracy_file)
    tree, tokens = optimize_tree(heads, args.nodes, max_children=args.max_children)

    print(draw_text(tree))
    print(f"\nnode:rank; {_describe(tree)}, {tokens:.4f} expected tokens per step\n")
    rows: list[tuple] = [("budget", "nodes", "depth", "leaves", "expected tokens per step")]
    for budget in sorted({*BUDGETS, args.nodes}):
        rows.append((budget, *_measures(*optimize_tree(heads, budget, max_children=args.max_children))))
    chain = DraftTree.chain(len(heads))
    rows.append(("chain", *_measures(chain, expected_tokens(chain, heads))))
    _print_table(rows)

    out = args.out or (args.heads / "tree.json" if args.heads is not None else None)
    if out is not None:
        tree.save(
            out,
            expected_tokens_per_step=tokens,
            num_heads=len(heads),
            top_k=max(map(len, heads)),
            source=f"tree optimize --nodes {args.nodes} from {accuracy_file.name}",
        )
        print(f"wrote {out}")


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


def _describe(tree: DraftTree) -> str:
    return f"{tree.num_nodes} nodes, depth {tree.max_depth}, leaf paths: {len(tree.leaves)}"


def _measures(tree: DraftTree, tokens: float) -> tuple:
    return tree.num_nodes, tree.max_depth, len(tree.leaves), f"{tokens:.4f}"


def _print_table(rows: list[tuple]) -> None:
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
