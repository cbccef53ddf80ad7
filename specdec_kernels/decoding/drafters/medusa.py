"""Draft with Medusa heads over a fixed tree, or one that is chosen anew at each step."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._validate import values_readable
from ...modules import MedusaHeads
from ...tree import DraftTree, load_metadata, mask_from_parents
from ...tree.mask import num_words
from ...tree.presets import preset
from ...types import Verification
from ..drafting import DraftContext, first_nodes
from ..dynamic_tree import HOST_PATHS, DynamicTree, as_fp32, grow_best_first, likeliest_paths, num_grown
from ..host_trees import HostTree, draft_of
from ..protocols import Draft, TargetOutput
from ..walk import at_last_node

TREE_FILE = "tree.json"
DEFAULT_TREE = "mc_sim_7b_63"


class MedusaDrafter:
    """Fill a draft tree with the best candidates of Medusa heads (Cai et al. 2024, arXiv 2401.10774).

    All heads look at the hidden state from which the target chose the pending token; root-conditioned heads also look
    at that token. The node at depth *d* with rank *r* holds the *r*-th best token of head *d − 1*, whatever its parent
    holds: the drafts are deterministic, so the draft distribution is a point and `Draft.logits` is None.

    A `DraftTree` has the same nodes in each step and row. Of a `DynamicTree` each row takes the nodes that the heads
    think likeliest in this step: a deep chain where they are sure, many first tokens where they are not, few nodes
    where they expect little (`DynamicTree.min_prob`). The shape depends on the heads alone, not on what the target will
    say, so verification is as exact.

    Args:
        heads: used in inference only; on the device and in the dtype of the target's hidden states.
        tree: a `DraftTree` not deeper than there are heads, or a `DynamicTree`.
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
        tree: DraftTree | DynamicTree,
        lm_head_weight: Tensor | None = None,
        embedding_weight: Tensor | None = None,
    ):
        _check_projection(heads, lm_head_weight)
        _check_embedding(heads, embedding_weight)
        self._embedding = None if embedding_weight is None else embedding_weight.detach()
        self._shared_weight = None if lm_head_weight is None else heads.select_rows(lm_head_weight.detach())
        self.heads, self.tree = heads, tree
        self.tree_metadata: dict[str, Any] = {}
        # Where calibrations lie, too.
        self.folder: Path | None = None
        num_rows = heads.num_rows if self._shared_weight is None else len(self._shared_weight)
        self._layout = _Layout(tree, heads.num_heads, num_rows, heads.w_res.device)
        self._hidden: Tensor | None = None
        self._context: DraftContext | None = None

    @property
    def max_nodes(self) -> int:
        """``T``: the most nodes; every draft has all those of a `DraftTree`."""
        return self._layout.num_nodes

    def bind(self, context: DraftContext) -> None:
        """Take the run, which may limit the nodes."""
        self._context = context

    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        """Start a batch from the hidden states of the last prompt tokens."""
        self._hidden = output.hidden[:, -1]

    def propose(self, pending: Tensor) -> Draft:
        """Return the tree below the pending tokens ``(B,) int64``; its first nodes, when the run limits them.

        Raises:
            RuntimeError: `begin` was not called.
        """
        # The tensors of a fixed shape are there already.
        if self._layout.is_dynamic and self.drafts_on_host(pending):
            return draft_of(self.trees(pending), pending.device)
        layout, ids = self._limited_layout(), pending[:, None]
        if layout.max_depth == 0:
            return Draft(ids, layout.parents, layout.mask, layout.depths, 0)
        values, candidates, lse = self._candidates(pending, layout)
        layout = layout.grown(values - lse[..., None])
        drafts = candidates.flatten(1).gather(1, layout.columns.expand(len(pending), -1))
        tables = layout.parents, layout.mask, layout.depths
        draft = Draft(torch.cat([ids, drafts], dim=1), *tables, layout.max_depth, num_nodes=layout.used)
        if layout.used is None or not values_readable(layout.used):
            return draft
        return first_nodes(draft, int(layout.used.max()))

    def drafts_on_host(self, pending: Tensor) -> bool:
        """Say whether the candidates are so few, and so near, that lists are faster."""
        layout = self._layout
        return 0 < len(pending) * layout.num_nodes * layout.top_k <= HOST_PATHS and values_readable(pending)

    def trees(self, pending: Tensor) -> list[HostTree]:
        """Do what `propose` does, in lists."""
        layout, roots = self._limited_layout(), pending.tolist()
        if layout.max_depth == 0:
            return [HostTree([root], [-1]) for root in roots]
        rows = zip(roots, *(part.tolist() for part in self._candidates(pending, layout)), strict=True)
        return [layout.tree(*row) for row in rows]

    def _limited_layout(self) -> "_Layout":
        if self._hidden is None:
            raise RuntimeError("MedusaDrafter.propose: call begin first")
        return self._layout.limited(self.max_nodes if self._context is None else self._context.max_nodes)

    def _candidates(self, pending: Tensor, layout: "_Layout") -> tuple[Tensor, Tensor, Tensor]:
        """Ask the heads; returns what `MedusaHeads.topk` does."""
        assert self._hidden is not None
        root = self._embedding
        if root is not None and len(pending) == 1 and values_readable(pending):
            (token,) = pending.tolist()
            root = root[token : token + 1]
        elif root is not None:
            root = root.index_select(0, pending)
        return self.heads.topk(self._hidden, layout.top_k, self._shared_weight, root, num_heads=layout.max_depth)

    def observe(self, draft: Draft, output: TargetOutput, verification: Verification, active: Tensor) -> None:
        """Keep the hidden state of each row's last accepted node; ended rows need none, so ``active`` is not read."""
        self._hidden = at_last_node(output.hidden, verification)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, model: Any, *, tree: DraftTree | DynamicTree | None = None
    ) -> "MedusaDrafter":
        """Load heads of any public format, and the tree that lies beside them.

        Args:
            path: a folder or a file, as `MedusaHeads.from_pretrained` takes it.
            model: the target, anything whose ``get_output_embeddings().weight`` is the ``(V, C)`` vocabulary
                projection, and for root-conditioned heads ``get_input_embeddings().weight`` the ``(V, C)`` embeddings.
                The heads get the projection's device and dtype.
            tree: overrides ``tree.json``, which holds a tree of either kind. With neither, the nodes of
                ``mc_sim_7b_63`` that the heads can fill.

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
            tree, metadata = _load_tree(folder / TREE_FILE)
        if tree is None:
            choices = preset(DEFAULT_TREE).to_choices()
            tree = DraftTree.from_choices([choice for choice in choices if len(choice) <= heads.num_heads])
        embedding = model.get_input_embeddings().weight if heads.root_conditioned else None
        drafter = cls(heads, tree, weight if heads.w_out is None else None, embedding)
        drafter.tree_metadata, drafter.folder = metadata, folder
        return drafter

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the heads (`MedusaHeads.save_pretrained`) and ``tree.json`` into a folder."""
        self.heads.save_pretrained(folder)
        self.tree.save(Path(folder) / TREE_FILE, **self.tree_metadata)


class _Layout:
    """Where candidates go, and the tensors that say so; of a `DynamicTree` they come with each step's `grown`."""

    def __init__(self, tree: DraftTree | DynamicTree, num_heads: int, num_rows: int | None, device: torch.device):
        self.is_dynamic = isinstance(tree, DynamicTree)
        self.min_prob = 0.0
        self.used: Tensor | None = None
        if isinstance(tree, DynamicTree):
            self._grows(tree, num_heads, num_rows)
            tree = DraftTree.chain(0)
        else:
            tree.check_heads(num_heads, num_rows)
            self.top_k, self.max_depth, self.num_nodes = max(tree.ranks) + 1, tree.max_depth, tree.num_nodes
        self._depths_of_nodes = tree.depths
        places = [(depth - 1) * self.top_k + rank for depth, rank in zip(tree.depths, tree.ranks, strict=True)]
        self._places, self._parents = places[1:], list(tree.parents)
        self.columns = torch.tensor(self._places, dtype=torch.int64, device=device)[None]
        self.parents = tree.to_parents_tensor(device)[None]
        self.mask = tree.to_packed_mask(device)[None]
        self.depths = tree.to_depths_tensor(device)[None]

    def _grows(self, tree: DynamicTree, num_heads: int, num_rows: int | None) -> None:
        # No path among T − 1 ends in a rank beyond T − 2: its siblings before it are as likely.
        self.top_k = max(1, min(tree.top_k, tree.num_nodes - 1, num_rows or tree.top_k))
        self.max_depth = min(num_heads, tree.num_nodes - 1)
        self.num_nodes = num_grown(tree.num_nodes, self.max_depth, self.top_k)
        self.min_prob = tree.min_prob

    def limited(self, limit: int) -> "_Layout":
        """Return the layout of at most so many nodes: the first ones, or a smaller budget."""
        if limit >= self.num_nodes:
            return self
        layout = copy.copy(self)
        layout.num_nodes = limit
        if self.is_dynamic:
            layout.max_depth = min(self.max_depth, limit - 1)
            return layout
        layout.columns, layout.parents, layout.depths = (
            self.columns[:, : limit - 1], self.parents[:, :limit], self.depths[:, :limit]
        )  # fmt: skip
        layout.mask = self.mask[:, :limit, : num_words(limit)].contiguous()
        layout.max_depth = max(self._depths_of_nodes[:limit])
        return layout

    def grown(self, log_probs: Tensor) -> "_Layout":
        """Return the layout for candidates of these log-probabilities ``(B, M, K)``; this one when it is fixed."""
        if not self.is_dynamic:
            return self
        layout = copy.copy(self)
        trees = grow_best_first(log_probs, self.num_nodes, self.min_prob)
        layout.columns, layout.parents, layout.depths, layout.used = trees
        layout.mask = mask_from_parents(layout.parents)
        return layout

    def tree(self, root: int, values: list[list[float]], candidates: list[list[int]], lse: list[float]) -> HostTree:
        """Return the tree of a row's candidates, of which `MedusaHeads.topk` gives ``[depth][rank]``."""
        if not self.is_dynamic:
            places, parents = self._places[: self.num_nodes - 1], self._parents[: self.num_nodes]
            return HostTree([root, *(candidates[place // self.top_k][place % self.top_k] for place in places)], parents)
        log_probs = [
            [0.0 if log_prob > 0 else log_prob for log_prob in as_fp32([value - total for value in row])]
            for row, total in zip(values, lse, strict=True)
        ]
        paths = likeliest_paths(log_probs, num_grown(self.num_nodes, self.max_depth, self.top_k) - 1, self.min_prob)
        ids = [candidates[depth - 1][rank] for depth, _, rank in paths]
        return HostTree([root, *ids], [-1, *(parent for _, parent, _ in paths)])


def _load_tree(path: Path) -> tuple[DraftTree | DynamicTree, dict[str, Any]]:
    """Return the tree of either kind, and what the file says besides."""
    metadata = load_metadata(path)
    dynamic = DynamicTree.from_metadata(metadata)
    if dynamic is None:
        return DraftTree.load(path), metadata
    return dynamic, {name: value for name, value in metadata.items() if name != "dynamic"}


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
