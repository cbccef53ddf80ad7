"""``specdec-kernels tree``: list, draw, convert and optimise draft trees."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .._chart import Panel, line_chart
from ..decoding.budget import SIZES
from ..tree import (
    DraftTree,
    SizedTree,
    draw_svg,
    draw_text,
    expected_tokens,
    fastest_tree,
    optimize_tree,
    preset,
    preset_names,
    preset_source,
)
from ._arguments import add_setting_arguments, positive_int, setting_of

FORMATS = ("choices", "parents", "retrieve_indices")
BUDGETS = (4, 8, 16, 32, 64)
# Trees tried where a machine decides.
LARGEST = 128


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
    optimize.add_argument("--nodes", type=int, help="node budget, the root included; with --calibration the largest "
                          f"tree tried (default: {LARGEST})")  # fmt: skip
    machine = optimize.add_argument_group("the fastest tree on a machine, by what `specdec-kernels calibrate` measured")
    machine.add_argument("--calibration", type=Path, metavar="FILE|FOLDER", help="choose the size by tokens per second")
    machine.add_argument("--model", help="measure this machine with the model and the drafter, and keep it beside "
                         "the heads, unless that was done; then as --calibration FOLDER")  # fmt: skip
    machine.add_argument("--batch-size", type=positive_int, default=1)
    machine.add_argument("--context", type=positive_int, default=256, help="tokens of each row")
    machine.add_argument("--drafter", default="medusa", help="whose drafting time counts, if it was measured")
    machine.add_argument("--svg", type=Path, metavar="OUT", help="plot tokens per step and per second by nodes")
    add_setting_arguments(machine)
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
    if args.model is not None:
        args.calibration = _calibrated(args)
    if args.calibration is not None:
        tree, metadata = _fastest(heads, args)
    elif args.nodes is not None:
        tree, metadata = _best(heads, args)
    else:
        raise ValueError("give --nodes, or --calibration or --model to let a machine decide")
    out = args.out or (args.heads / "tree.json" if args.heads is not None else None)
    if out is not None:
        source = f"tree optimize {metadata.pop('how')} from {accuracy_file.name}"
        tree.save(out, **metadata, num_heads=len(heads), top_k=max(map(len, heads)), source=source)
        print(f"wrote {out}")


def _best(heads: list[list[float]], args: Namespace) -> tuple[DraftTree, dict[str, Any]]:
    """Return the tree of a node budget."""
    tree, tokens = optimize_tree(heads, args.nodes, max_children=args.max_children)
    print(draw_text(tree))
    print(f"\nnode:rank; {_describe(tree)}, {tokens:.4f} expected tokens per step\n")
    rows: list[tuple] = [("budget", "nodes", "depth", "leaves", "expected tokens per step")]
    for budget in sorted({*BUDGETS, args.nodes}):
        rows.append((budget, *_measures(*optimize_tree(heads, budget, max_children=args.max_children))))
    chain = DraftTree.chain(len(heads))
    rows.append(("chain", *_measures(chain, expected_tokens(chain, heads))))
    _print_table(rows)
    return tree, {"expected_tokens_per_step": tokens, "how": f"--nodes {args.nodes}"}


def _calibrated(args: Namespace) -> Path:
    """Return the folder of the heads, once it holds what steps and the drafter cost in this setting."""
    from ..decoding.calibration import Calibration
    from . import calibrate

    if args.heads is None:
        raise ValueError("--model needs --heads, the folder to keep the times in")
    setting = setting_of(args)
    try:
        known = Calibration.load(args.heads, setting)
    except (OSError, ValueError):
        known = None
    if known is None or args.drafter not in known.drafters:
        options = {"model": args.model, "heads": args.heads, "out": args.heads, "drafter": args.drafter,
                   "dtype": args.dtype, "device": args.device, "batch-sizes": args.batch_size,
                   "contexts": args.context, "threads": args.threads}  # fmt: skip
        words = [w for name, value in options.items() if value is not None for w in (f"--{name}", str(value))]
        words += ["--prepare" if setting.prepared else "--no-prepare"]
        words += [] if known is None else ["--keep-steps"]
        parser = ArgumentParser()
        calibrate.add_arguments(parser)
        calibrate.run(parser.parse_args(words, Namespace(argv=["calibrate", *words])))
    return args.heads


def _fastest(heads: list[list[float]], args: Namespace) -> tuple[DraftTree, dict[str, Any]]:
    """Return the tree that is fastest on a machine; its first nodes are the best smaller trees."""
    from ..decoding.calibration import Calibration

    setting = setting_of(args)
    calibration = Calibration.load(args.calibration, setting)
    step_us = calibration.step_us(args.drafter)
    best, sizes = fastest_tree(
        heads,
        lambda nodes: step_us(nodes, args.batch_size, args.context),
        args.nodes or LARGEST,
        max_children=args.max_children,
    )
    plain = sizes[0].tokens_per_s
    print(draw_text(best.tree))
    print(
        f"\nnode:rank; {_describe(best.tree)}: the fastest on {setting.device}, {setting.threads} threads, "
        f"{setting.dtype}{', prepared' if setting.prepared else ''}, {args.batch_size} rows of {args.context} tokens; "
        f"{_drafting(args.drafter, calibration.drafters)}\n"
    )
    rows: list[tuple] = [("nodes", "depth", "leaves", "tokens per step", "step ms", "tokens/s", "x plain")]
    for sized in sizes:
        if sized.tree.num_nodes in (*SIZES, best.tree.num_nodes):
            speed = f"{args.batch_size * sized.tokens_per_s:.1f}", f"{sized.tokens_per_s / plain:.2f}"
            rows.append((*_measures(sized.tree, sized.tokens_per_step), f"{sized.step_us / 1e3:.1f}", *speed))
    _print_table(rows)
    if args.svg is not None:
        args.svg.write_text(_plot(sizes, args.batch_size), encoding="utf-8")
        print(f"wrote {args.svg}")
    machine = {**vars(setting), "batch_size": args.batch_size, "context_len": args.context}
    return best.tree, {
        "expected_tokens_per_step": best.tokens_per_step,
        "fastest_on": machine,
        "how": "--calibration",
    }


def _drafting(drafter: str, measured: Collection[str]) -> str:
    if drafter in measured:
        return f"drafting with {drafter} counted"
    return f"drafting taken as free: run `specdec-kernels calibrate --keep-steps --drafter {drafter}` to count it"


def _plot(sizes: list[SizedTree], batch_size: int) -> str:
    """Draw accepted length and speed by the number of nodes."""
    accepted = [(sized.tree.num_nodes, sized.tokens_per_step) for sized in sizes]
    speed = [(sized.tree.num_nodes, batch_size * sized.tokens_per_s) for sized in sizes]
    return line_chart(
        [
            Panel("expected tokens per step", "nodes T", "tokens", {"best tree of T nodes": accepted}),
            Panel("expected tokens per second", "nodes T", "tokens/s", {"best tree of T nodes": speed}),
        ]
    )


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
