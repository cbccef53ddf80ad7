"""The memory of a `TreeCache`: keys and values of all layers."""

import torch
from torch import Tensor


class LayerBuffers:
    """Hold one tensor ``(2L, B, Hk, S, D)`` while the layers are alike: layer *l* owns slices 2l and 2l+1.

    Memory is taken when the first layer is asked for, from the shapes given there. Layers that differ in heads, head
    size, dtype or in K and V get a tensor each.

    Args:
        num_layers: ``L``.
        batch_size: ``B``.
        capacity: ``S``.
        dtype: that of the first keys when None.
    """

    def __init__(self, num_layers: int, batch_size: int, capacity: int, dtype: torch.dtype | None):
        self._size = batch_size, capacity
        self._dtype = dtype
        self._stacked: Tensor | None = None
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._reserved: list[Tensor] = []
        # What `views` gave last, for layers of which shape; making them anew in each step takes a part of it.
        self._views: tuple[list[Tensor], tuple[int, ...]] = [], ()

    @property
    def is_initialized(self) -> bool:
        """Whether memory was taken."""
        return any(self._layers)

    @property
    def all(self) -> Tensor | list[Tensor]:
        """See `TreeCache.buffers`."""
        if self._stacked is not None and not self._reserved:
            return self._stacked
        written = [tensor.transpose(1, 2) for layer in self._layers if layer is not None for tensor in layer]
        if not written:
            raise RuntimeError("TreeCache: nothing was written yet")
        return written + self._reserved

    def reserve(self, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """See `TreeCache.reserve`."""
        batch_size, capacity = self._size
        like, shape = self.all[0], (batch_size, capacity, num_heads, head_dim)
        rows = like.new_empty(shape), like.new_empty(shape)
        self._reserved += rows
        return rows

    def drop_reserved(self) -> None:
        """Forget what was reserved."""
        self._reserved = []

    def layer(self, index: int, key_states: Tensor, value_states: Tensor, *, all_rows: bool) -> tuple[Tensor, Tensor]:
        """Return a layer's ``(B, Hk, S, D)`` for K and V, fit for states ``(B, Hk, T, D)``.

        Args:
            index: 0 … L−1.
            key_states, value_states: not read.
            all_rows: whether the states are of the whole batch.

        Raises:
            ValueError: the shape is not the layer's.
        """
        shapes = self._shape(key_states, all_rows), self._shape(value_states, all_rows)
        layer = self._layers[index]
        if layer is None:
            layer = self._layers[index] = self._new_layer(index, key_states, value_states, shapes)
        elif (layer[0].shape, layer[1].shape) != shapes:
            raise ValueError(
                f"TreeCache: layer {index} holds K {tuple(layer[0].shape)} and V {tuple(layer[1].shape)}, got "
                f"states {tuple(key_states.shape)} and {tuple(value_states.shape)}"
            )
        return layer

    def views(self, states: Tensor, *, all_rows: bool) -> list[Tensor]:
        """Return K and V of every layer, ``(B, S, Hk, D)`` each, for states as in `layer`, the same for all layers."""
        views, shape = self._views
        if not views or shape != self._shape(states, all_rows):
            layers = [self.layer(index, states, states, all_rows=all_rows) for index in range(len(self._layers))]
            views = [buffer.transpose(1, 2) for layer in layers for buffer in layer]
            self._views = views, self._shape(states, all_rows)
        return views

    def _shape(self, states: Tensor, all_rows: bool) -> tuple[int, int, int, int]:
        batch_size, capacity = self._size
        return states.shape[0] if all_rows else batch_size, states.shape[1], capacity, states.shape[3]

    def _new_layer(
        self, index: int, key_states: Tensor, value_states: Tensor, shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> tuple[Tensor, Tensor]:
        dtype = self._dtype or key_states.dtype
        self._views = [], ()
        if shapes[0][0] != self._size[0]:
            raise ValueError(f"TreeCache: states must have batch size {self._size[0]}, got {shapes[0][0]}")
        if shapes[0] == shapes[1] and not any(self._layers):
            self._stacked = key_states.new_empty((2 * len(self._layers), *shapes[0]), dtype=dtype)
        if self._stacked is not None:
            if self._stacked.shape[1:] == shapes[0] == shapes[1] and self._stacked.dtype == dtype:
                return self._stacked[2 * index], self._stacked[2 * index + 1]
            # The layers are not alike after all.
            self._stacked = None
            self._layers = [layer and (layer[0].clone(), layer[1].clone()) for layer in self._layers]
        return key_states.new_empty(shapes[0], dtype=dtype), value_states.new_empty(shapes[1], dtype=dtype)
