"""Draft with the target's first layers and an adapter; the verification goes on from where they stopped (Kangaroo)."""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._validate import check_range
from ...modules.kangaroo import KangarooAdapter, rope_of
from ...ops.linear import linear
from ...ops.tree_attention import tree_attention
from ...tree import DraftTree
from ...tree.mask import mask_behind, num_words
from ...types import Verification
from ..drafting import ChainLayout, DraftContext, DrawnChain
from ..exits import ExitRule
from ..protocols import Draft, LayeredTarget, LayerPlan, TargetOutput
from .medusa import TREE_FILE

# The paper's: at most six drafts, none behind one that was less probable than 0.6.
MAX_DRAFTS = 6
EXIT_RULE = ExitRule(threshold=0.6, target_rate=None)


class KangarooDrafter:
    """Draft from an early layer of the target (Liu et al. 2024, arXiv 2404.18911).

    ::

        draft         node → layers 0 … E−1 → adapter → lm_head → next node
        verification  all nodes, from what layer E−1 gave → layers E … L−1 → lm_head

    The first E layers run once for each node, while drafting: their hidden states go into `Draft.hidden` and their K/V
    lies in the target's cache, where the adapter's own K/V has rows that are moved with it. Double early exit: a fixed
    layer, and each row stops behind a token that was improbable.

    A chain draws its tokens (with sampling, from the adapter's distribution). A tree takes the best candidates of every
    node, which are chosen, not drawn.

    Args:
        adapter: in the dtype and on the device of the target's hidden states.
        lm_head_weight: ``(V, C)`` of the target.
        max_drafts: the longest chain; with a tree its depth counts.
        tree: drafts this tree instead of a chain.
        exit_rule: when a row stops; in a tree, behind a level whose best token was less probable.

    Raises:
        ValueError: ``max_drafts`` is below 1, a rank is beyond the drafted vocabulary, ``lm_head_weight`` has another
            hidden size or vocabulary than the adapter has.
    """

    def __init__(
        self,
        adapter: KangarooAdapter,
        lm_head_weight: Tensor,
        *,
        max_drafts: int = MAX_DRAFTS,
        tree: DraftTree | None = None,
        exit_rule: ExitRule = EXIT_RULE,
    ):
        check_range("KangarooDrafter", "max_drafts", max_drafts, 1, 1023)
        _check_fits(adapter, lm_head_weight)
        self.adapter, self.exit_rule, self.max_drafts = adapter, exit_rule, max_drafts
        self._weight = adapter.select_rows(lm_head_weight.detach())
        self._vocab_size = lm_head_weight.shape[0]
        self._shallow = LayerPlan(stop=adapter.exit_layer)
        self._levels = None if tree is None else _Levels(tree, len(self._weight), lm_head_weight.device)
        self._context: DraftContext | None = None
        self.folder: Path | None = None  # where calibrations lie, too

    @property
    def tree(self) -> DraftTree | None:
        """The tree, its nodes sorted by depth; None for chains."""
        return None if self._levels is None else self._levels.tree

    @property
    def max_nodes(self) -> int:
        """The nodes of the tree, or of the longest chain, root included."""
        return self.max_drafts + 1 if self._levels is None else self._levels.tree.num_nodes

    def bind(self, context: DraftContext) -> None:
        """Take the run whose target drafts, and let its prefill say what the exit layer gave."""
        if not hasattr(context.target, "run_layers"):
            raise TypeError(
                f"KangarooDrafter: the target must be able to run in part (LayeredTarget), got "
                f"{type(context.target).__name__}"
            )
        self._context, self._target = context, cast(LayeredTarget, context.target)
        self._target.tap(self.adapter.exit_layer)

    @torch.no_grad()
    def begin(self, prompt_ids: Tensor, prompt_len: Tensor, output: TargetOutput) -> None:
        """Start a batch: fill the adapter's K/V for the prompts."""
        device = prompt_ids.device
        self.exits = self.exit_rule.begin(len(prompt_ids), device)
        self._layout = ChainLayout(self.max_nodes, device)
        self._keys, self._values = self._target.reserve(self.adapter.num_kv_heads, self.adapter.head_dim)
        if output.tapped is None:
            raise RuntimeError("KangarooDrafter.begin: the prefill did not say what the exit layer gave")
        positions = torch.arange(output.tapped.shape[1], device=device)[None]
        self.adapter.cache_nodes(output.tapped, positions, self._keys, self._values, torch.zeros_like(prompt_len))

    @torch.no_grad()
    def propose(self, pending: Tensor) -> Draft:
        """Return the chains or trees below the pending tokens ``(B,) int64``, as long as the longest row's.

        Waits for the device once for each level: whether to go on is the rows' decision.

        Raises:
            RuntimeError: there was no `bind` and `begin`.
        """
        if self._context is None:
            raise RuntimeError("KangarooDrafter.propose: it works only inside decode, which calls bind and begin")
        return self.exits.watch(self._chain(pending) if self._levels is None else self._tree(pending, self._levels))

    def run_nodes(self, ids: Tensor, tree_mask: Tensor, depths: Tensor, first_node: int) -> tuple[Tensor, Tensor]:
        """Run the shallow layers for nodes of this step, and cache the adapter's K/V for them.

        Whoever adds nodes to a draft must do this for them, and append the states to `Draft.hidden`.

        Args:
            ids: ``(B, n) int64`` of the nodes from ``first_node`` on.
            tree_mask: ``(B or 1, T, W) int64`` of all nodes up to these, ``T = first_node + n``.
            depths: ``(B or 1, n) int32`` of these nodes.
            first_node: nodes that were run before.

        Returns:
            What the exit layer gave, ``(B, n, C)``, and the adapter's queries ``(B, n, Hq, D)``.
        """
        hidden = self._target.run_layers(ids, tree_mask, depths, self._shallow, first_node=first_node).hidden
        prefix_len = self._target.prefix_len
        caches = self._keys, self._values
        queries = self.adapter.cache_nodes(hidden, prefix_len[:, None] + depths, *caches, prefix_len + first_node)
        return hidden, queries

    def observe(self, draft: Draft, output: TargetOutput, verification: Verification, active: Tensor) -> None:
        """Move the thresholds, if the rule does; the target has moved the adapter's rows with its own."""
        self.exits.settle(verification, active)

    def _chain(self, pending: Tensor) -> Draft:
        assert self._context is not None
        layout = self._layout
        chain = DrawnChain(self._context, layout, pending, self.max_nodes)
        states: list[Tensor] = []
        while True:
            last = chain.length - 1
            mask, depths = layout.mask(chain.length), layout.depths(chain.length)[:, last:]
            # The last node as well: the verification, and the adapter in the next step, need what it gives.
            hidden, queries = self.run_nodes(chain.last[:, None], mask, depths, last)
            states.append(hidden)
            if not chain.wants_more():
                break
            logits = self._logits(hidden, queries, mask, last)[:, 0]
            if self._context.is_greedy and not self._context.processes:
                chain.extend(logits, self.exits.threshold, token_map=self.adapter.vocab_map)
            else:
                chain.extend(self._over_all(logits), self.exits.threshold)
        return chain.draft()._replace(num_layers_run=self.adapter.exit_layer, hidden=torch.cat(states, dim=1))

    def _tree(self, pending: Tensor, levels: "_Levels") -> Draft:
        assert self._context is not None
        ids, states = pending[:, None], list[Tensor]()
        drafting, limit = self._context.active, self._context.max_nodes
        num_nodes = torch.ones_like(pending, dtype=torch.int32)
        for depth, (start, end) in enumerate(levels.spans):
            stop = min(end, limit)
            mask, depths = levels.mask(stop), levels.depths[:, start:stop]
            hidden, queries = self.run_nodes(ids[:, start:], mask, depths, start)
            states.append(hidden)
            if stop == limit or depth == levels.tree.max_depth or not bool(drafting.any()):
                break
            logits = self._logits(hidden, queries, mask, start)[:, levels.inner[depth] - start]
            logits = self._processed(logits, levels.inner[depth], levels, ids)
            found, candidates = logits.topk(levels.top_k, dim=-1)
            best = (found[..., 0] - logits.logsumexp(-1)).exp().amax(1)
            drafting = drafting & ~best.isnan()
            children = candidates.flatten(1)[:, levels.columns[depth][: limit - stop]]
            ids = torch.cat([ids, children if self.adapter.vocab_map is None else self.adapter.vocab_map[children]], 1)
            num_nodes = torch.where(drafting, ids.shape[1], num_nodes)
            drafting = drafting & (best >= self.exits.threshold)
        return levels.draft(ids)._replace(
            num_nodes=num_nodes, num_layers_run=self.adapter.exit_layer, hidden=torch.cat(states, dim=1)
        )

    def _logits(self, hidden: Tensor, queries: Tensor, mask: Tensor, first_node: int) -> Tensor:
        """Return ``(B, n, V')``, what the adapter predicts after the nodes from ``first_node`` on."""
        prefix_len, num_nodes = self._target.prefix_len, hidden.shape[1]
        behind = mask_behind(mask, first_node) if first_node else mask
        if behind is None:
            # The op attends from all nodes; what the earlier ones ask does not matter.
            queries = F.pad(queries, (0, 0, 0, 0, first_node, 0))
        else:
            mask, prefix_len = behind, prefix_len + first_node
        attended, _ = tree_attention(queries, self._keys, self._values, mask, prefix_len)
        return linear(self.adapter.states(hidden, attended[:, -num_nodes:]), [self._weight]).float()

    def _over_all(self, logits: Tensor) -> Tensor:
        """Return ``(…, V)``: minus infinity for tokens that are never drafted."""
        if self.adapter.vocab_map is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self._vocab_size), -torch.inf)
        full[..., self.adapter.vocab_map] = logits
        return full

    def _processed(self, logits: Tensor, nodes: Tensor, levels: "_Levels", ids: Tensor) -> Tensor:
        """Return ``(B, n, V')`` processed as the target's logits after these nodes will be."""
        context = self._context
        if context is None or not context.processes:
            return logits
        # One draft for all of them: who processes may keep what it worked out of it.
        draft = levels.draft(ids)
        parts = [
            context.process(self._over_all(logits[:, i]), torch.where(context.active, node, -1), lambda: draft)
            for i, node in enumerate(nodes)
        ]
        processed = torch.stack(parts, dim=1).float()
        return processed if self.adapter.vocab_map is None else processed[..., self.adapter.vocab_map]

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        model: Any,
        *,
        exit_layer: int | None = None,
        max_drafts: int = MAX_DRAFTS,
        tree: DraftTree | None = None,
        exit_rule: ExitRule = EXIT_RULE,
    ) -> "KangarooDrafter":
        """Load an adapter folder; the adapter gets the model's rotary positions, its device and its dtype.

        Args:
            path: as `KangarooAdapter.from_pretrained` takes it.
            model: the target, a causal LM of transformers.
            exit_layer: needed when the folder does not name it, as the public ones.
            max_drafts, exit_rule: as in the constructor.
            tree: as in the constructor; None for the ``tree.json`` in the folder, and for chains when there is none.

        Raises:
            FileNotFoundError, ValueError, NotImplementedError: as `KangarooAdapter.from_pretrained`, `rope_of` and the
                constructor.
        """
        weight = model.get_output_embeddings().weight
        adapter = KangarooAdapter.from_pretrained(
            path, rope_of(model), exit_layer=exit_layer, dtype=weight.dtype, device=weight.device
        ).requires_grad_(False)
        if tree is None and (Path(path) / TREE_FILE).exists():
            tree = DraftTree.load(Path(path) / TREE_FILE)
        drafter = cls(adapter, weight, max_drafts=max_drafts, tree=tree, exit_rule=exit_rule)
        drafter.folder = Path(path)
        return drafter

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adapter into a folder (`KangarooAdapter.save_pretrained`), and ``tree.json`` if there is a tree."""
        self.adapter.save_pretrained(folder)
        if self.tree is not None:
            self.tree.save(Path(folder) / TREE_FILE)


class _Levels:
    """A tree by its levels: which nodes have children, and which candidate of theirs each child is."""

    def __init__(self, tree: DraftTree, num_rows: int, device: torch.device):
        # Choices are sorted by length: nodes of one depth are neighbours, and parents come before their children.
        self.tree = tree = DraftTree.from_choices(tree.to_choices())
        self.top_k = max(tree.ranks) + 1
        if self.top_k > num_rows:
            raise ValueError(f"KangarooDrafter: the tree has rank {self.top_k - 1}, but {num_rows} tokens are drafted")
        self.spans, self.inner, self.columns = list[tuple[int, int]](), list[Tensor](), list[Tensor]()
        for depth in range(tree.max_depth + 1):
            nodes = [node for node in range(tree.num_nodes) if tree.depths[node] == depth]
            children = [node for node in range(tree.num_nodes) if tree.depths[node] == depth + 1]
            inner = sorted({tree.parents[node] for node in children})
            columns = [inner.index(tree.parents[node]) * self.top_k + tree.ranks[node] for node in children]
            self.spans.append((nodes[0], nodes[-1] + 1))
            self.inner.append(torch.tensor(inner, dtype=torch.int64, device=device))
            self.columns.append(torch.tensor(columns, dtype=torch.int64, device=device))
        self.parents = tree.to_parents_tensor(device)[None]
        self.depths = tree.to_depths_tensor(device)[None]
        self._mask = tree.to_packed_mask(device)[None]

    def mask(self, num_nodes: int) -> Tensor:
        """``(1, T, W) int64`` of the first ``num_nodes`` nodes."""
        return self._mask[:, :num_nodes, : num_words(num_nodes)].contiguous()

    def draft(self, ids: Tensor) -> Draft:
        """Return the draft of the first nodes, whole levels, from their ``ids (B, T)``."""
        count = ids.shape[1]
        return Draft(
            ids, self.parents[:, :count], self.mask(count), self.depths[:, :count], self.tree.depths[count - 1]
        )


def _check_fits(adapter: KangarooAdapter, weight: Tensor) -> None:
    expected = (adapter.vocab_size or weight.shape[0], adapter.hidden_size)
    if tuple(weight.shape) != expected:
        raise ValueError(
            f"KangarooDrafter: the adapter is made for an lm_head weight of shape {expected}, got {tuple(weight.shape)}"
        )
