"""Train Medusa heads on a frozen backbone (Medusa-1), from nothing but the model."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..hf.load import PACKAGED_MODEL, load_model
from ..modules.medusa import MedusaHeads
from .calibrate import format_accuracies, measure_accuracies, row_of_token, save_accuracies, states_of_heads
from .data import HELD_OUT_EVERY, GenerationOptions, generate_conversations, is_held_out
from .generate import Conversation
from .hidden import HiddenStates, cache_hidden_states
from .losses import medusa_loss
from .trainer import Trainer, TrainerOptions


@dataclass(frozen=True)
class HeadOptions:
    """The shape of the heads and their loss.

    Attributes:
        num_heads: ``M``.
        num_layers: residual layers of each head.
        own_projection: each head owns ``(V', C)``; otherwise the frozen ``lm_head`` serves all.
        draft_vocab: rows of the projection: the most frequent tokens of the training answers. 0 = the whole
            vocabulary. Fewer rows train and draft faster; a token outside is never drafted (the output stays exact).
        decay: ``λ`` of the loss.
        soft_targets: learn the backbone's whole distribution at each label's position instead of the label alone.
        root_conditioned: the heads see the pending token, too, see `MedusaHeads`.
    """

    num_heads: int = 4
    num_layers: int = 1
    own_projection: bool = False
    draft_vocab: int = 0
    decay: float = 0.8
    soft_targets: bool = False
    root_conditioned: bool = True


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
    to_row = row_of_token(heads, device)
    mixed = torch.autocast(device.type, compute_dtype, enabled=compute_dtype != torch.float32)

    def loss_of(rows: Tensor) -> tuple[Tensor, Tensor]:
        labels, teacher = states.labels(rows, heads.num_heads).to(device), None
        if options.soft_targets:
            teacher = states.teachers(rows, heads.num_heads).to(device, compute_dtype)
        elif to_row is not None:
            labels = torch.where(labels < 0, labels, to_row[labels.clamp_min(0)])
        with mixed:
            hidden = states_of_heads(heads, states, rows, compute_dtype)
        own = weight if heads.w_out is None else heads.w_out
        return medusa_loss(hidden, own, labels, options.decay, teacher, weight)

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
    device: str = "cpu", command: str = "",
) -> MedusaHeads:  # fmt: skip
    """Make the data, cache the hidden states, train, measure, and save; each stage goes on where it stopped.

    Args:
        out: folder of the result: weights, ``config.json``, ``accuracy.json``, ``training_curve.jsonl`` and ``.svg``.
        work: folder of the data, the cached states and the checkpoints; may be deleted afterwards.
        generation: model, prompts and sampling.
        options, trainer_options: what and how to train.
        num_tokens: answer tokens to train and measure on.
        num_slots, num_workers: of the generation, see `generate_conversations`.
        device: of everything.
        command: written to ``accuracy.json``.

    Returns:
        The heads, in the dtype they were saved in.

    Raises:
        ValueError: the work folder holds a run with other options, or too few conversations to hold some out.
    """
    out, work = Path(out), Path(work)
    conversations = generate_conversations(
        work, generation, num_tokens=num_tokens, num_slots=num_slots, num_workers=num_workers, device=device
    )
    model = load_model(generation.model, getattr(torch, generation.dtype), device)
    lm_head_weight = model.get_output_embeddings().weight.detach()
    states = cache_hidden_states(
        work / "hidden", conversations, model, hidden_size=lm_head_weight.shape[1], dtype=lm_head_weight.dtype
    )
    for held_out, name in ((False, "training"), (True, "held-out")):
        if len(states.rows(held_out)) == 0:
            raise ValueError(f"no {name} rows in {len(conversations)} conversations; ask for more tokens")
    heads = fresh_heads(options, conversations, lm_head_weight)
    print(f"training {sum(p.numel() for p in heads.parameters()):,} parameters on {len(states.rows(False)):,} rows")
    trainer = train_heads(
        heads, lm_head_weight, states, work / "training", options, trainer_options, compute_dtype=lm_head_weight.dtype
    )
    heads.metadata = {"base_model_name_or_path": base_model_name(generation.model)}
    heads = heads.to(lm_head_weight.dtype).requires_grad_(False)
    heads.save_pretrained(out)
    trainer.copy_curve(out)
    report = _measure(heads, lm_head_weight, states)
    save_accuracies(out / "accuracy.json", **report, model=base_model_name(generation.model), command=command)
    print(format_accuracies(report["accuracies"], report["num_labels"]))
    return heads


def fresh_heads(options: HeadOptions, conversations: Iterable[Conversation], lm_head_weight: Tensor) -> MedusaHeads:
    """Return untrained fp32 heads: identity blocks, own projections copied from the ``lm_head``.

    So every head starts by predicting what the base model predicts (arXiv 2401.10774, section 2.1).
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
    return heads


def _measure(heads: MedusaHeads, lm_head_weight: Tensor, states: HiddenStates) -> dict:
    """Measure all held-out answers, and the greedy ones alone."""
    weight = heads.select_rows(lm_head_weight) if heads.w_out is None else None
    held_out = states.rows(held_out=True)
    everything = measure_accuracies(heads, weight, states, held_out)
    greedy = measure_accuracies(heads, weight, states, held_out[states.greedy[held_out]])
    return {
        "accuracies": everything.accuracies(),
        "greedy_heads": greedy.accuracies(),
        "num_labels": everything.totals.tolist(),
        "split": f"held-out conversations, 1 in {HELD_OUT_EVERY} by a hash of the prompt, never trained on",
        "training_tokens": len(states.rows(held_out=False)),
        "held_out_tokens": len(held_out),
        "projection_rows": heads.num_rows,
        "vocab_size": heads.vocab_size,
    }


def base_model_name(name: str) -> str:
    """Return a name that means something elsewhere: not a path of this machine."""
    if name == PACKAGED_MODEL:
        return "HuggingFaceTB/SmolLM2-135M-Instruct"
    return Path(name).name if Path(name).exists() else name
