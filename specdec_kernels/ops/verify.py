"""Verification: which drafted tokens the target accepts, and what comes after them.

Shared by all rules. Node 0 is the root, the pending token: always accepted, and its id is not read.
``target_logits[:, i]`` is the target's prediction after node *i*. Uniform *i* decides node *i*; uniform 0 makes the
final draw. Rows are independent: what a row returns does not depend on its slot or on other rows.
"""

import torch
from torch import Tensor

from .._ops import ops
from .._registry import define_op
from .._validate import check_device, check_dtype, check_shape, check_tensor
from ..reference import verify as reference
from ..types import Verification
from ._verify_checks import (
    check_draft,
    check_lengths,
    check_parents,
    check_randomness,
    check_target,
)


def _fake_tree(ids: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_nodes = ids.shape
    return (
        ids.new_empty(num_rows, num_nodes),
        ids.new_empty(num_rows, dtype=torch.int32),
        ids.new_empty(num_rows, num_nodes - 1, dtype=torch.int32),
    )


def _fake_chain(draft_ids: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_drafts = draft_ids.shape
    return _fake_tree(draft_ids.new_empty(num_rows, num_drafts + 1))


define_op(
    "verify_chain(Tensor draft_ids, Tensor target_logits, Tensor? draft_logits, Tensor temperature, Tensor uniforms, "
    "Tensor? draft_len, bool block, Tensor? draft_vocab_map) -> (Tensor, Tensor, Tensor)",
    reference=reference.verify_chain_ref,
    fake=_fake_chain,
)
define_op(
    "verify_tree(Tensor ids, Tensor parents, Tensor target_logits, Tensor? draft_logits, Tensor temperature, "
    "Tensor uniforms, Tensor? num_nodes, bool with_replacement, Tensor? draft_vocab_map) -> (Tensor, Tensor, Tensor)",
    reference=reference.verify_tree_ref,
    fake=_fake_tree,
)
define_op(
    "verify_tree_greedy(Tensor ids, Tensor parents, Tensor target_logits, Tensor? num_nodes) "
    "-> (Tensor, Tensor, Tensor)",
    reference=reference.verify_tree_greedy_ref,
    fake=_fake_tree,
)
define_op(
    "verify_tree_typical(Tensor ids, Tensor parents, Tensor target_logits, Tensor temperature, Tensor uniforms, "
    "Tensor? num_nodes, float epsilon, float delta) -> (Tensor, Tensor, Tensor)",
    reference=reference.verify_tree_typical_ref,
    fake=_fake_tree,
)
define_op(
    "philox_uniforms(Tensor seed, Tensor position, int count) -> Tensor",
    reference=reference.philox_uniforms_ref,
    fake=lambda seed, position, count: seed.new_empty(seed.shape[0], count, dtype=torch.float32),
)


def verify_chain(
    draft_ids: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    uniforms: Tensor,
    draft_len: Tensor | None = None,
    *,
    block: bool = False,
    draft_vocab_map: Tensor | None = None,
) -> Verification:
    op = "verify_chain"
    num_rows, num_nodes, _ = check_target(op, "draft_ids", draft_ids, "N", target_logits)
    check_draft(op, draft_logits, draft_vocab_map, num_rows, num_nodes - 1, target_logits)
    check_randomness(op, temperature, uniforms, (num_rows, num_nodes), target_logits)
    check_lengths(op, "draft_len", draft_len, num_rows, num_nodes - 1, target_logits)
    return Verification(
        *ops.verify_chain.default(
            draft_ids, target_logits, draft_logits, temperature, uniforms, draft_len, block, draft_vocab_map
        )
    )


def verify_tree(
    ids: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    uniforms: Tensor,
    num_nodes: Tensor | None = None,
    *,
    with_replacement: bool = False,
    draft_vocab_map: Tensor | None = None,
) -> Verification:
    op = "verify_tree"
    shape = check_target(op, "ids", ids, "T", target_logits)[:2]
    check_draft(op, draft_logits, draft_vocab_map, *shape, target_logits)
    check_randomness(op, temperature, uniforms, shape, target_logits)
    check_lengths(op, "num_nodes", num_nodes, *shape, target_logits)
    check_parents(op, parents, num_nodes, shape, target_logits)
    return Verification(
        *ops.verify_tree.default(
            ids,
            parents,
            target_logits,
            draft_logits,
            temperature,
            uniforms,
            num_nodes,
            with_replacement,
            draft_vocab_map,
        )
    )


def verify_tree_greedy(
    ids: Tensor, parents: Tensor, target_logits: Tensor, num_nodes: Tensor | None = None
) -> Verification:
    op = "verify_tree_greedy"
    shape = check_target(op, "ids", ids, "T", target_logits)[:2]
    check_lengths(op, "num_nodes", num_nodes, *shape, target_logits)
    check_parents(op, parents, num_nodes, shape, target_logits)
    return Verification(*ops.verify_tree_greedy.default(ids, parents, target_logits, num_nodes))


def verify_tree_typical(
    ids: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    num_nodes: Tensor | None = None,
    *,
    epsilon: float,
    delta: float,
) -> Verification:
    op = "verify_tree_typical"
    shape = check_target(op, "ids", ids, "T", target_logits)[:2]
    check_randomness(op, temperature, uniforms, shape, target_logits)
    check_lengths(op, "num_nodes", num_nodes, *shape, target_logits)
    check_parents(op, parents, num_nodes, shape, target_logits)
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not value >= 0:
            raise ValueError(f"{op}: {name} must be at least 0, got {value}")
    return Verification(
        *ops.verify_tree_typical.default(
            ids, parents, target_logits, temperature, uniforms, num_nodes, float(epsilon), float(delta)
        )
    )


def philox_uniforms(seed: Tensor, position: Tensor, count: int) -> Tensor:
    op = "philox_uniforms"
    check_shape(op, "seed", seed, ("B",))
    check_dtype(op, "seed", seed, (torch.int64,))
    check_tensor(op, "position", position)
    check_shape(op, "position", position, seed.shape)
    check_dtype(op, "position", position, (torch.int64,))
    check_device(op, "position", position, seed.device)
    if count < 0:
        raise ValueError(f"{op}: count must be at least 0, got {count}")
    return ops.philox_uniforms.default(seed, position, count)
