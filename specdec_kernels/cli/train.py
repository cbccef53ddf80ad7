"""``specdec-kernels train``: train Medusa heads or a Kangaroo adapter for a causal LM, from nothing but the model."""

import shlex
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace

from ._arguments import not_negative, positive_float, positive_int
from ._data import RawHelp, add_data_arguments, generation_options, places_and_data

EPILOG = """\
examples:
  specdec-kernels train medusa --model smollm2 --out heads/smollm2 --head-layers 2 --draft-vocab 16384
  specdec-kernels train medusa --model FOLDER_OR_ID --device cuda --out heads/llama --data prompts.jsonl
  specdec-kernels train medusa --model FOLDER_OR_ID --device cuda --out heads/llama --joint-epochs 1
then
  specdec-kernels tree optimize --heads heads/smollm2 --model smollm2

An interrupted run goes on when the same command is given again: generation, hidden states and training alike.
"""
KANGAROO_EPILOG = """\
examples:
  specdec-kernels train kangaroo --model smollm2 --out adapters/smollm2 --exit-layer 8
  specdec-kernels train kangaroo --model FOLDER_OR_ID --device cuda --out adapters/llama --exit-layer 2 --kind attention

An interrupted run goes on when the same command is given again: generation, hidden states and training alike.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the kinds of drafters: ``medusa`` and ``kangaroo``."""
    kinds = parser.add_subparsers(dest="drafter", required=True, metavar="DRAFTER")
    medusa = kinds.add_parser("medusa", help="Medusa heads (Medusa-1: the model stays frozen)", epilog=EPILOG)
    medusa.formatter_class = RawHelp
    add_data_arguments(medusa.add_argument_group("data"))
    _add_head_arguments(medusa.add_argument_group("heads"))
    _add_training_arguments(
        medusa.add_argument_group("training"), batch_size=512, rows="rows (conversations with --on-the-fly)"
    )
    _add_joint_arguments(medusa.add_argument_group("Medusa-2: then train the model, too"))
    kangaroo = kinds.add_parser("kangaroo", help="a Kangaroo adapter (the model stays frozen)", epilog=KANGAROO_EPILOG)
    kangaroo.formatter_class = RawHelp
    add_data_arguments(kangaroo.add_argument_group("data"))
    _add_adapter_arguments(kangaroo.add_argument_group("adapter"))
    _add_training_arguments(kangaroo.add_argument_group("training"), batch_size=4, rows="conversations")


def _add_head_arguments(group) -> None:
    group.add_argument("--num-heads", type=positive_int, default=4, help="heads: tokens drafted ahead")
    group.add_argument("--head-layers", type=positive_int, default=1, help="residual layers of each head")
    group.add_argument("--own-projection", action="store_true", help="each head owns a vocabulary projection")
    group.add_argument("--draft-vocab", type=int, default=0, help="only the most frequent tokens are drafted; 0: all")
    group.add_argument("--soft-targets", action="store_true", help="learn the model's distribution, not its token")
    group.add_argument("--root-conditioned", action=BooleanOptionalAction, default=True, help="the heads also see the "
                       "pending token: clearly better drafts; vLLM has no such heads")  # fmt: skip
    group.add_argument("--decay", type=float, default=0.8, help="head k weighs decay^k in the loss")


def _add_joint_arguments(group) -> None:
    group.add_argument(
        "--joint-epochs", type=float, default=0.0, help="passes over the texts; 0: the model stays as is"
    )
    group.add_argument("--joint-batch-size", type=positive_int, default=4, help="conversations of one step")
    group.add_argument("--joint-lr", type=positive_float, default=1e-4, help="highest learning rate of the model")
    group.add_argument("--joint-head-rate", type=float, default=4.0, help="the heads' learning rate is so much higher")
    group.add_argument("--joint-weight", type=float, default=0.2, help="of the heads' loss beside the model's own")
    group.add_argument("--lora-rank", type=int, default=8, help="train LoRA adapters (needs peft); 0: all weights")
    group.add_argument("--no-self-distillation", action="store_true", help="the model learns the texts' tokens; by "
                       "default it keeps its own distribution")  # fmt: skip


def _add_adapter_arguments(group) -> None:
    group.add_argument("--exit-layer", type=positive_int, required=True, help="layers of the model that "
                       "run before the adapter")  # fmt: skip
    group.add_argument("--kind", choices=("layer", "attention"), default="layer", help="a whole decoder layer, or the "
                       "paper's attention alone")  # fmt: skip
    group.add_argument("--draft-vocab", type=int, default=0, help="only the most frequent tokens are drafted; 0: all")
    group.add_argument("--alpha", type=float, default=0.0, help="weight of the text's own tokens in the loss; the rest "
                       "is the model's distribution")  # fmt: skip
    group.add_argument("--target-temperature", type=float, default=1.0, help="of the model's distribution in the loss")
    group.add_argument("--draft-temperature", type=float, default=1.0, help="of the adapter's distribution in the loss")
    group.add_argument("--answers-only", action="store_true", help="do not learn from the user's turns too")


def _add_training_arguments(group, batch_size: int, rows: str) -> None:
    group.add_argument("--init", help="folder of an earlier result to go on from, say with a lower --lr")
    group.add_argument("--epochs", type=positive_float, default=4.0, help=f"passes over the training {rows}")
    group.add_argument("--batch-size", type=positive_int, default=batch_size, help=f"{rows} of one step")
    group.add_argument("--lr", type=not_negative, default=1e-3, help="highest learning rate of AdamW")
    group.add_argument("--weight-decay", type=float, default=0.0, help="of AdamW; helps when there is little text")
    group.add_argument(
        "--on-the-fly", action="store_true", help="keep no hidden states on disk, run the model each time"
    )
    group.add_argument("--save-every", type=positive_int, default=500, help="steps between checkpoints and "
                       "held-out probes")  # fmt: skip


def run(args: Namespace) -> int:
    """Train; a bad argument or folder is one line on stderr and exit code 2."""
    from ..training.processes import Processes

    train = _train_medusa if args.drafter == "medusa" else _train_kangaroo
    try:
        following = train(args)
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        print(f"specdec-kernels train {args.drafter}: {error}", file=sys.stderr)
        return 2
    if Processes.current().is_first:
        print(f"wrote {args.out}; next: {following}")
    return 0


def _train_medusa(args: Namespace) -> str:
    from ..training.medusa import HeadOptions, train_medusa

    options = HeadOptions(
        num_heads=args.num_heads,
        num_layers=args.head_layers,
        own_projection=args.own_projection,
        draft_vocab=args.draft_vocab,
        decay=args.decay,
        soft_targets=args.soft_targets,
        root_conditioned=args.root_conditioned,
        init=args.init,
    )
    train_medusa(
        *places_and_data(args), options, _trainer_options(args), joint=_joint_options(args), on_the_fly=args.on_the_fly,
        **generation_options(args),
    )  # fmt: skip
    tuned = f" (the heads belong to the tuned model, {args.out}/{'lora' if args.lora_rank else 'model'})"
    measured = shlex.join(["--model", args.model, "--dtype", args.dtype, "--device", str(args.device)])
    return f"specdec-kernels tree optimize --heads {args.out} {measured}" + (tuned if args.joint_epochs else "")


def _joint_options(args: Namespace):
    from ..training.backbone import JointOptions
    from ..training.trainer import TrainerOptions

    if not args.joint_epochs:
        return None
    trainer = TrainerOptions(
        epochs=args.joint_epochs, batch_size=args.joint_batch_size, lr=args.joint_lr, seed=args.seed,
        save_every=args.save_every,
    )  # fmt: skip
    return JointOptions(
        trainer, weight=args.joint_weight, head_rate=args.joint_head_rate, lora_rank=args.lora_rank,
        self_distillation=not args.no_self_distillation,
    )  # fmt: skip


def _train_kangaroo(args: Namespace) -> str:
    from ..training.kangaroo import AdapterOptions, train_kangaroo

    options = AdapterOptions(
        exit_layer=args.exit_layer,
        kind=args.kind,
        draft_vocab=args.draft_vocab,
        alpha=args.alpha,
        target_temperature=args.target_temperature,
        draft_temperature=args.draft_temperature,
        answers_only=args.answers_only,
        init=args.init,
    )
    train_kangaroo(
        *places_and_data(args), options, _trainer_options(args), on_the_fly=args.on_the_fly, **generation_options(args)
    )
    return f'KangarooDrafter.from_pretrained("{args.out}", model)'


def _trainer_options(args: Namespace):
    from ..training.trainer import TrainerOptions

    return TrainerOptions(
        epochs=args.epochs, batch_size=args.batch_size, lr=args.lr, weight_decay=args.weight_decay, seed=args.seed,
        save_every=args.save_every,
    )  # fmt: skip
