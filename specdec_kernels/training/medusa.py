"""Train Medusa heads, on a frozen backbone (Medusa-1) or with it (Medusa-2), from nothing but the model."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ..hf.load import PACKAGED_MODEL, load_model
from ..modules.medusa import MedusaHeads
from .backbone import Backbone, JointOptions, check_lora
from .calibrate import format_accuracies, measure_accuracies, save_accuracies
from .data import HELD_OUT_EVERY, GenerationOptions, check_split, generate_conversations, is_held_out
from .generate import Conversation
from .head_loss import HeadLoss, HeadOptions
from .hidden import HiddenStates, cache_hidden_states
from .medusa_live import measure_live, train_live
from .processes import Processes
from .trainer import CURVE, Trainer, TrainerOptions
from .warm_start import go_on_from_heads


def frequent_tokens(conversations: Iterable[Conversation], size: int, vocab_size: int) -> Tensor:
    """Return ``(min(size, V),) int64``, ascending: the most frequent tokens of the answers, ties to the lower id.

    Low ids come first among tokens that never occur: a BPE vocabulary is ordered by frequency.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in Counter(t for c in conversations for t in c.answer).items():
        counts[token] = count
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def train_heads(
    heads: MedusaHeads, lm_head_weight: Tensor, states: HiddenStates, folder: str | Path,
    options: HeadOptions, trainer_options: TrainerOptions, *, compute_dtype: torch.dtype = torch.float32,
    num_probes: int = 4096,
) -> Trainer:  # fmt: skip
    """Train on the cached rows that are not held out; return the trainer, which has run.

    Args:
        heads: fp32 on the device to train on; changed in place.
        lm_head_weight: ``(V, C)`` of the backbone.
        states: the cache.
        folder: of checkpoints and the curve.
        options, trainer_options: what and how.
        compute_dtype: of the matrix products.
        num_probes: held-out rows measured at each checkpoint, for the curve.
    """
    device = heads.w_res.device
    weight = heads.select_rows(lm_head_weight).detach().to(device, compute_dtype)
    head_loss = HeadLoss(heads, options, compute_dtype)

    def loss_of(rows: Tensor) -> tuple[Tensor, Tensor]:
        return head_loss(states, rows, weight)

    held_out = states.rows(held_out=True)
    probes = held_out[torch.linspace(0, max(0, len(held_out) - 1), min(num_probes, len(held_out))).long()]

    def evaluate() -> dict:
        shared = None if heads.w_out is not None else weight
        return {"held_out_top1": [row[0] for row in measure_accuracies(heads, shared, states, probes, 1).accuracies()]}

    trainer = Trainer(
        heads, loss_of, states.rows(held_out=False), trainer_options, folder, evaluate=evaluate, task=asdict(options)
    )
    trainer.run()
    return trainer


def train_medusa(
    out: str | Path, work: str | Path, generation: GenerationOptions, options: HeadOptions,
    trainer_options: TrainerOptions, *, num_tokens: int, num_slots: int = 32, num_workers: int = 1,
    joint: JointOptions | None = None, on_the_fly: bool = False, device: str = "cpu", command: str = "",
) -> MedusaHeads:  # fmt: skip
    """Make the data, cache the hidden states, train, measure, and save; each stage goes on where it stopped.

    Args:
        out: folder of the result: weights, ``config.json``, ``accuracy.json``, ``training_curve.jsonl`` and ``.svg``;
            with ``joint`` also ``lora/`` or ``model/``, and the curve of the heads alone as ``warm_up_curve``.
        work: folder of the data, the cached states and the checkpoints; may be deleted afterwards.
        generation: model, prompts and sampling.
        options, trainer_options: what and how to train; ``batch_size`` counts rows, or conversations ``on_the_fly``.
        num_tokens: answer tokens to train and measure on.
        num_slots, num_workers: of the generation, see `generate_conversations`.
        joint: Medusa-2: train the backbone, too, once the heads are trained (warmed up) on it as it is.
        on_the_fly: run the backbone for each batch instead of keeping its states on disk.
        device: of everything.
        command: written to ``accuracy.json``.

    Returns:
        The heads, in the dtype they were saved in.

    Raises:
        ValueError: the work folder holds a run with other options, or too few conversations to hold some out.
        ImportError: LoRA, and ``peft`` is not installed.
    """
    check_lora(joint)
    if options.init is not None and not Path(options.init).exists():
        raise FileNotFoundError(f"there are no heads at {options.init}")
    out, work, processes = Path(out), Path(work), Processes.current(device)
    conversations = generate_conversations(
        work, generation, num_tokens=num_tokens, num_slots=num_slots, num_workers=num_workers, device=device
    )
    check_split(conversations)
    model = load_model(generation.model, getattr(torch, generation.dtype), device)
    weight = model.get_output_embeddings().weight.detach()
    heads = fresh_heads(options, conversations, weight)
    if processes.is_first:
        num_training = sum(not is_held_out(c) for c in conversations)
        print(processes.announcement(heads, num_training))
    states = None
    if on_the_fly:
        trainer = train_live(heads, Backbone(model), conversations, work / "training", options, trainer_options)
    else:
        states = cache_hidden_states(
            work / "hidden", conversations, model, hidden_size=weight.shape[1], dtype=weight.dtype
        )
        trainer = train_heads(
            heads, weight, states, work / "training", options, trainer_options, compute_dtype=weight.dtype
        )
    trainers, backbone = {CURVE: trainer}, Backbone(model, joint, generation.seed)
    if joint is not None:
        states = None  # the backbone has others now
        joined = train_live(heads, backbone, conversations, work / "joint", options, joint.trainer, joint)
        trainers = {"warm_up_curve": trainer, CURVE: joined}
    heads.metadata = {"base_model_name_or_path": base_model_name(generation.model)}
    heads = heads.to(weight.dtype).requires_grad_(False)
    if processes.is_first:
        heads.save_pretrained(out)
        backbone.save(out, generation.model)
        for name, trained in trainers.items():
            trained.copy_curve(out, name)
        report = _measure(heads, backbone, conversations, states)
        save_accuracies(out / "accuracy.json", **report, model=base_model_name(generation.model), command=command)
        print(format_accuracies(report["accuracies"], report["num_labels"]))
    return heads


def fresh_heads(options: HeadOptions, conversations: Iterable[Conversation], lm_head_weight: Tensor) -> MedusaHeads:
    """Return untrained fp32 heads: identity blocks, own projections copied from the ``lm_head``.

    So every head starts by predicting what the base model predicts (arXiv 2401.10774, section 2.1). With
    ``options.init`` it starts as the heads in that folder, see `go_on_from_heads`.
    """
    vocab_size, hidden_size = lm_head_weight.shape
    vocab_map = None
    if 0 < options.draft_vocab < vocab_size:
        training = (c for c in conversations if not is_held_out(c))
        vocab_map = frequent_tokens(training, options.draft_vocab, vocab_size)
    heads = MedusaHeads(
        options.num_heads, options.num_layers, hidden_size, vocab_size, own_projection=options.own_projection,
        vocab_map=vocab_map, root_conditioned=options.root_conditioned, dtype=torch.float32,
        device=lm_head_weight.device,
    )  # fmt: skip
    if heads.w_out is not None:
        heads.w_out.data.copy_(heads.select_rows(lm_head_weight))
    if options.init is not None:
        go_on_from_heads(heads, options.init)
    return heads


def _measure(
    heads: MedusaHeads, backbone: Backbone, conversations: Sequence[Conversation], states: HiddenStates | None
) -> dict:
    """Measure all held-out answers, and the greedy ones alone, on cached states or on the running backbone."""
    if states is not None:
        weight = heads.select_rows(backbone.weight) if heads.w_out is None else None
        rows = states.rows(held_out=True)
        everything = measure_accuracies(heads, weight, states, rows)
        greedy = measure_accuracies(heads, weight, states, rows[states.greedy[rows]])
    else:
        held_out = [c for c in conversations if is_held_out(c)]
        everything, kept = measure_live(heads, backbone, held_out)
        greedy, _ = measure_live(heads, backbone, [c for c in held_out if c.greedy])
    report = {
        "accuracies": everything.accuracies(),
        "greedy_heads": greedy.accuracies(),
        "num_labels": everything.totals.tolist(),
        "split": f"held-out conversations, 1 in {HELD_OUT_EVERY} by a hash of the prompt, never trained on",
        "training_tokens": sum(len(c.answer) - 1 for c in conversations if not is_held_out(c)),
        "held_out_tokens": sum(len(c.answer) - 1 for c in conversations if is_held_out(c)),
        "projection_rows": heads.num_rows,
        "vocab_size": heads.vocab_size,
    }
    return report | ({"same_as_original": round(kept, 6)} if backbone.is_tuned else {})


def base_model_name(name: str) -> str:
    """Return a name that means something elsewhere: not a path of this machine."""
    if name == PACKAGED_MODEL:
        return "HuggingFaceTB/SmolLM2-135M-Instruct"
    return Path(name).name if Path(name).exists() else name
