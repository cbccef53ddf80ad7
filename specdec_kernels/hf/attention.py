"""Tree attention as an attention implementation of transformers.

It is registered once under `IMPLEMENTATION` in both interfaces: the attention, and the masks, so that no model
builds a 4-D mask for it. The state of a tree step travels as the keyword ``tree_state`` of ``model(...)``.
"""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..ops.tree_attention import paged_tree_attention, tree_attention

# transformers gives names that contain flash, sdpa or flex_attention a treatment of their own.
IMPLEMENTATION = "specdec_tree"


class TreeState(NamedTuple):
    """What every attention layer must know about the step.

    Attributes:
        tree_mask: ``(B or 1, T, W) int64``, as `tree_attention` takes it.
        prefix_len: ``(B,) int32``, committed rows of the cache.
        first_node: nodes that are in the cache already; the queries are those of the nodes from this one on.
        slots: ``(B, 1) int32``, the row of the cache that each row of the step owns; None when there are no others.
    """

    tree_mask: Tensor
    prefix_len: Tensor
    first_node: int = 0
    slots: Tensor | None = None


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    tree_state: TreeState | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from the nodes of a draft tree to a whole `TreeCache` layer.

    Args:
        module: the attention module; not used.
        query: ``(B, Hq, T, D)``.
        key, value: ``(B, Hk, S, D)``: the full buffers of the cache, as `TreeCache.update` returned them.
        attention_mask: must be None; the tree state says what is visible.
        scaling: multiplies the scores; None for ``D ** -0.5``.
        dropout: must be 0.
        softcap, sliding_window, s_aux: the layer's soft cap, window and attention sinks ``(Hq,)``.
        position_bias: must be None.
        tree_state: what `HFTarget` gave to ``model(...)``.

    Returns:
        ``(B, T, Hq, D)`` and None (no attention weights).

    Raises:
        RuntimeError: called without a tree state, that is outside of `HFTarget`.
        NotImplementedError: a mask, a position bias or dropout was given.
    """
    if tree_state is None:
        raise RuntimeError(
            f"attention implementation {IMPLEMENTATION!r} works only inside HFTarget, which gives each step its tree; "
            "for other uses call model.set_attn_implementation('sdpa')"
        )
    if attention_mask is not None or position_bias is not None or dropout:
        raise NotImplementedError(
            f"attention implementation {IMPLEMENTATION!r} supports no attention mask, position bias or dropout, got "
            f"attention_mask={_shape(attention_mask)}, position_bias={_shape(position_bias)}, dropout={dropout}"
        )
    first_node = tree_state.first_node
    # The op attends from all nodes. Rows do not depend on each other, so it does not matter what the earlier ones ask.
    query = F.pad(query, (0, 0, first_node, 0)) if first_node else query
    inputs = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    tree = tree_state.tree_mask, tree_state.prefix_len
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "window": sliding_window, "sinks": s_aux}
    if tree_state.slots is None:
        out, _lse = tree_attention(*inputs, *tree, **options)
    else:
        # A row of the cache is a page, so large that no row needs a second one.
        out, _lse = paged_tree_attention(*inputs, tree_state.slots, *tree, **options)
    return out[:, first_node:], None


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def no_attention_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """Build no mask: the tree state replaces it.

    Raises:
        NotImplementedError: a padding mask was given; `HFTarget` takes right-padded prompts with their lengths.
    """
    if attention_mask is not None:
        raise NotImplementedError(
            f"attention implementation {IMPLEMENTATION!r} takes no attention_mask, got {_shape(attention_mask)}"
        )


AttentionInterface.register(IMPLEMENTATION, tree_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, no_attention_mask)
