"""The causal LM under the heads: frozen, or tuned together with them beside its original."""

import contextlib
import copy
import importlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..hf.load import load_tokenizer
from .generate import Conversation
from .hidden import HiddenStates, answer_rows, padded_ids
from .trainer import TrainerOptions


@dataclass(frozen=True)
class JointOptions:
    """Medusa-2, ``L_LM + λ₀ · L_medusa``: how the backbone is trained with the heads (arXiv 2401.10774, section 2.2).

    Attributes:
        trainer: how; its ``lr`` is the backbone's, ``batch_size`` counts conversations.
        weight: ``λ₀``.
        head_rate: by what the heads' learning rate is higher than the backbone's.
        lora_rank: of the LoRA adapters of all linear layers but the ``lm_head``; 0 trains every weight instead.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        self_distillation: ``L_LM`` is the divergence from the original's distribution, ``KL(original ‖ tuned)``, so
            the backbone stays what it was (section 2.3.2); otherwise the cross-entropy of the text's own tokens.
    """

    trainer: TrainerOptions = field(default_factory=lambda: TrainerOptions(epochs=1.0, batch_size=4, lr=1e-4))
    weight: float = 0.2
    head_rate: float = 4.0
    lora_rank: int = 8
    lora_alpha: int = 16
    self_distillation: bool = True


class Backbone:
    """Give the hidden states of conversations, of the model as it is trained and as it was.

    Args:
        model: the causal LM in eval mode, which stays on: nothing is dropped out, so that a run can be resumed. Changed
            in place when tuned: in the dtype it has with LoRA, whose adapters are fp32; otherwise it becomes fp32.
        joint: how it is tuned; None: frozen.
        seed: of the adapters' first weights.

    Raises:
        ImportError: LoRA, and ``peft`` is not installed.
    """

    def __init__(self, model, joint: JointOptions | None = None, seed: int = 0):
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.is_tuned = joint is not None
        self._lora = self._original = None
        model.requires_grad_(False)
        self.original_weight = model.get_output_embeddings().weight.detach()
        if joint is not None and joint.lora_rank:
            self._lora = _with_lora(model, joint, seed)
        elif joint is not None:
            self._original = copy.deepcopy(model)
            self.original_weight = self._original.get_output_embeddings().weight
            model.float().requires_grad_(True)
        self.model = model

    @property
    def module(self) -> nn.Module:
        """Holds all parameters."""
        return self.model if self._lora is None else self._lora

    @property
    def weight(self) -> Tensor:
        """``(V, C)`` of the ``lm_head``; tuned, too, unless LoRA is."""
        return self.model.get_output_embeddings().weight

    def states(self, batch: list[Conversation]) -> HiddenStates:
        """Return the states before the answers' tokens; differentiable where the backbone is tuned."""
        mixed = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with torch.set_grad_enabled(self.is_tuned and torch.is_grad_enabled()), mixed:
            return self._states(self.model, batch)

    @torch.no_grad()
    def original_states(self, batch: list[Conversation]) -> HiddenStates:
        """Return the states of the model as it was."""
        with contextlib.nullcontext() if self._lora is None else self._lora.disable_adapter():
            return self._states(self.model if self._original is None else self._original, batch)

    def _states(self, model, batch: list[Conversation]) -> HiddenStates:
        rows = answer_rows(model, padded_ids(batch, self.device), batch)
        return HiddenStates(rows, batch, model.get_input_embeddings().weight)

    def save(self, folder: Path, tokenizer_name: str) -> None:
        """Write the LoRA adapter into ``folder/lora``, or a wholly tuned model and its tokenizer into ``folder/model``.

        Of a frozen one, nothing.
        """
        if self._lora is not None:
            self._lora.save_pretrained(folder / "lora")
        elif self.is_tuned:
            self.model.to(self.dtype).save_pretrained(folder / "model")
            load_tokenizer(tokenizer_name).save_pretrained(folder / "model")


def check_lora(joint: JointOptions | None) -> None:
    """Raise ImportError if LoRA is asked for and ``peft`` is missing: better now than after hours."""
    if joint is not None and joint.lora_rank:
        try:
            importlib.import_module("peft")
        except ImportError as error:
            raise ImportError("LoRA needs peft: pip install 'specdec-kernels[lora]', or train all weights") from error


def _with_lora(model, joint: JointOptions, seed: int):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=joint.lora_rank, lora_alpha=joint.lora_alpha, target_modules="all-linear")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config).eval()
