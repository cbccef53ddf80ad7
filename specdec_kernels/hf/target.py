"""A Hugging Face causal language model as the `Target` of a decode step."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..decoding.drafting import ChainLayout
from ..decoding.protocols import LayerPlan, TargetOutput
from ..tree.mask import WORD_BITS, mask_behind, num_words
from . import _compat
from ._chunks import PREFILL_CHUNK, check_prompts, prompt_chunks
from .attention import IMPLEMENTATION, TreeState
from .cache import TreeCache
from .families import check_supported
from .graphs import StepGraphs, attached_graphs
from .layers import LayerRunner
from .prepare import has_independent_rows

# On the CPU a linear layer gives a row the same bits whatever the number of rows, from two rows up; one row alone takes
# another path (a matrix-vector product), whose sums have another order.
_PAIRED_DTYPES = (torch.bfloat16, torch.float16)


class HFTarget:
    """Run a causal LM over draft trees, with a `TreeCache` in which every row has its own length.

    The weights, the logits (soft caps, scales) and the positions are the model's own; only its attention is replaced,
    during a forward and on this model alone. Positions count from each row's first token, as ``generate`` has them for
    left-padded prompts.

    On the CPU in 16 bits no linear layer ever sees a single row: a lone node gets a twin, which nobody asks, and a lone
    hidden state goes to the vocabulary projection twice. With `tree_attention`, whose rows do not depend on each other,
    this makes the bits of a node's logits depend on its path alone, not on the tree, the batch or the chunks of the
    prompt, so that greedy texts are those of plain decoding. Not for models with experts: an expert sees the rows that
    are routed to it, which may be one.

    Not thread-safe: while a forward runs, the model's attention implementation is ours, and a call of the same model
    from another thread raises.

    Args:
        model: a causal LM of a supported family (see `families.FAMILIES`), in eval mode.
        batch_size: ``B``.
        capacity: rows of the cache for each sequence: the prompt, all new tokens, and the nodes of the last draft.
        dtype: of the cache; that of the keys when None.
        graphs: records the steps of this model; gives the cache, too. When None, those of a prepared model on a GPU,
            unless another target has them.

    Raises:
        NotImplementedError: the model is not supported; says why.
        TypeError: not a transformers model.
        ValueError: a size below 1.

    Example:
        >>> target = HFTarget(model, batch_size=1, capacity=64)
        >>> output = target.prefill(torch.tensor([[1, 5, 9]]), torch.tensor([3], dtype=torch.int32))
        >>> output.logits.shape[:2], target.prefix_len.tolist()
        (torch.Size([1, 1]), [3])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype | None = None,
        graphs: StepGraphs | None = None,
    ):
        check_supported(model, capacity)
        self.model = model
        self.capacity = capacity
        self._pairs = model.device.type == "cpu" and model.dtype in _PAIRED_DTYPES and not has_independent_rows(model)
        # A twin needs a row of the cache, too.
        rows = capacity + int(self._pairs)
        if graphs is None and dtype is None:
            graphs = attached_graphs(model, self)
        self._graphs = graphs

        def make_cache(rows: int) -> TreeCache:
            return TreeCache(model.config.num_hidden_layers, batch_size, rows, device=model.device, dtype=dtype)

        self.cache = make_cache(rows) if graphs is None else graphs.cache(make_cache, batch_size, rows)
        self._cache_argument = _compat.cache_argument(model)
        self._configs = _compat.attention_configs(model)
        self._projection = model.get_output_embeddings()
        self._runner = LayerRunner(model)
        self._tapped_layer: int | None = None
        self._rows: Tensor | None = None
        self._chain = ChainLayout(PREFILL_CHUNK, model.device)

    @property
    def prefix_len(self) -> Tensor:
        """``(B,) int32``: committed cache rows."""
        return self.cache.prefix_len

    @property
    def num_layers(self) -> int:
        """``L``."""
        return self._runner.num_layers

    def tap(self, layer: int) -> None:
        """Let `prefill` return, from now on, what the first ``layer`` layers gave for every token of the prompts.

        Raises:
            ValueError: ``layer`` is not in [1, L − 1].
        """
        self._runner.check(LayerPlan(stop=layer))
        self._tapped_layer = layer

    def run_only(self, rows: Sequence[int]) -> None:
        """Run, until the next `prefill`, these rows of the batch alone: what is returned for the others means nothing.

        A row keeps its place in the cache and its results; the others take no time any more.

        Args:
            rows: increasing, at least one.
        """
        everything = len(rows) == self.cache.batch_size
        self._rows = None if everything else torch.tensor(rows, dtype=torch.int64, device=self.model.device)
        self.cache.select(self._rows)

    def reserve(self, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return K and V rows of the caller's own, ``(B, S, Hk, D)`` each, that `commit` moves with the others.

        They are there until the next `prefill`.

        Raises:
            RuntimeError: nothing was cached yet.
        """
        return self.cache.reserve(num_heads, head_dim)

    def prefill(self, ids: Tensor, lengths: Tensor) -> TargetOutput:
        """Forget what was cached, feed the prompts in chunks, and commit them.

        Args:
            ids: ``(B, L) int64``, right-padded with anything.
            lengths: ``(B,) int32``, 1 … L. On the CPU the values are checked; elsewhere that would wait for the device.

        Returns:
            Logits ``(B, 1, V)`` and hidden states ``(B, 1, C)`` of each row's last prompt token. Other positions are
            never projected to the vocabulary. After `tap`, ``tapped (B, L, C)`` of all.

        Raises:
            ValueError: a wrong shape or length, or ``L`` is beyond the capacity.
        """
        longest = check_prompts(ids, lengths, self.cache.batch_size, self.capacity)
        last = lengths.to(torch.int64) - 1
        ids = torch.where(torch.arange(longest, device=ids.device) <= last[:, None], ids, 0)
        self.cache.reset()
        self._rows = None
        chain = self._chain
        kept: Tensor | None = None
        tapped: list[Tensor] = []
        for start, size, rows in prompt_chunks(lengths, longest):
            if len(rows) < len(ids):
                self.run_only(rows)
            here = (self._picked(last) - start).clamp(0, size - 1)

            def keep_last_tokens(
                hidden: Tensor, here: Tensor = here, start: int = start, end: int = start + size
            ) -> Tensor:
                nonlocal kept
                found = hidden.gather(1, here[:, None, None].expand(-1, 1, hidden.shape[2]))
                if kept is None:
                    kept = found
                elif self._rows is None:
                    kept = torch.where((last >= start)[:, None, None], found, kept)
                else:
                    kept = kept.index_copy(0, self._rows, found)
                return kept if end == longest else hidden[:, :0]

            with self._runner.tapped(self._tapped_layer, tapped):
                chunk = self._picked(ids[:, start : start + size])
                output = self._run(chunk, chain.mask(size), chain.depths(size), select=keep_last_tokens)
            tapped[-1:] = [self._in_place(states[:, :size]) for states in tapped[-1:]]
            self.cache.advance(size)
        self.cache.truncate(lengths)
        self.run_only(range(len(ids)))
        return output._replace(tapped=torch.cat(tapped, dim=1)) if tapped else output

    def refill(self, row: int, ids: Tensor) -> None:
        """Forget one row of the batch and commit other tokens there; the other rows keep what they have.

        So a batch goes on when one of its texts has ended. Rows chosen by `run_only` stay chosen.

        Args:
            row: 0 … B−1.
            ids: ``(n,) int64``, ``n ≥ 0``.

        Raises:
            ValueError: the tokens do not fit behind the longest row (the row is empty then).
        """
        is_row = torch.arange(self.cache.batch_size, device=ids.device) == row
        self.cache.truncate(torch.where(is_row, 0, self.cache.prefix_len))
        chosen, self._rows = self._rows, torch.tensor([row], device=ids.device)
        try:
            for start, size, _ in prompt_chunks(is_row.new_full((1,), len(ids), dtype=torch.int32), len(ids)):
                depths = self._chain.depths(size)
                self.cache.select(self._rows)
                self._run(ids[None, start : start + size], self._chain.mask(size), depths, select=_nothing)
                self.cache.commit(depths[:, 1:].expand(len(is_row), -1), is_row.int() * (size - 1), is_row)
        finally:
            self._rows = chosen
            self.cache.select(chosen)

    def forward(self, ids: Tensor, tree_mask: Tensor, depths: Tensor) -> TargetOutput:
        """Run the nodes of a draft tree behind the committed prefix; commits nothing.

        Args:
            ids: ``(B, T) int64``.
            tree_mask: ``(B or 1, T, W) int64``; bit *j* of row *i* is set iff *j* is *i* or an ancestor of *i*.
            depths: ``(B or 1, T) int32``, 0 for the root. Must belong to ``tree_mask``; not checked.

        Returns:
            Logits ``(B, T, V)`` and final hidden states ``(B, T, C)`` (what the vocabulary projection sees).

        Raises:
            ValueError: a wrong shape, or the nodes do not fit into the cache (nothing was written then).
            RuntimeError: the model is in training mode.
        """
        self._check_nodes("forward", ids, depths)
        if self._graphs is not None and self._rows is None and ids.shape[1] in self._graphs.sizes:
            return self._graphs.run_step(self._run, self.cache, ids, tree_mask, depths)
        return self._spread(self._run(self._picked(ids), self._picked(tree_mask), self._picked(depths)))

    def run_layers(
        self,
        ids: Tensor,
        tree_mask: Tensor,
        depths: Tensor,
        plan: LayerPlan,
        *,
        first_node: int = 0,
        hidden: Tensor | None = None,
    ) -> TargetOutput:
        """Run some of the layers for the nodes ``first_node`` … ``first_node + n − 1`` of a step; commits nothing.

        K/V of the layers that run goes to the rows of these nodes. Nodes before ``first_node`` are attended to through
        the cache: the same layers must have been run for them since the last commit. Not checked.

        Args:
            ids: ``(B, n) int64`` of these nodes.
            tree_mask: ``(B or 1, T, W) int64`` of all nodes up to these, ``T = first_node + n``.
            depths: ``(B or 1, n) int32`` of these nodes.
            plan: which layers.
            first_node: nodes of the step that come before.
            hidden: ``(B, n, C)``, what the layers before ``plan.start`` gave; None when that is 0.

        Returns:
            Logits ``(B, n, V)`` and final hidden states ``(B, n, C)``. With ``plan.stop``: no logits ``(B, 0, V)``, and
            what layer ``stop − 1`` gave.

        Raises:
            ValueError: a wrong shape, layers that there are not, ``hidden`` missing or not wanted, or the nodes do not
                fit into the cache (nothing was written then).
            RuntimeError: the model is in training mode.
        """
        self._check_nodes("run_layers", ids, depths)
        self._runner.check(plan)
        shape = None if hidden is None else tuple(hidden.shape[:2])
        if shape != (tuple(ids.shape) if plan.start else None):
            wanted = f"must have shape {(*ids.shape, 'C')}" if plan.start else "must be None"
            raise ValueError(f"HFTarget.run_layers: hidden {wanted} with start {plan.start}, got {shape}")
        if first_node < 0:
            raise ValueError(f"HFTarget.run_layers: first_node must be at least 0, got {first_node}")
        ids, tree_mask, depths = self._picked(ids), self._picked(tree_mask), self._picked(depths)
        if hidden is not None:
            hidden = self._picked(hidden)
            hidden = hidden.expand(1, 2, -1) if self._is_lonely(ids) else hidden
        with self._runner.planned(plan, hidden) as states:
            select = None if plan.stop is None else _nothing
            output = self._run(ids, tree_mask, depths, first_node=first_node, select=select)
        return self._spread(output._replace(hidden=states[0][:, : ids.shape[1]]) if states else output)

    def commit(self, accepted: Tensor, num_accepted: Tensor, active: Tensor) -> None:
        """Keep the root and the accepted nodes of the last `forward`.

        Args:
            accepted: ``(B, N) int32`` node ids in path order, padded with −1.
            num_accepted: ``(B,) int32``.
            active: ``(B,) bool``; the other rows keep their length and their bytes.
        """
        self.cache.commit(accepted, num_accepted, active)

    def truncate(self, lengths: Tensor) -> None:
        """Forget the rows past ``lengths`` ``(B,) int32``, none above ``prefix_len`` (not checked)."""
        self.cache.truncate(lengths)

    def release(self) -> None:
        """Let another target of a prepared model have its recordings; this one is not to be run any more."""
        if self._graphs is not None:
            self._graphs.give_back(self)

    @torch.no_grad()
    def _run(
        self,
        ids: Tensor,
        tree_mask: Tensor,
        depths: Tensor,
        *,
        first_node: int = 0,
        select: Callable[[Tensor], Tensor] | None = None,
    ) -> TargetOutput:
        """Call the model; ``select`` chooses from the final hidden states ``(B, T, C)`` what becomes logits."""
        if self.model.training:
            raise RuntimeError("HFTarget: the model is in training mode; call model.eval() first")
        num_nodes, prefix_len = ids.shape[1], self._picked(self.cache.prefix_len)
        positions = prefix_len.unsqueeze(1) + depths
        self.cache.continue_step(first_node)
        behind = mask_behind(tree_mask, first_node) if first_node else None
        if behind is not None:
            # The same bits, and layers neither ask for the earlier nodes again nor run one by one.
            tree_mask, prefix_len, first_node = behind, prefix_len + first_node, 0
        if self._is_lonely(ids):
            ids, positions, tree_mask = ids.expand(1, 2), positions.expand(1, 2), _with_twin(tree_mask)
        seen: list[Tensor] = []

        # The input of the projection is what the last norm gave, in every family; taking it here leaves the way from
        # hidden states to logits to the model.
        def before_projection(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = arguments[0][:, :num_nodes]
            hidden = hidden if select is None else select(hidden)
            seen.append(hidden)
            return (hidden.expand(1, 2, -1) if self._is_lonely(hidden[..., 0]) else hidden,)

        slots = None if self._rows is None else self._rows[:, None].to(torch.int32)
        arguments = {
            "input_ids": ids,
            "position_ids": positions.long(),
            "use_cache": True,
            "return_dict": True,
            "tree_state": TreeState(tree_mask, prefix_len, first_node, slots),
            self._cache_argument: self.cache,
        }
        with (
            _compat.attention_implementation(self._configs, IMPLEMENTATION),
            self._projection.register_forward_pre_hook(before_projection),
        ):
            logits = self.model(**arguments).logits
        return TargetOutput(logits[:, : seen[0].shape[1]], seen[0])

    def _picked(self, values: Tensor) -> Tensor:
        """Return the rows that run, of ``values (B or 1, …)``."""
        return values if self._rows is None or len(values) == 1 else values[self._rows]

    def _spread(self, output: TargetOutput) -> TargetOutput:
        """Put what the rows that ran gave into their places in the batch."""
        return output if self._rows is None else TargetOutput(*map(self._in_place, output[:2]))

    def _in_place(self, part: Tensor) -> Tensor:
        rows = self._rows
        if rows is None:
            return part
        return part.new_zeros(self.cache.batch_size, *part.shape[1:]).index_copy_(0, rows, part)

    def _is_lonely(self, rows: Tensor) -> bool:
        """Say whether ``rows (B, T)`` is a single one that needs company."""
        return self._pairs and rows.numel() == 1

    def _check_nodes(self, name: str, ids: Tensor, depths: Tensor) -> None:
        batch, num_nodes = self.cache.batch_size, ids.shape[-1]
        if ids.shape != (batch, num_nodes):
            raise ValueError(f"HFTarget.{name}: ids must have shape ({batch}, T), got {tuple(ids.shape)}")
        if depths.shape not in ((batch, num_nodes), (1, num_nodes)):
            raise ValueError(
                f"HFTarget.{name}: depths must have shape ({batch} or 1, {num_nodes}), got {tuple(depths.shape)}"
            )


def _with_twin(tree_mask: Tensor) -> Tensor:
    """Add to a mask ``(1, T, W)`` a node with the ancestors of the last one."""
    num_nodes = tree_mask.shape[1]
    mask = F.pad(tree_mask, (0, num_words(num_nodes + 1) - tree_mask.shape[2], 0, 1))
    mask[:, -1] = mask[:, -2]
    for node in (num_nodes - 1, num_nodes):
        mask[:, -1, node // WORD_BITS] ^= 1 << node % WORD_BITS if (node + 1) % WORD_BITS else -(1 << WORD_BITS - 1)
    return mask


def _nothing(hidden: Tensor) -> Tensor:
    """Choose no hidden state for the projection."""
    return hidden[:, :0]
