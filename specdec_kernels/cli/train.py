"""``specdec-kernels train medusa``: train Medusa heads for a causal LM, from nothing but the model."""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..hf.load import PACKAGED_MODEL

EPILOG = """\
examples:
  specdec-kernels train medusa --model smollm2 --out heads/smollm2 --head-layers 2 --draft-vocab 16384
  specdec-kernels train medusa --model FOLDER_OR_ID --device cuda --out heads/llama --data prompts.jsonl
then
  specdec-kernels tree optimize --heads heads/smollm2 --nodes 16

An interrupted run goes on when the same command is given again: generation, hidden states and training alike.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the kinds of heads; so far ``medusa``."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    medusa = kinds.add_parser("medusa", help="Medusa heads (Medusa-1: the model stays frozen)", epilog=EPILOG)
    medusa.formatter_class = _raw_help()
    _add_data_arguments(medusa.add_argument_group("data"))
    _add_head_arguments(medusa.add_argument_group("heads"))
    _add_training_arguments(medusa.add_argument_group("training"))


def _raw_help():
    from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter

    return type("Help", (ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter), {})


def _add_data_arguments(group) -> None:
    group.add_argument("--model", default=PACKAGED_MODEL, help="'smollm2', a folder, a .gguf file, or a hub id")
    group.add_argument("--out", type=Path, required=True, help="folder of the result")
    group.add_argument("--work", type=Path, help="folder of data, cached states, checkpoints (default: OUT.work)")
    group.add_argument("--data", type=Path, help='JSON lines with "turns", "prompt" or "messages"; default: none, the '
                       "model writes the user turns too")  # fmt: skip
    group.add_argument("--tokens", type=int, default=400_000, help="answer tokens to generate")
    group.add_argument("--user-len", type=int, default=128, help="longest user turn the model may write")
    group.add_argument("--answer-len", type=int, default=256, help="longest answer")
    group.add_argument("--slots", type=int, default=32, help="conversations decoded together by a worker")
    group.add_argument("--workers", type=int, default=1, help="processes that generate, of one thread each on a CPU")
    group.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the model")
    group.add_argument("--device", default="cpu", help="of everything")
    group.add_argument("--seed", type=int, default=0, help="of the texts and of the row order")


def _add_head_arguments(group) -> None:
    group.add_argument("--num-heads", type=int, default=4, help="heads: tokens drafted ahead")
    group.add_argument("--head-layers", type=int, default=1, help="residual layers of each head")
    group.add_argument("--own-projection", action="store_true", help="each head owns a vocabulary projection")
    group.add_argument("--draft-vocab", type=int, default=0, help="only the most frequent tokens are drafted; 0: all")
    group.add_argument("--soft-targets", action="store_true", help="learn the model's distribution, not its token")
    group.add_argument("--decay", type=float, default=0.8, help="head k weighs decay^k in the loss")


def _add_training_arguments(group) -> None:
    group.add_argument("--epochs", type=float, default=4.0, help="passes over the training rows")
    group.add_argument("--batch-size", type=int, default=512, help="rows of one step")
    group.add_argument("--lr", type=float, default=1e-3, help="highest learning rate of AdamW")
    group.add_argument("--save-every", type=int, default=500, help="steps between checkpoints and held-out probes")


def run(args: Namespace) -> int:
    """Train; a bad argument or folder is one line on stderr and exit code 2."""
    from ..training.data import GenerationOptions
    from ..training.generate import Limits
    from ..training.medusa import HeadOptions, train_medusa
    from ..training.trainer import TrainerOptions

    limits = Limits(user_len=args.user_len, answer_len=args.answer_len)
    data = None if args.data is None else str(args.data)
    try:
        train_medusa(
            args.out,
            args.work or args.out.with_name(args.out.name + ".work"),
            GenerationOptions(args.model, data, args.dtype, args.seed, limits),
            HeadOptions(
                num_heads=args.num_heads,
                num_layers=args.head_layers,
                own_projection=args.own_projection,
                draft_vocab=args.draft_vocab,
                decay=args.decay,
                soft_targets=args.soft_targets,
            ),
            TrainerOptions(
                epochs=args.epochs, batch_size=args.batch_size, lr=args.lr, seed=args.seed, save_every=args.save_every
            ),
            num_tokens=args.tokens,
            num_slots=args.slots,
            num_workers=args.workers,
            device=args.device,
            command=shlex.join(["specdec-kernels", *args.argv]),
        )
    except (NotImplementedError, OSError, ValueError) as error:
        print(f"specdec-kernels train {args.kind}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}; next: specdec-kernels tree optimize --heads {args.out} --nodes 16")
    return 0
