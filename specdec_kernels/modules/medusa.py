"""Medusa heads as a module: trained in plain torch, used for inference through the op."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import check_range, check_values, values_readable
from ..ops.medusa_project import medusa_project_topk
from ..reference.medusa_project import project, residual_blocks, root_block
from .medusa_checkpoint import read_checkpoint, write_checkpoint


class MedusaHeads(nn.Module):
    """Predict the next tokens but one, all heads at once (Cai et al. 2024, arXiv 2401.10774, eq. 1).

    ``head_i(h) = W_out (block_R ∘ … ∘ block_1)(h)``, ``block(x) = x + SiLU(x Wᵀ + b)``. Given the final, normed
    hidden state at position *t*, head *i* (counted from 0) predicts token *t + 2 + i*: the nodes of depth
    *i + 1* of a draft tree whose root is the pending token *t + 1*.

    *Root-conditioned* heads also see the embedding *e* of the pending token, which is known when they are asked, as
    the first of Hydra's heads does (Ankner et al. 2024, arXiv 2402.05109). One block before the heads, shared by all,
    puts it into their input: ``h + SiLU([h; e / rms(e)] W_rootᵀ + b_root)``. (The states are normed, too; embeddings
    can be far smaller, and without their norm the heads learn from them much more slowly.)

    A fresh head's residual weights are zero: it is the identity block, and predicts what the base model predicts.

    Args:
        num_heads: ``M``.
        num_layers: residual layers of a head, ``R ≥ 0``; each has its own weights.
        hidden_size: ``C``.
        vocab_size: ``V`` of the base model; None when it is not known (a shared ``lm_head``, no config).
        own_projection: each head owns ``w_out``; otherwise the base model's ``lm_head`` weight is given at each call.
        vocab_map: ``(V',) int64``, the full-vocabulary id of each row of a reduced projection.
        bias: the residual layers have one.
        root_conditioned: the heads see the pending token; ``forward``, ``hidden_states`` and ``topk`` need ``root``.
        dtype, device: of the parameters.

    Attributes:
        w_res: Parameter ``(M, R, C, C)``.
        b_res: Parameter ``(M, R, C)`` or None.
        w_out: Parameter ``(M, V', C)`` or None; ``V' = V`` without ``vocab_map``. ``(V', C)`` when the heads came
            from a file that stores one projection for all of them.
        w_root, b_root: Parameters ``(C, 2C)`` and ``(C,)`` of root-conditioned heads, else None.
        vocab_map: buffer or None.
        metadata: further entries of ``config.json``, kept by `save_pretrained` (``base_model_name_or_path``, …).
    """

    w_res: nn.Parameter
    b_res: nn.Parameter | None
    w_out: nn.Parameter | None
    w_root: nn.Parameter | None
    b_root: nn.Parameter | None
    vocab_map: Tensor | None

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        hidden_size: int,
        vocab_size: int | None,
        *,
        own_projection: bool = False,
        vocab_map: Tensor | None = None,
        bias: bool = True,
        root_conditioned: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.vocab_size = vocab_size
        self.metadata: dict[str, Any] = {}
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.w_res = nn.Parameter(torch.zeros(num_heads, num_layers, hidden_size, hidden_size, **options))
        b_res = nn.Parameter(torch.zeros(num_heads, num_layers, hidden_size, **options)) if bias else None
        self.register_parameter("b_res", b_res)
        w_root = nn.Parameter(torch.zeros(hidden_size, 2 * hidden_size, **options)) if root_conditioned else None
        b_root = nn.Parameter(torch.zeros(hidden_size, **options)) if root_conditioned else None
        self.register_parameter("w_root", w_root)
        self.register_parameter("b_root", b_root)
        if vocab_map is not None and values_readable(vocab_map):
            check_values("MedusaHeads", "vocab_map", vocab_map, 0, torch.iinfo(torch.int64).max)
        self.register_buffer("vocab_map", vocab_map if vocab_map is None else vocab_map.to(device))
        self.register_parameter("w_out", None)
        if own_projection:
            if self.num_rows is None:
                raise ValueError("MedusaHeads: own_projection needs vocab_size or vocab_map")
            w_out = torch.empty(num_heads, self.num_rows, hidden_size, **options)
            self.w_out = nn.Parameter(w_out.uniform_(-(hidden_size**-0.5), hidden_size**-0.5))

    @property
    def num_heads(self) -> int:
        """``M``."""
        return self.w_res.shape[0]

    @property
    def num_layers(self) -> int:
        """``R``, residual layers of a head."""
        return self.w_res.shape[1]

    @property
    def hidden_size(self) -> int:
        """``C``."""
        return self.w_res.shape[-1]

    @property
    def num_rows(self) -> int | None:
        """Rows of the projection: the length of ``vocab_map``, or the whole vocabulary."""
        return self.vocab_size if self.vocab_map is None else len(self.vocab_map)

    @property
    def root_conditioned(self) -> bool:
        """Whether the heads see the embedding of the pending token."""
        return self.w_root is not None

    def select_rows(self, lm_head_weight: Tensor) -> Tensor:
        """Return the rows of the base model's ``lm_head`` weight that a reduced vocabulary needs; do it once.

        The weight itself without ``vocab_map``.
        """
        return lm_head_weight if self.vocab_map is None else lm_head_weight[self.vocab_map]

    def hidden_states(self, hidden: Tensor, root: Tensor | None = None) -> Tensor:
        """Run the residual blocks: ``(…, C) → (…, M, C)``. Differentiable. ``root`` as in `forward`."""
        flat = self._blocks(hidden, root).transpose(0, 1)
        return flat.reshape(*hidden.shape[:-1], *flat.shape[1:])

    def forward(self, hidden: Tensor, lm_head_weight: Tensor | None = None, root: Tensor | None = None) -> Tensor:
        """Return the logits of all heads: ``(…, C) → (…, M, V')``. Differentiable.

        Args:
            hidden: the base model's final, normed hidden states.
            lm_head_weight: ``(V', C)``, for heads without their own projection; see `select_rows`.
            root: ``(…, C)``, the base model's input embeddings of the pending tokens, for root-conditioned heads.

        Raises:
            ValueError: ``lm_head_weight`` or ``root`` is missing, not wanted, or of another shape.
        """
        flat = self._blocks(hidden, root)
        logits = project(flat, self._projection(lm_head_weight))
        return logits.reshape(*hidden.shape[:-1], *logits.shape[1:])

    @torch.no_grad()
    def topk(
        self, hidden: Tensor, k: int, lm_head_weight: Tensor | None = None, root: Tensor | None = None, *,
        num_heads: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the k best tokens of each head, for inference, by `specdec_kernels.medusa_project_topk`.

        Args:
            hidden: ``(B, C)``.
            k: candidates of each head.
            lm_head_weight, root: as in `forward`.
            num_heads: only the first so many heads, 1…M; None for all. A tree of that depth asks for no more.

        Returns:
            ``values (B, M, K) fp32`` logits in descending order, ``ids (B, M, K) int64`` of the full vocabulary,
            ``lse (B, M) fp32``.

        Raises:
            ValueError: ``num_heads`` is out of range, or as `forward` and `specdec_kernels.medusa_project_topk`.
        """
        count = self.num_heads if num_heads is None else num_heads
        check_range("MedusaHeads.topk", "num_heads", count, 1, self.num_heads)
        w_res: Tensor = self.w_res
        b_res: Tensor | None = self.b_res
        w_out = self._projection(lm_head_weight)
        if count < self.num_heads:
            w_res, b_res = w_res[:count], None if b_res is None else b_res[:count]
            w_out = w_out[:count] if w_out.dim() == 3 else w_out
        root = self._checked_root(hidden, root)
        block: dict[str, Any] = {"root": root, "w_root": self.w_root, "b_root": self.b_root}
        return medusa_project_topk(hidden, w_res, b_res, w_out, k, vocab_map=self.vocab_map, **block)

    def _blocks(self, hidden: Tensor, root: Tensor | None) -> Tensor:
        """``(…, C) → (M, n, C)``."""
        root = self._checked_root(hidden, root)
        x = hidden if root is None or self.w_root is None else root_block(hidden, root, self.w_root, self.b_root)
        return residual_blocks(x.reshape(-1, x.shape[-1]), self.w_res, self.b_res)

    def _checked_root(self, hidden: Tensor, root: Tensor | None) -> Tensor | None:
        """Return the root, of root-conditioned heads alone."""
        if self.w_root is None:
            if root is not None:
                raise ValueError("MedusaHeads: these heads are not root-conditioned: root must not be given")
            return None
        if root is None:
            raise ValueError("MedusaHeads: these heads are root-conditioned: root must be given")
        if root.shape != hidden.shape:
            raise ValueError(f"MedusaHeads: root must have shape {tuple(hidden.shape)}, got {tuple(root.shape)}")
        return root

    def _projection(self, lm_head_weight: Tensor | None) -> Tensor:
        if self.w_out is not None:
            if lm_head_weight is not None:
                raise ValueError("MedusaHeads: these heads have their own projection: lm_head_weight must not be given")
            return self.w_out
        if lm_head_weight is None:
            raise ValueError("MedusaHeads: these heads have no projection of their own: lm_head_weight must be given")
        if self.num_rows not in (None, lm_head_weight.shape[0]):
            raise ValueError(
                f"MedusaHeads: lm_head_weight must have {self.num_rows} rows, got {lm_head_weight.shape[0]} "
                "(with a vocab_map: pass select_rows(lm_head_weight))"
            )
        return lm_head_weight

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> "MedusaHeads":
        """Load heads from a folder or a file, in any of the public formats.

        Args:
            path: a folder with ``medusa_lm_head.safetensors``, ``model.safetensors`` or ``medusa_lm_head.pt``, or
                such a file. A ``config.json`` beside it is read for the vocabulary size; the number of heads and of
                layers always comes from the weights.
            dtype: convert to it; default: as stored.
            device: put it there; default: CPU.

        Raises:
            FileNotFoundError: no such file.
            ValueError: keys are missing or unexpected (all are listed), or shapes disagree.
        """
        state = read_checkpoint(Path(path))
        num_heads, num_layers, hidden_size = state.w_res.shape[:3]
        heads = cls(num_heads, num_layers, hidden_size, state.vocab_size, bias=state.b_res is not None, device="meta")
        heads.metadata = state.metadata
        for name in ("w_res", "b_res", "w_out", "w_root", "b_root"):
            value = getattr(state, name)
            if value is not None:
                setattr(heads, name, nn.Parameter(value.to(device=device, dtype=dtype)))
        heads.vocab_map = state.vocab_map if state.vocab_map is None else state.vocab_map.to(device)
        return heads

    def save_pretrained(
        self, folder: str | Path, *, format: str = "medusa", lm_head_weight: Tensor | None = None
    ) -> None:
        """Write the weights as safetensors and a ``config.json``.

        Args:
            folder: made when missing.
            format: ``"medusa"``, keys as in the original heads (``{head}.{layer}.linear.weight``), in
                ``medusa_lm_head.safetensors``, to which root-conditioned heads add ``root.linear.weight|bias``; or
                ``"vllm"``, keys and config as vLLM reads them, in ``model.safetensors``.
            lm_head_weight: ``(V, C)`` of the base model; vLLM's format stores it with heads that share it.

        Raises:
            ValueError: an unknown format, ``lm_head_weight`` is missing where it is needed, or root-conditioned heads
                in vLLM's format, which has no place for them.
        """
        write_checkpoint(self, Path(folder), format, lm_head_weight)
