"""Draft with Medusa heads over a fixed tree."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modules import MedusaHeads
from ...tree import DraftTree, load_metadata
from ...tree.mask import num_words
from ...tree.presets import preset
from ...types import Verification
from ..drafting import DraftContext
from ..protocols import Draft, TargetOutput

TREE_FILE = "tree.json"
DEFAULT_TREE = "mc_sim_7b_63"


class MedusaDrafter:
    """Fill a fixed draft tree with the best candidates of Medusa heads (Cai et al. 2024, arXiv 2401.10774).

    All heads look at the hidden state from which the target chose the pending token; root-conditioned heads also look
    at that token. The node at depth *d* with rank
    *r* holds the *r*-th best token of head *d − 1*, whatever its parent holds: the drafts are deterministic, so the
    draft distribution is a point and `Draft.logits` is None.

    Args:
        heads: used in inference only; on the device and in the dtype of the target's hidden states.
        tree: not deeper than there are heads.
        lm_head_weight: ``(V, C)``, the target's projection, for heads without their own.
        embedding_weight: ``(V, C)``, the target's input embeddings, for root-conditioned heads.

    Raises:
        ValueError: the tree is too deep, a rank is beyond the vocabulary, or one of the weights is missing, not
            wanted, or of another hidden size.

    Example:
        >>> heads = MedusaHeads(num_heads=2, num_layers=1, hidden_size=8, vocab_size=32)
        >>> drafter = MedusaDrafter(heads, DraftTree.from_choices([[0], [1], [0, 0]]), torch.randn(32, 8))
        >>> drafter.max_nodes
        4
    """

    def __init__(
        self,
        heads: MedusaHeads,
        tree: DraftTree,
        lm_head_weight: Tensor | None = None,
        embedding_weight: Tensor | None = None,
    ):
        _check_projection(heads, lm_head_weight)
        _check_embedding(heads, embedding_weight)
        self._embedding = None if embedding_weight is None else embedding_weight.detach()
        self._shared_weight = None if lm_head_weight is None else heads.select_rows(lm_head_weight.detach())
        tree.check_heads(heads.num_heads, heads.num_rows if self._shared_weight is None else len(self._shared_weight))
        self.heads, self.tree = heads, tree
        self.tree_metadata: dict[str, Any] = {}
        self._top_k = max(tree.ranks) + 1
        device = heads.w_res.device
        columns = [
            (depth - 1) * self._top_k + rank for depth, rank in zip(tree.depths[1:], tree.ranks[1:], strict=True)
        ]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device)
        self._parents = tree.to_parents_tensor(device)[None]
        self._tree_mask = tree.to_packed_mask(device)[None]
        self._depths = tree.to_depths_tensor(device)[None]
        self._hidden: Tensor | None = None
        self._context: DraftContext | None = None

    @property
    def max_nodes(self) -> int:
        """``T``: every draft has all nodes of the tree."""
        return self.tree.num_nodes

    def bind(self, context: DraftContext) -> None:
        """Take the run, which may limit the nodes."""
        self._context = context

    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        """Start a batch from the hidden states of the last prompt tokens."""
        self._hidden = output.hidden[:, -1]

    @torch.no_grad()
    def propose(self, pending: Tensor) -> Draft:
        """Return the tree below the pending tokens ``(B,) int64``; its first nodes, when the run limits them.

        Raises:
            RuntimeError: `begin` was not called.
        """
        if self._hidden is None:
            raise RuntimeError("MedusaDrafter.propose: call begin first")
        ids = pending[:, None]
        count = self.max_nodes if self._context is None else min(self.max_nodes, self._context.max_nodes)
        max_depth = max(self.tree.depths[:count])
        if count > 1:
            root = None if self._embedding is None else F.embedding(pending, self._embedding)
            _, candidates, _ = self.heads.topk(
                self._hidden, self._top_k, self._shared_weight, root, num_heads=max_depth
            )
            ids = torch.cat([ids, candidates.flatten(1).index_select(1, self._columns[: count - 1])], dim=1)
        mask = self._tree_mask[:, :count, : num_words(count)].contiguous()
        return Draft(ids, self._parents[:, :count], mask, self._depths[:, :count], max_depth)

    def observe(self, draft: Draft, output: TargetOutput, verification: Verification, active: Tensor) -> None:
        """Keep the hidden state of each row's last accepted node; ended rows need none, so ``active`` is not read."""
        path = F.pad(verification.accepted, (1, 0))  # the root, node 0, comes first
        last = path.gather(1, verification.num_accepted[:, None].long()).long()
        self._hidden = output.hidden.gather(1, last[:, :, None].expand(-1, 1, output.hidden.shape[2]))[:, 0]

    @classmethod
    def from_pretrained(cls, path: str | Path, model: Any, *, tree: DraftTree | None = None) -> "MedusaDrafter":
        """Load heads of any public format, and the tree that lies beside them.

        Args:
            path: a folder or a file, as `MedusaHeads.from_pretrained` takes it.
            model: the target, anything whose ``get_output_embeddings().weight`` is the ``(V, C)`` vocabulary
                projection, and for root-conditioned heads ``get_input_embeddings().weight`` the ``(V, C)`` embeddings.
                The heads get the projection's device and dtype.
            tree: overrides ``tree.json``. With neither, the nodes of ``mc_sim_7b_63`` that the heads can fill.

        Raises:
            FileNotFoundError, ValueError: as `MedusaHeads.from_pretrained`, `DraftTree.load` and the constructor; also
                when the heads are made for another hidden size or vocabulary than the model's.
        """
        weight = model.get_output_embeddings().weight
        heads = MedusaHeads.from_pretrained(path, dtype=weight.dtype, device=weight.device).requires_grad_(False)
        _check_fits(heads, weight)
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        metadata: dict[str, Any] = {}
        if tree is None and (folder / TREE_FILE).exists():
            tree, metadata = DraftTree.load(folder / TREE_FILE), load_metadata(folder / TREE_FILE)
        if tree is None:
            choices = preset(DEFAULT_TREE).to_choices()
            tree = DraftTree.from_choices([choice for choice in choices if len(choice) <= heads.num_heads])
        embedding = model.get_input_embeddings().weight if heads.root_conditioned else None
        drafter = cls(heads, tree, weight if heads.w_out is None else None, embedding)
        drafter.tree_metadata = metadata
        return drafter

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the heads (`MedusaHeads.save_pretrained`) and ``tree.json`` into a folder."""
        self.heads.save_pretrained(folder)
        self.tree.save(Path(folder) / TREE_FILE, **self.tree_metadata)


def _check_projection(heads: MedusaHeads, lm_head_weight: Tensor | None) -> None:
    if (heads.w_out is None) == (lm_head_weight is None):
        verb, has = ("must", "no projection") if heads.w_out is None else ("must not", "a projection")
        raise ValueError(f"MedusaDrafter: lm_head_weight {verb} be given: these heads have {has} of their own")
    if lm_head_weight is not None:
        _check_fits(heads, lm_head_weight)


def _check_embedding(heads: MedusaHeads, embedding_weight: Tensor | None) -> None:
    if heads.root_conditioned != (embedding_weight is not None):
        verb, are = ("must", "are") if heads.root_conditioned else ("must not", "are not")
        raise ValueError(f"MedusaDrafter: embedding_weight {verb} be given: these heads {are} root-conditioned")
    if embedding_weight is not None and embedding_weight.shape[1] != heads.hidden_size:
        raise ValueError(
            f"MedusaDrafter: the heads are made for embeddings of size {heads.hidden_size}, "
            f"got {embedding_weight.shape[1]}"
        )


def _check_fits(heads: MedusaHeads, lm_head_weight: Tensor) -> None:
    """Raise ValueError unless the heads were made for a model with such a projection."""
    expected = (heads.vocab_size or lm_head_weight.shape[0], heads.hidden_size)
    if tuple(lm_head_weight.shape) != expected:
        raise ValueError(
            f"MedusaDrafter: the heads are made for an lm_head weight of shape {expected}, "
            f"got {tuple(lm_head_weight.shape)}"
        )
