"""A KV cache for draft trees: preallocated, each row of the batch with its own length."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..decoding.host import on_host, vector_of
from ..ops.kv_compact import kv_compact_
from ._buffers import LayerBuffers


class TreeCache(Cache):
    """Hold the keys and values of all layers, in one tensor ``(2L, B, Hk, S, D)`` while they are alike.

    `update` writes the nodes of a step behind each row's committed prefix and commits nothing; `commit` keeps an
    accepted path, `advance` keeps everything. What lies at or past a row's length is garbage.

        row 0   p p p p p p p 0 1 2 3 . . .        p: committed, `prefix_len` of them
        row 1   p p p 0 1 2 3 . . . . . . .        0…3: the nodes of this step
                                                   .: never read

    The nodes of a step may come in several forwards; `continue_step` says where the next one writes. After `select`
    only some of the rows get nodes.

    Memory (`LayerBuffers`) is taken at the first `update`, from the shapes seen there: under tensor parallelism a rank
    holds fewer heads than the config says.

    Args:
        num_layers: ``L``.
        batch_size: ``B``.
        capacity: ``S``, rows for each sequence.
        device: of the lengths, the same as the model's.
        dtype: of the cache; that of the first keys when None.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layers=[])
        for name, value in (("num_layers", num_layers), ("batch_size", batch_size), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"TreeCache: {name} must be at least 1, got {value}")
        self.num_layers = num_layers
        self.capacity = capacity
        self.dtype = dtype
        self._batch_size = batch_size
        self._device = torch.device(device)
        # Elsewhere, reading a length would wait for the device.
        self._lengths_readable = self._device.type == "cpu"
        self._batch_index = torch.arange(batch_size, device=device).unsqueeze(1)
        self._buffers = LayerBuffers(num_layers, batch_size, capacity, dtype)
        self._step: int | None = None
        self._prefix_len: Tensor
        self._common: int | None
        self.reset()

    def reset(self) -> None:
        """Forget all rows; the memory is kept, but for what was reserved. All of them get nodes again."""
        self._buffers.drop_reserved()
        self._selected: Tensor | None = None
        self._set_lengths(torch.zeros(self._batch_size, dtype=torch.int32, device=self._device), longest=0, common=0)

    @property
    def prefix_len(self) -> Tensor:
        """``(B,) int32``: committed rows. A later commit makes a new tensor and leaves this one alone."""
        return self._prefix_len

    @property
    def buffers(self) -> Tensor | list[Tensor]:
        """All K and V as `kv_compact_` takes them: the stacked tensor ``(2L, B, Hk, S, D)``, or ``(B, S, Hk, D)`` each.

        Raises:
            RuntimeError: nothing was written yet.
        """
        return self._buffers.all

    def reserve(self, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return further K and V rows ``(B, S, Hk, D)`` for the caller to write, which `commit` moves with the others.

        They are there until the next `reset`, in the dtype of the layers.

        Raises:
            RuntimeError: nothing was written yet.
        """
        return self._buffers.reserve(num_heads, head_dim)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of a step's nodes to rows ``prefix_len`` … ``prefix_len + T − 1``.

        Args:
            key_states, value_states: ``(B, Hk, T, D)``, any strides; after `select` one for each selected row.
            layer_idx: 0 … L−1.

        Returns:
            The layer's whole buffers ``(B, Hk, S, D)``, not copies.

        Raises:
            ValueError: the rows do not fit (nothing was written then), the shape is not the layer's, or K and V have
                different numbers of nodes.
        """
        num_nodes = key_states.shape[2]
        if value_states.shape[2] != num_nodes:
            raise ValueError(f"TreeCache: K has {num_nodes} nodes, but V has {value_states.shape[2]}")
        self._begin_step(num_nodes)
        keys, values = self._buffers.layer(layer_idx, key_states, value_states, all_rows=self._selected is None)
        self._write(keys, key_states)
        self._write(values, value_states)
        return keys, values

    def select(self, rows: Tensor | None) -> None:
        """Let the next forwards write nodes of these rows alone, ``(n,) int64``; None for all."""
        self._selected, self._step = rows, None

    def claim(self, states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers ``(B, S, Hk, D)`` for the caller to write a step's keys and values to.

        They belong where `update` writes them: from row ``prefix_len`` plus the node of `continue_step` on.

        Args:
            states: ``(B, T, Hk, D)`` in the dtype of the cache, like the keys and like the values; not read.
            layer_idx: 0 … L−1.

        Raises:
            ValueError: as `update`.
        """
        self._begin_step(states.shape[1])
        states = states.transpose(1, 2)
        keys, values = self._buffers.layer(layer_idx, states, states, all_rows=self._selected is None)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def claim_layers(self, states: Tensor) -> list[Tensor]:
        """Return what `claim` returns for every layer: K of the first one, V of it, K of the second, …

        Args:
            states: as in `claim`; all layers are alike.

        Raises:
            ValueError: as `update`.
        """
        self._begin_step(states.shape[1])
        states = states.transpose(1, 2)
        return self._buffers.views(states, all_rows=self._selected is None)

    @contextmanager
    def addressed_by(self, prefix_len: Tensor) -> Iterator[None]:
        """Inside, take the lengths from a tensor alone ``(B,) int32``: nothing known on the host decides where rows go.

        For steps that are recorded and replayed with other lengths. `begin_step` must precede each of them.
        """
        known: tuple[Tensor, int | None] = (self._prefix_len, self._common)
        self._prefix_len, self._common, self._step = prefix_len, None, None
        try:
            yield
        finally:
            self._prefix_len, self._common = known

    def begin_step(self, num_nodes: int) -> None:
        """Check that a step has room, and count its nodes as written.

        Raises:
            ValueError: the rows do not fit.
        """
        self.continue_step(0)
        self._begin_step(num_nodes)

    def continue_step(self, first_node: int) -> None:
        """Let the next forward write behind the first ``first_node`` nodes of the step; 0 starts the step over."""
        self._first, self._step = first_node, None

    def advance(self, count: int) -> None:
        """Commit the first ``count`` nodes of the last step in every row, without moving any.

        Raises:
            ValueError: the last step has fewer nodes, or was committed already.
        """
        written = self._step or 0
        if not 0 <= count <= written:
            raise ValueError(f"TreeCache.advance: count must be in [0, {written}], the nodes of a step, got {count}")
        self._add_to_lengths(count)

    def truncate(self, lengths: Tensor) -> None:
        """Forget the rows past ``lengths`` ``(B,) int32``, none above the present length (not checked)."""
        self._set_lengths(lengths.to(torch.int32, copy=True), longest=self._longest)

    def commit(self, accepted: Tensor, num_accepted: Tensor, active: Tensor) -> None:
        """Keep the root and the accepted nodes of the last step.

        Args:
            accepted: ``(B, N) int32`` node ids in path order, as in a `Verification`.
            num_accepted: ``(B,) int32``.
            active: ``(B,) bool``; the other rows keep their length and their bytes.

        Raises:
            RuntimeError: nothing was written yet.
        """
        caches = self.buffers
        moved, lengths = self._after(accepted, num_accepted, active)
        if moved is not None:
            kv_compact_(caches, accepted, moved, self._prefix_len)
        self._set_lengths(lengths, longest=self._longest + accepted.shape[1] + 1)

    def _after(self, accepted: Tensor, num_accepted: Tensor, active: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return how many drafts each row keeps, none in those that are left alone, and the lengths after it.

        None instead of the numbers where every path lies behind its root already, as the likeliest one often does.
        """
        if not self._lengths_readable:
            roots = active.to(torch.int32)
            moved = num_accepted * roots
            return moved, self._prefix_len + (moved + roots)
        paths, counts, goes_on = on_host(accepted, num_accepted, active)
        counts = [count if goes else -1 for count, goes in zip(counts, goes_on, strict=True)]
        lengths = (length + count + 1 for length, count in zip(self._prefix_len.tolist(), counts, strict=True))
        new_len = vector_of(lengths, "i", self._device)
        rows = zip(paths, counts, strict=True)
        if all(node == place for path, count in rows for place, node in enumerate(path[: max(0, count)], 1)):
            return None, new_len
        if min(counts) < 0:
            num_accepted = vector_of((max(0, count) for count in counts), "i", self._device)
        return num_accepted, new_len

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` rows of every sequence, in the convention of transformers 5.

        Raises:
            ValueError: a positive number (it meant a final length in older versions), or more rows than there are.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"TreeCache.crop: tokens_to_remove must be negative or 0, got {tokens_to_remove}")
        shortest = int(self._prefix_len.min())
        if -tokens_to_remove > shortest:
            raise ValueError(f"TreeCache.crop: cannot remove {-tokens_to_remove} rows of {shortest}")
        self._add_to_lengths(tokens_to_remove)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the longest row's length: exact on the CPU, elsewhere an upper bound that needs no wait."""
        return self._longest

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return ``(S, 0)``: attention sees the whole buffers."""
        return self.capacity, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return ``S``."""
        return self.capacity

    # The name before 5.20.
    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        """``B``."""
        return self._batch_size

    @property
    def is_initialized(self) -> bool:
        """Whether memory was taken."""
        return self._buffers.is_initialized

    @property
    def is_croppable(self) -> bool:
        """True: rows past the length are never read."""
        return True

    def __len__(self) -> int:
        return self.num_layers

    def __repr__(self) -> str:
        return f"TreeCache(num_layers={self.num_layers}, batch_size={self._batch_size}, capacity={self.capacity})"

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse: beam search is not supported."""
        raise NotImplementedError("TreeCache: beam search is not supported")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: a cache keeps its batch size."""
        raise NotImplementedError("TreeCache: the batch size cannot change")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refuse: a cache keeps its batch size."""
        raise NotImplementedError("TreeCache: the batch size cannot change")

    def _set_lengths(self, prefix_len: Tensor, *, longest: int, common: int | None = None) -> None:
        """Take new lengths: ``longest`` bounds them from above, ``common`` is the length of all rows where known."""
        self._prefix_len = prefix_len
        self._first = 0
        self._step = None
        if common is None and self._lengths_readable:
            lengths = prefix_len.tolist()
            longest = max(lengths)
            common = longest if min(lengths) == longest else None
        self._longest = min(longest, self.capacity)
        self._common = common

    def _add_to_lengths(self, count: int) -> None:
        common = None if self._common is None else self._common + count
        self._set_lengths(self._prefix_len + count, longest=self._longest + count, common=common)

    def _begin_step(self, num_nodes: int) -> None:
        """Decide where the nodes of this forward go: once for all layers, before anything is written."""
        first, num_nodes = self._first, self._first + num_nodes
        if self._step == num_nodes:
            return
        if self._longest + num_nodes > self.capacity:
            # On a GPU the bound grows by the longest path at each commit; only when it reaches the end is it worth a
            # wait for the real lengths.
            self._longest = int(self._prefix_len.max())
        if self._longest + num_nodes > self.capacity:
            raise ValueError(
                f"TreeCache: {num_nodes} nodes after {self._longest} rows need {self._longest + num_nodes} rows, "
                f"but the capacity is {self.capacity}"
            )
        if self._selected is not None or self._common is None:
            lengths = self._prefix_len if self._selected is None else self._prefix_len[self._selected]
            self._rows = lengths.unsqueeze(1).long() + torch.arange(first, num_nodes, device=self._device)
        self._step = num_nodes

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        if self._common is not None and self._selected is None:
            buffer.narrow(2, self._common + self._first, states.shape[2]).copy_(states)
        else:
            batch_index = self._batch_index if self._selected is None else self._selected.unsqueeze(1)
            buffer.transpose(1, 2).index_put_((batch_index, self._rows), states.transpose(1, 2).to(buffer.dtype))
