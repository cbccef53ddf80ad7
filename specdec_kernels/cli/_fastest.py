"""The fastest tree on a machine, fixed or chosen anew at each step, by what `specdec-kernels calibrate` measured."""

import math
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from .._chart import Panel, line_chart
from ..decoding.budget import SIZES
from ..decoding.calibration import Calibration, Setting, file_of
from ..decoding.dynamic_tree import DynamicTree
from ..tree import DraftTree, draw_text, fastest_tree
from ._arguments import setting_of
from ._tree_tables import describe, measures, print_table

# Trees tried where a machine decides; dynamic ones are measured up to so many nodes.
LARGEST, DYNAMIC_NODES = 128, 32


def calibrated(args: Namespace) -> Path:
    """Return the folder of the heads, once it holds what steps and the drafter cost in this setting."""
    from . import calibrate

    if args.heads is None:
        raise ValueError("--model needs --heads, the folder to keep the times in")
    setting = setting_of(args)
    try:
        known = Calibration.load(args.heads, setting)
    except (OSError, ValueError):
        known = None
    options = {"model": args.model, "heads": args.heads, "out": args.heads, "drafter": args.drafter,
               "dtype": args.dtype, "device": args.device, "batch-sizes": args.batch_size,
               "contexts": args.context, "threads": args.threads}  # fmt: skip
    words = [w for name, value in options.items() if value is not None for w in (f"--{name}", str(value))]
    if args.dynamic:
        words += ["--draft-nodes", str(args.nodes or DYNAMIC_NODES), "--min-prob", str(args.min_prob)]
    words += ["--prepare" if setting.prepared else "--no-prepare"]
    if known is not None and args.drafter in known.drafters:
        print(f"steps and {args.drafter} as they were measured before, in {file_of(args.heads, setting.device)}; anew:")
        print(f"{shlex.join(['specdec-kernels', 'calibrate', *words])}\n")
        return args.heads
    words += [] if known is None else ["--keep-steps"]
    parser = ArgumentParser()
    calibrate.add_arguments(parser)
    calibrate.run(parser.parse_args(words, Namespace(argv=["calibrate", *words])))
    return args.heads


def fastest(heads: list[list[float]], args: Namespace) -> tuple[DraftTree, dict[str, Any]]:
    """Return the tree that is fastest on a machine; its first nodes are the best smaller trees."""
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
    print(f"\nnode:rank; {describe(best.tree)}: {_where(setting, args)}; ", end="")
    print(f"{_drafting(args.drafter, calibration.drafters)}\n")
    rows: list[tuple] = [("nodes", "depth", "leaves", "tokens per step", "step ms", "tokens/s", "x plain")]
    for sized in sizes:
        if sized.tree.num_nodes in (*SIZES, best.tree.num_nodes):
            speed = f"{args.batch_size * sized.tokens_per_s:.1f}", f"{sized.tokens_per_s / plain:.2f}"
            rows.append((*measures(sized.tree, sized.tokens_per_step), f"{sized.step_us / 1e3:.1f}", *speed))
    print_table(rows)
    _say_if_none_pays(best.tree.num_nodes)
    _save_plot([(sized.tree.num_nodes, sized.tokens_per_step, sized.tokens_per_s) for sized in sizes], args)
    return best.tree, {
        "expected_tokens_per_step": best.tokens_per_step,
        "fastest_on": _machine(setting, args),
        "how": "--calibration",
    }


def fastest_dynamic(args: Namespace) -> tuple[DynamicTree, dict[str, Any]]:
    """Return the size of dynamic trees that is fastest on a machine, by how often their nodes were accepted there.

    The nodes of a dynamic tree come in the order of their probability, so the first ones of a measured tree are what a
    smaller one would have had.
    """
    if args.calibration is None:
        raise ValueError("--dynamic needs --calibration or --model")
    setting = setting_of(args)
    calibration = Calibration.load(args.calibration, setting)
    if args.drafter not in calibration.drafters:
        raise ValueError(f"{args.drafter} was not measured; run `specdec-kernels calibrate --drafter {args.drafter}`")
    gains = calibration.drafters[args.drafter].gains[: args.nodes]
    budget = calibration.budget(args.drafter).budget
    sizes = []
    for nodes in range(1, len(gains) + 1):
        tokens, time_us = math.fsum(gains[:nodes]), budget.step_us(nodes, args.batch_size, args.context)
        sizes.append((nodes, tokens, tokens / time_us * 1e6, time_us))
    best = max(sizes, key=lambda size: size[2])
    print(
        f"{best[0]} nodes, the likeliest at each step: {_where(setting, args)}; drafting with {args.drafter} counted\n"
    )
    rows: list[tuple] = [("nodes", "tokens per step", "step ms", "tokens/s", "x plain")]
    for nodes, tokens, speed, time_us in sizes:
        cells = f"{time_us / 1e3:.1f}", f"{args.batch_size * speed:.1f}", f"{speed / sizes[0][2]:.2f}"
        rows.append((nodes, f"{tokens:.4f}", *cells))
    print_table(rows)
    _say_if_none_pays(best[0])
    _save_plot([size[:3] for size in sizes], args)
    return DynamicTree(best[0], min_prob=args.min_prob), {
        "expected_tokens_per_step": best[1],
        "fastest_on": _machine(setting, args),
        "source": f"tree optimize --dynamic, by the steps and the acceptance of {args.drafter} in the calibration",
    }


def _say_if_none_pays(num_nodes: int) -> None:
    if num_nodes == 1:
        print("\nno drafts pay here: one node is plain decoding")


def _where(setting: Setting, args: Namespace) -> str:
    rows = f"{args.batch_size} row{'s' if args.batch_size != 1 else ''} of {args.context} tokens"
    return f"the fastest on {setting}, {rows}"


def _machine(setting: Setting, args: Namespace) -> dict[str, Any]:
    return {**vars(setting), "batch_size": args.batch_size, "context_len": args.context}


def _drafting(drafter: str, measured: Collection[str]) -> str:
    if drafter in measured:
        return f"drafting with {drafter} counted"
    return f"drafting taken as free: run `specdec-kernels calibrate --keep-steps --drafter {drafter}` to count it"


def _save_plot(sizes: Iterable[tuple[int, float, float]], args: Namespace) -> None:
    """Draw accepted length and speed by the number of nodes, if asked: ``(nodes, tokens per step, per second)``."""
    if args.svg is None:
        return
    sizes, name = list(sizes), "best tree of T nodes"
    accepted = [(nodes, tokens) for nodes, tokens, _ in sizes]
    speed = [(nodes, args.batch_size * per_s) for nodes, _, per_s in sizes]
    panels = [
        Panel("expected tokens per step", "nodes T", "tokens", {name: accepted}),
        Panel("expected tokens per second", "nodes T", "tokens/s", {name: speed}),
    ]
    args.svg.write_text(line_chart(panels), encoding="utf-8")
    print(f"wrote {args.svg}")
