"""``specdec-kernels calibrate``: measure what steps and drafters cost on this machine, and keep it beside the heads."""

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import __version__
from ..decoding.budget import CostPoint
from ..hf.load import PACKAGED_MODEL
from . import _drafters
from ._arguments import add_setting_arguments, positive_int, setting_of
from ._data import RawHelp

if TYPE_CHECKING:
    from ..decoding.calibration import Calibration

# More nodes that take so much less time than fewer are no property of a machine.
UNSTEADY = 1.5
EPILOG = """\
examples:
  specdec-kernels calibrate --batch-sizes 1 2 4 8 16 --contexts 256 1024
  specdec-kernels tree optimize --heads HEADS --calibration HEADS
  specdec-kernels calibrate --drafter medusa medusa+ngram --keep-steps --prompts FILE
  specdec-kernels calibrate --accuracy --heads HEADS --model MODEL --prompts FILE   # then tree optimize --heads HEADS

The times go to calibration.<device>.json in the folder of the heads, the adapter or the skip sets, beside those of
other threads, dtypes, machines.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the model, the sizes and the drafters."""
    parser.formatter_class = RawHelp
    parser.epilog = EPILOG
    parser.add_argument("--model", default=PACKAGED_MODEL, help="'smollm2', a folder, a .gguf file, or a hub id")
    add_setting_arguments(parser)
    parser.add_argument("--batch-sizes", type=positive_int, nargs="+", default=[1, 4])
    parser.add_argument("--contexts", type=positive_int, nargs="+", default=[256], help="committed tokens of each row")
    parser.add_argument("--nodes", type=positive_int, nargs="+", help="default: 12 numbers from 1 to 128")
    parser.add_argument("--max-rows", type=positive_int, default=512, help="leave out steps of more nodes, all rows "
                        "together")  # fmt: skip
    parser.add_argument("--max-tokens", type=positive_int, default=8192, help="leave out contexts of more tokens, all "
                        "rows together")  # fmt: skip
    parser.add_argument("--repeats", type=positive_int, default=7, help="medians of so many")
    parser.add_argument("--keep-steps", action="store_true", help="measure drafters only; the steps were measured")
    parser.add_argument("--drafter", nargs="*", choices=_drafters.NAMES, default=[], metavar="NAME",
                        help=f"measure these, too: {', '.join(_drafters.NAMES)}")  # fmt: skip
    parser.add_argument("--accuracy", action="store_true", help="measure no times, but how often the candidates of the "
                        "heads are right on the model's greedy answers; goes to accuracy.json")  # fmt: skip
    parser.add_argument("--prompts", type=Path, help="JSON lines, for the drafters and --accuracy (default: those of "
                        "the demo)")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, help="of each prompt")
    parser.add_argument("--out", type=Path, help="folder or file (default: the folder of the heads; of drafters "
                        "without heads, that of the adapter or the skip sets)")  # fmt: skip
    _drafters.add_arguments(parser)


def run(args: Namespace) -> int:
    """Measure, print a table, and write the file."""
    from ..decoding.calibration import Calibration
    from ..hf.load import load_model, load_tokenizer
    from ..hf.prepare import prepare
    from ..training.step_costs import NODES, measure_steps

    for name in args.drafter:
        _drafters.check(name, args)
    out = args.out or _drafters.home_of(() if args.accuracy else args.drafter, args)
    try:
        setting = setting_of(args)
    except ValueError as error:
        raise SystemExit(f"specdec-kernels calibrate: {error}") from error
    known = Calibration.load(out, setting) if args.keep_steps and not args.accuracy else None
    model = load_model(args.model, dtype=getattr(torch, args.dtype), device=str(args.device))
    drafters = {name: _drafters.make(name, args, model) for name in args.drafter}
    model = prepare(model) if setting.prepared else model
    if args.accuracy:
        return _measure_accuracies(model, out, args)
    if known is None:
        steps = measure_steps(
            model,
            nodes=args.nodes or NODES,
            batch_sizes=args.batch_sizes,
            context_lens=args.contexts,
            max_rows=args.max_rows,
            max_tokens=args.max_tokens,
            repeats=args.repeats,
        )
        metadata = {"model": Path(args.model).name, "command": _command(args), "torch": torch.__version__}
        known = Calibration(setting, steps, metadata={**metadata, "specdec_kernels": __version__})
    _measure_drafters(known, drafters, model, load_tokenizer(args.model) if drafters else None, args)
    print_table(known, args.contexts[0])
    print(f"wrote {known.save(out)}")
    return 0


def _measure_drafters(calibration: "Calibration", drafters: dict, model, tokenizer, args: Namespace) -> None:
    from ..training.step_costs import profile_drafter

    if not drafters:
        return
    prompts = [_ids(tokenizer, chat) for chat in _chats(args)]
    eos = model.generation_config.eos_token_id
    for name, drafter in drafters.items():
        calibration.drafters[name] = profile_drafter(
            model,
            drafter,
            prompts,
            batch_sizes=args.batch_sizes,
            max_new_tokens=args.max_new_tokens,
            eos_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
        )


def _measure_accuracies(model, out: Path, args: Namespace) -> int:
    """Write ``accuracy.json`` of the heads, which `tree optimize` chooses trees by."""
    from ..hf.load import load_tokenizer
    from ..modules.medusa import MedusaHeads
    from ..training.calibrate import format_accuracies, save_accuracies
    from ..training.prompt_accuracies import measure_on_prompts

    weight = model.get_output_embeddings().weight
    heads = MedusaHeads.from_pretrained(_drafters.folder_of("heads", args), dtype=weight.dtype, device=weight.device)
    chats, tokenizer = _chats(args), load_tokenizer(args.model)
    counter = measure_on_prompts(model, tokenizer, heads, chats, answer_len=args.max_new_tokens)
    accuracies, totals = counter.accuracies(), counter.totals.tolist()
    print(format_accuracies(accuracies, totals))
    file = out if out.suffix == ".json" else out / "accuracy.json"
    metadata = {"num_labels": totals, "split": f"greedy answers to {len(chats)} prompts", "command": _command(args)}
    save_accuracies(file, accuracies, **metadata)
    print(f"wrote {file}")
    return 0


def _command(args: Namespace) -> str:
    return shlex.join(["specdec-kernels", *(Path(a).name if "/" in a else a for a in args.argv)])


def _chats(args: Namespace) -> list[list[dict]]:
    from ..training.data import read_prompts
    from .demo import PROMPTS

    return read_prompts(args.prompts) if args.prompts else [[{"role": "user", "content": text}] for text in PROMPTS]


def _ids(tokenizer, chat: list[dict]) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer(chat[-1]["content"])["input_ids"]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def unsteady(points: Sequence[CostPoint]) -> list[tuple[CostPoint, CostPoint]]:
    """Return for each batch size the worst pair of steps of which the one with more nodes took far less time."""
    found = []
    for batch in sorted({point.batch_size for point in points}):
        steps = sorted((point for point in points if point.batch_size == batch), key=lambda point: point.num_nodes)
        pairs = [(few, many) for i, few in enumerate(steps) for many in steps[i + 1 :]]
        worst = max(pairs, key=lambda pair: pair[0].time_us / pair[1].time_us, default=None)
        # A step of two nodes may be a little faster than one of one, by another path of a matrix product.
        if worst is not None and worst[0].time_us > UNSTEADY * worst[1].time_us:
            found.append(worst)
    return found


def print_table(calibration: "Calibration", context_len: int) -> None:
    """Print what steps take, and for each drafter the best size at every batch size that was measured."""
    points = [point for point in calibration.steps.points if point.context_len == context_len]
    batches = sorted({point.batch_size for point in points})
    times = {point[:3]: point.time_us for point in points}
    print(f"\nms per step by nodes and rows, {context_len} tokens of context\n")
    print(f"{'nodes':>6}" + "".join(f"{f'B={batch}':>9}" for batch in batches))
    for nodes in sorted({point.num_nodes for point in points}):
        cells = [times.get((batch, context_len, nodes)) for batch in batches]
        print(f"{nodes:>6}" + "".join(f"{'-' if us is None else format(us / 1e3, '.1f'):>9}" for us in cells))
    for few, many in unsteady(points):
        print(
            f"\nnot to be trusted: {few.time_us / 1e3:.1f} ms with nodes = {few.num_nodes}, but "
            f"{many.time_us / 1e3:.1f} ms with nodes = {many.num_nodes}. The machine was busy; measure again"
        )
    for name in calibration.drafters:
        budget = calibration.budget(name).budget
        print(f"\n{name}\n{'rows':>6}{'nodes':>7}{'tokens/step':>13}{'tokens/s':>10}{'x plain':>9}")
        for batch in batches:
            size = budget.choose(batch, context_len)
            speed, plain = (budget.tokens_per_s(n, batch, context_len) for n in (size, 1))
            print(f"{batch:>6}{size:>7}{budget.tokens_per_step(size):>13.2f}{speed:>10.1f}{speed / plain:>9.2f}")
