"""The arguments of commands that let a model write its own texts, and what they mean."""

import shlex
from argparse import ArgumentDefaultsHelpFormatter, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from ..hf.load import PACKAGED_MODEL
from ._arguments import device, positive_int


class RawHelp(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Show defaults, and examples as they are written."""


def add_data_arguments(group) -> None:
    """Declare the model, the folders, and how texts are generated."""
    group.add_argument("--model", default=PACKAGED_MODEL, help="'smollm2', a folder, a .gguf file, or a hub id")
    group.add_argument("--out", type=Path, required=True, help="folder of the result")
    group.add_argument("--work", type=Path, help="folder of data, cached states, checkpoints (default: OUT.work)")
    group.add_argument("--data", type=Path, help='JSON lines with "turns", "prompt" or "messages"; default: none, the '
                       "model writes the user turns too")  # fmt: skip
    group.add_argument("--tokens", type=positive_int, default=400_000, help="answer tokens to generate")
    group.add_argument("--user-len", type=positive_int, default=128, help="longest user turn the model may write")
    group.add_argument("--answer-len", type=positive_int, default=256, help="longest answer")
    group.add_argument("--slots", type=positive_int, default=32, help="conversations decoded together by a worker")
    group.add_argument("--workers", type=positive_int, default=1, help="processes that generate, of one thread each on "
                       "a CPU")  # fmt: skip
    group.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the model")
    group.add_argument("--device", type=device, default="cpu", help="of everything: cpu or cuda")
    group.add_argument("--seed", type=int, default=0, help="of the texts and of the row order")


def places_and_data(args: Namespace) -> tuple[Path, Path, Any]:
    """Return the folders of the result and of the work, and what decides the texts.

    Raises:
        ValueError: there is a file where the result is to be, or no data.
    """
    from ..training.data import GenerationOptions
    from ..training.generate import Limits

    if args.out.is_file():
        raise ValueError(f"--out must be a folder, {args.out} is a file")
    if args.data is not None and not args.data.is_file():
        raise ValueError(f"there is no file {args.data}")
    limits = Limits(user_len=args.user_len, answer_len=args.answer_len)
    data = None if args.data is None else str(args.data)
    out = args.out if args.out.name else args.out.resolve()  # "." has no name to add to
    work = args.work or out.with_name(out.name + ".work")
    return args.out, work, GenerationOptions(args.model, data, args.dtype, args.seed, limits)


def generation_options(args: Namespace) -> dict:
    """Return how much text is generated, where, and the command that asked for it."""
    return {
        "num_tokens": args.tokens,
        "num_slots": args.slots,
        "num_workers": args.workers,
        "device": str(args.device),
        "command": shlex.join(["specdec-kernels", *args.argv]),
    }
