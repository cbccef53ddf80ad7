"""Train a Kangaroo adapter on a frozen backbone, from nothing but the model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..hf.load import load_config, load_model
from ..modules.kangaroo import KangarooAdapter, Rope, rope_of
from ..modules.kangaroo_checkpoint import read_adapter
from .calibrate import MAX_RANK, RankCounter, format_accuracies, row_of_token, save_accuracies
from .data import HELD_OUT_EVERY, GenerationOptions, check_split, generate_conversations, is_held_out
from .generate import Conversation
from .hidden import IGNORED
from .losses import CHUNK_ROWS, linear_cross_entropy, mean_count
from .medusa import base_model_name, frequent_tokens
from .processes import Processes
from .sequences import LiveStates, SequenceBatch, SequenceStates, split, store_states
from .trainer import Trainer, TrainerOptions
from .warm_start import take_over

KINDS = ("layer", "attention")
PARTS = ("soft", "hard")  # of the loss


@dataclass(frozen=True)
class AdapterOptions:
    """The shape of the adapter and its loss, ``(1 − alpha) · soft + alpha · hard``.

    Soft is the cross-entropy to the backbone's distribution, hard that to the text's next token::

        soft = − Σ_v softmax(backbone / target_temperature)_v · log softmax(adapter / draft_temperature)_v

    Attributes:
        exit_layer: the backbone's layers that run before the adapter.
        kind: ``"layer"``, a whole decoder layer, or ``"attention"``, the paper's.
        draft_vocab: only so many tokens, the most frequent ones of the training answers, are drafted. 0: all.
        alpha: weight of the hard labels.
        target_temperature, draft_temperature: of the soft term.
        answers_only: learn from the answers, not from the user's turns too.
        init: folder of an adapter to go on from; None to begin as the backbone's last layer.
    """

    exit_layer: int
    kind: str = "layer"
    draft_vocab: int = 0
    alpha: float = 0.0
    target_temperature: float = 1.0
    draft_temperature: float = 1.0
    answers_only: bool = False
    init: str | None = None


def check_adapter(options: AdapterOptions, config) -> None:
    """Raise unless an adapter can be made for a model of this text configuration, as far as that can be seen.

    Raises:
        FileNotFoundError: there is no adapter to go on from.
        ValueError: an unknown kind, or an exit layer that the model does not have.
    """
    if options.kind not in KINDS:
        raise ValueError(f"the kind of an adapter must be one of {', '.join(KINDS)}, got {options.kind}")
    if not 1 <= options.exit_layer < config.num_hidden_layers:
        raise ValueError(f"exit_layer must be in [1, {config.num_hidden_layers - 1}], got {options.exit_layer}")
    if options.init is not None and not Path(options.init).exists():
        raise FileNotFoundError(f"there is no adapter at {options.init}")


def fresh_adapter(options: AdapterOptions, conversations: Sequence[Conversation], model) -> KangarooAdapter:
    """Return an fp32 adapter that begins as the backbone's last layer and norm, as far as their shapes are the same.

    With ``options.init`` it begins as that adapter, whatever its vocabulary was.

    Raises:
        FileNotFoundError: there is no such adapter.
        ValueError: an unknown kind, an exit layer that the model does not have, or another adapter to go on from.
    """
    config = model.config.get_text_config()
    check_adapter(options, config)
    weight = model.get_output_embeddings().weight
    vocab_map = None
    if 0 < options.draft_vocab < weight.shape[0]:
        training = (c for c in conversations if not is_held_out(c))
        vocab_map = frequent_tokens(training, options.draft_vocab, weight.shape[0])
    adapter = KangarooAdapter(
        weight.shape[1], config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads, options.exit_layer, rope_of(model),
        head_dim=getattr(config, "head_dim", None),
        intermediate_size=config.intermediate_size if options.kind == "layer" else None,
        vocab_size=weight.shape[0], vocab_map=vocab_map, eps=getattr(config, "rms_norm_eps", 1e-6),
        dtype=torch.float32, device=weight.device,
    )  # fmt: skip
    if options.init is None:
        adapter.start_from(model.base_model.layers[-1], model.base_model.norm)
    else:
        _go_on_from(adapter, options.init, rope_of(model))
    return adapter


def _go_on_from(adapter: KangarooAdapter, folder: str, rope: Rope) -> None:
    """Take over the weights of a trained adapter."""
    # The public ones do not say.
    exit_layer = read_adapter(Path(folder)).config.get("exit_layer", adapter.exit_layer)
    if exit_layer != adapter.exit_layer:
        raise ValueError(f"the adapter in {folder} is behind layer {exit_layer}, wanted {adapter.exit_layer}")
    trained = KangarooAdapter.from_pretrained(folder, rope, exit_layer=exit_layer, dtype=torch.float32)
    take_over(adapter, trained, folder)


class AdapterLoss:
    """The loss of an adapter on some conversations.

    Args:
        adapter: fp32.
        lm_head_weight: ``(V, C)`` of the backbone, in the dtype of the products.
        states: of the conversations.
        options: the loss.
    """

    def __init__(
        self, adapter: KangarooAdapter, lm_head_weight: Tensor, states: SequenceStates, options: AdapterOptions
    ):
        self.adapter, self.states, self.options = adapter, states, options
        self.weight = adapter.select_rows(lm_head_weight).detach()
        self.to_row = row_of_token(adapter, self.weight.device)
        self.processes = Processes.current()
        self.template_len = _common_prefix([c.prompt for c in states.conversations])

    def __call__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and its soft and hard parts ``(2,)``; the hard one is 0 where it has no weight."""
        batch, options, device = self.states.batch(indices.tolist()), self.options, self.weight.device
        where = self._learnt(batch)
        mixed = torch.autocast(device.type, self.weight.dtype, enabled=self.weight.dtype != torch.float32)
        with mixed:
            x = self.adapter(batch.exit.to(device, torch.float32))[where.to(device)]
        x = x.to(self.weight.dtype)
        teacher = batch.final[where].to(device, self.weight.dtype)
        labels = batch.next_ids[where].to(device)
        soft = hard = x.new_zeros((), dtype=torch.float32)
        if options.alpha < 1:
            student, teacher = x / options.draft_temperature, teacher / options.target_temperature
            count = mean_count(labels, self.processes)
            soft = linear_cross_entropy(student, self.weight, labels, teacher, self.weight, count)
        if options.alpha > 0:
            rows = labels if self.to_row is None else self.to_row[labels]
            hard = linear_cross_entropy(x, self.weight, rows, num_labels=mean_count(rows, self.processes))
        loss = (1 - options.alpha) * soft + options.alpha * hard
        return loss, torch.stack([soft.detach(), hard.detach()])

    def _learnt(self, batch: SequenceBatch) -> Tensor:
        if self.options.answers_only:
            return batch.is_answer
        # The template before the user's text is the same everywhere; nobody drafts it.
        return batch.is_token & (torch.arange(batch.is_token.shape[1]) >= self.template_len - 1)


def _common_prefix(prompts: list[tuple[int, ...]]) -> int:
    """Return how many ids all prompts begin with."""
    # What the first and the last in order share, all between them share.
    first, last = min(prompts, default=()), max(prompts, default=())
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


@torch.no_grad()
def measure_agreement(
    adapter: KangarooAdapter, lm_head_weight: Tensor, states: SequenceStates, indices: Sequence[int],
    max_rank: int = MAX_RANK, batch_size: int = 8,
) -> RankCounter:  # fmt: skip
    """Count at which rank of the adapter the backbone's own best token is found, after each position of the answers.

    Args:
        adapter: in any dtype.
        lm_head_weight: ``(V, C)`` of the backbone, in the adapter's dtype.
        states: of the conversations.
        indices: which of them.
        max_rank: candidates to count.
        batch_size: conversations at a time.
    """
    counter = RankCounter(1, max_rank)
    device, weight = lm_head_weight.device, adapter.select_rows(lm_head_weight)
    to_row = row_of_token(adapter, device)
    chunk = CHUNK_ROWS.get(device.type, 1024)
    for start in range(0, len(indices), batch_size):
        batch = states.batch(indices[start : start + batch_size])
        drafted = adapter(batch.exit.to(device, lm_head_weight.dtype))[batch.is_answer.to(device)]
        final = batch.final[batch.is_answer].to(device, lm_head_weight.dtype)
        for x, teacher in zip(drafted.split(chunk), final.split(chunk), strict=True):
            best = (teacher @ lm_head_weight.T).argmax(-1)
            rows = best if to_row is None else to_row[best]
            known = rows != IGNORED
            counter.add(0, (x[known] @ weight.T).float(), rows[known], len(rows))
    return counter


def train_adapter(
    adapter: KangarooAdapter, lm_head_weight: Tensor, states: SequenceStates, folder: str | Path,
    options: AdapterOptions, trainer_options: TrainerOptions, *, num_probes: int = 32,
) -> Trainer:  # fmt: skip
    """Train on the conversations that are not held out; return the trainer, which has run.

    Args:
        adapter: fp32 on the device to train on; changed in place.
        lm_head_weight: ``(V, C)`` of the backbone; its dtype is that of the matrix products.
        states: of all conversations.
        folder: of checkpoints and the curve.
        options: what to train.
        trainer_options: how; ``batch_size`` counts conversations.
        num_probes: held-out conversations measured at each checkpoint, for the curve.
    """
    training, held_out = split(states)
    probes = held_out[torch.linspace(0, max(0, len(held_out) - 1), min(num_probes, len(held_out))).long()].tolist()

    def evaluate() -> dict:
        agreement = measure_agreement(adapter, lm_head_weight.float(), states, probes, 1)
        return {"held_out_top1": [row[0] for row in agreement.accuracies()]}

    loss_of = AdapterLoss(adapter, lm_head_weight.detach(), states, options)
    trainer = Trainer(
        adapter, loss_of, training, trainer_options, folder, evaluate=evaluate, task=asdict(options), parts=PARTS
    )
    trainer.run()
    return trainer


def train_kangaroo(
    out: str | Path, work: str | Path, generation: GenerationOptions, options: AdapterOptions,
    trainer_options: TrainerOptions, *, num_tokens: int, num_slots: int = 32, num_workers: int = 1,
    on_the_fly: bool = False, device: str = "cpu", command: str = "",
) -> KangarooAdapter:  # fmt: skip
    """Make the data, cache the hidden states, train, measure, and save; each stage goes on where it stopped.

    Args:
        out: folder of the result: weights, ``config.json``, ``accuracy.json``, ``training_curve.jsonl`` and ``.svg``.
        work: folder of the data, the cached states and the checkpoints; may be deleted afterwards.
        generation: model, prompts and sampling.
        options, trainer_options: what and how to train.
        num_tokens: answer tokens to train and measure on.
        num_slots, num_workers: of the generation, see `generate_conversations`.
        on_the_fly: run the backbone for each batch instead of keeping its states on disk.
        device: of everything.
        command: written to ``accuracy.json``.

    Returns:
        The adapter, in the dtype it was saved in.

    Raises:
        ValueError: the work folder holds a run with other options, too few conversations to hold some out, or options
            that do not fit the model.
    """
    check_adapter(options, load_config(generation.model))  # rather now than after hours of writing texts
    out, work, processes = Path(out), Path(work), Processes.current(device)
    conversations = generate_conversations(
        work, generation, num_tokens=num_tokens, num_slots=num_slots, num_workers=num_workers, device=device
    )
    model = load_model(generation.model, getattr(torch, generation.dtype), device)
    weight = model.get_output_embeddings().weight.detach()
    adapter = fresh_adapter(options, conversations, model)
    check_split(conversations)
    states: SequenceStates
    if on_the_fly:
        states = LiveStates(conversations, model, options.exit_layer)
    else:
        states = store_states(work / "hidden", conversations, model, options.exit_layer, dtype=weight.dtype)
    if processes.is_first:
        print(processes.announcement(adapter, len(split(states)[0])))
    trainer = train_adapter(adapter, weight, states, work / "training", options, trainer_options)
    adapter.metadata = {"base_model_name_or_path": base_model_name(generation.model)}
    adapter = adapter.to(weight.dtype).requires_grad_(False)
    if processes.is_first:
        adapter.save_pretrained(out)
        trainer.copy_curve(out)
        report = _measure(adapter, weight, states)
        save_accuracies(out / "accuracy.json", **report, **asdict(options), model=base_model_name(generation.model),
                        command=command)  # fmt: skip
        print(format_accuracies(report["accuracies"], report["num_labels"], ahead=1))
    return adapter


def _measure(adapter: KangarooAdapter, weight: Tensor, states: SequenceStates) -> dict:
    """Measure all held-out answers, and the greedy ones alone."""
    training, held_out = (part.tolist() for part in split(states))
    everything = measure_agreement(adapter, weight, states, held_out)
    greedy = measure_agreement(adapter, weight, states, [i for i in held_out if states.conversations[i].greedy])
    return {
        "accuracies": everything.accuracies(),
        "greedy_heads": greedy.accuracies(),
        "num_labels": everything.totals.tolist(),
        "split": f"held-out conversations, 1 in {HELD_OUT_EVERY} by a hash of the prompt, never trained on",
        "training_tokens": sum(len(states.conversations[i].answer) for i in training),
        "held_out_tokens": int(everything.totals.sum()),
    }
