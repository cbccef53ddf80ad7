"""The three kernels of verification, in the order of their launches; see `kernels.verify`."""

import triton
import triton.language as tl

from ._verify_nodes import Drafts, Nodes, batch_row, has_child, prepare_nodes
from ._verify_rest import Rest, draw_final, greedy_final, sum_tiles
from ._verify_rows import Law, is_unreadable, summarise_tile
from ._verify_walk import (
    Output,
    emit_chain,
    emit_path,
    finish,
    longest_typical,
    walk,
    walk_block,
    walk_chain,
    walk_tree,
    weight_at,
)

_SIZES = ["num_nodes", "stride_ids_b", "stride_ids_n", "stride_parents_b", "stride_parents_n", "stride_lengths"]
_SIZES += ["stride_temperature", "stride_uniforms_b", "stride_uniforms_n"]


@triton.jit(do_not_specialize=_SIZES)
def _verify_statistics_kernel(
    inputs,
    target,
    draft,
    target_stats,
    draft_stats,
    num_nodes,
    stride_ids_b,
    stride_ids_n,
    stride_parents_b,
    stride_parents_n,
    stride_lengths,
    stride_temperature,
    stride_uniforms_b,
    stride_uniforms_n,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    num_laws = 0
    num_tiles, num_draft_tiles = tl.cdiv(target.size, BLOCK), 0
    if draft is not None:
        num_draft_tiles = tl.cdiv(draft.size, BLOCK)
        num_laws = num_nodes - 1 if inputs.parents_ptr is None else num_nodes
    num_programs = num_nodes * num_tiles + num_laws * num_draft_tiles
    batch, index = (tl.program_id(0) // num_programs).to(tl.int64), tl.program_id(0) % num_programs
    in_use, greedy, scale = batch_row(inputs, num_nodes, stride_lengths, stride_temperature, batch)
    if index < num_nodes * num_tiles:
        row = index // num_tiles
        if row < tl.maximum(in_use, 1):
            law = Law(
                *(target.ptr + batch * target.stride_b, target.stride_n, target.size, target_stats),
                *(batch * num_nodes * num_tiles, num_tiles, scale),
            )
            summarise_tile(law, row, index % num_tiles, greedy, BLOCK)
    else:
        if draft is not None:
            index -= num_nodes * num_tiles
            row = index // num_draft_tiles
            drafts = Drafts(
                *(inputs, batch * stride_ids_b, batch * stride_parents_b, batch * stride_uniforms_b),
                *(stride_ids_n, stride_parents_n, stride_uniforms_n, in_use, greedy),
            )
            if not greedy:
                if has_child(drafts, row, BLOCK_NODES):
                    law = Law(
                        *(draft.ptr + batch * draft.stride_b, draft.stride_n, draft.size, draft_stats),
                        *(batch * num_laws * num_draft_tiles, num_draft_tiles, scale),
                    )
                    summarise_tile(law, row, index % num_draft_tiles, greedy, BLOCK)


@triton.jit(do_not_specialize=[*_SIZES, "num_splits"])
def _verify_rest_kernel(
    inputs,
    target,
    draft,
    target_stats,
    draft_stats,
    nodes,
    vocab_map,
    rest_ptr,  # (B, tiles) fp64; (B, N, tiles) for blocks
    left_ptr,
    num_nodes,
    stride_ids_b,
    stride_ids_n,
    stride_parents_b,
    stride_parents_n,
    stride_lengths,
    stride_temperature,
    stride_uniforms_b,
    stride_uniforms_n,
    num_splits,
    RULE: tl.constexpr,
    WITH_REPLACEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    num_rows = num_nodes - 1 if RULE == "block" else 1
    batch, index = (
        (tl.program_id(0) // (num_rows * num_splits)).to(tl.int64),
        tl.program_id(0) % (num_rows * num_splits),
    )
    split = index % num_splits
    in_use, greedy, scale = batch_row(inputs, num_nodes, stride_lengths, stride_temperature, batch)
    if RULE == "block":  # what comes later does not matter to this row
        in_use = tl.minimum(in_use, index // num_splits + 2)
    first_id, num_tiles = batch * stride_ids_b, tl.cdiv(target.size, BLOCK)
    if inputs.parents_ptr is None:
        first_id -= stride_ids_n
    drafts = Drafts(
        *(inputs, first_id, batch * stride_parents_b, batch * stride_uniforms_b),
        *(stride_ids_n, stride_parents_n, stride_uniforms_n, in_use, greedy),
    )
    law = Law(
        *(target.ptr + batch * target.stride_b, target.stride_n, target.size, target_stats),
        *(batch * num_nodes * num_tiles, num_tiles, scale),
    )
    draft_law, q_ptr = None, nodes.q_ptr
    if draft is not None:
        num_laws, num_draft_tiles = num_nodes, tl.cdiv(draft.size, BLOCK)
        if inputs.parents_ptr is None:
            num_laws -= 1
        draft_law = Law(
            *(draft.ptr + batch * draft.stride_b, draft.stride_n, draft.size, draft_stats),
            *(batch * num_laws * num_draft_tiles, num_draft_tiles, scale),
        )
        q_ptr += batch * num_nodes
    nodes = Nodes(nodes.up_ptr + batch * num_nodes, nodes.p_ptr + batch * num_nodes, q_ptr)
    if drafts.greedy:
        return
    zero = tl.full([], 0.0, tl.float64)
    prepare_nodes(drafts, nodes, law, draft_law, vocab_map, zero, zero, BLOCK_NODES, BLOCK_TILES)
    if RULE == "block":
        node = index // num_splits
        if node + 1 >= drafts.in_use:
            return
        weight, event = weight_at(node, nodes)
        rest = Rest(node, weight, zero + 1, 0, zero == 0)
        rest_ptr += (batch * (num_nodes - 1) + node) * law.num_tiles
    else:
        first, root = tl.full([], 1, tl.int32), tl.full([], 0, tl.int32)
        _, current, _, a, last, _, _, _, event, _, _ = walk(
            *(first, root, root, zero, root, zero + 1, zero + 1, zero > 0, drafts, nodes, None),
            *(RULE == "tree" and vocab_map.starts_ptr is not None, WITH_REPLACEMENT, BLOCK_NODES),
        )
        rest = Rest(current, zero + 1, a, last, zero == 0)
        rest_ptr += batch * law.num_tiles
        if left_ptr is not None:
            left_ptr += batch * law.num_tiles
    if event:
        tiles_each = tl.cdiv(law.num_tiles, num_splits)
        end = tl.minimum((split + 1) * tiles_each, law.num_tiles)
        sum_tiles(
            *(split * tiles_each, end, rest_ptr, left_ptr, law, draft_law, drafts, nodes, vocab_map, rest),
            *(BLOCK, BLOCK_NODES, BLOCK_TILES),
        )


@triton.jit(do_not_specialize=[*_SIZES, "epsilon_bits", "delta_bits"])
def _verify_finish_kernel(
    inputs,
    target,
    draft,
    target_stats,
    draft_stats,
    nodes,
    vocab_map,
    rest_ptr,
    left_ptr,
    output,
    num_nodes,
    stride_ids_b,
    stride_ids_n,
    stride_parents_b,
    stride_parents_n,
    stride_lengths,
    stride_temperature,
    stride_uniforms_b,
    stride_uniforms_n,
    epsilon_bits,
    delta_bits,
    RULE: tl.constexpr,
    WITH_REPLACEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    in_use, greedy, scale = batch_row(inputs, num_nodes, stride_lengths, stride_temperature, batch)
    first_id, num_tiles = batch * stride_ids_b, tl.cdiv(target.size, BLOCK)
    if inputs.parents_ptr is None:
        first_id -= stride_ids_n
    drafts = Drafts(
        *(inputs, first_id, batch * stride_parents_b, batch * stride_uniforms_b),
        *(stride_ids_n, stride_parents_n, stride_uniforms_n, in_use, greedy),
    )
    law = Law(
        *(target.ptr + batch * target.stride_b, target.stride_n, target.size, target_stats),
        *(batch * num_nodes * num_tiles, num_tiles, scale),
    )
    draft_law, q_ptr = None, nodes.q_ptr
    if draft is not None:
        num_laws, num_draft_tiles = num_nodes, tl.cdiv(draft.size, BLOCK)
        if inputs.parents_ptr is None:
            num_laws -= 1
        draft_law = Law(
            *(draft.ptr + batch * draft.stride_b, draft.stride_n, draft.size, draft_stats),
            *(batch * num_laws * num_draft_tiles, num_draft_tiles, scale),
        )
        q_ptr += batch * num_nodes
    nodes = Nodes(nodes.up_ptr + batch * num_nodes, nodes.p_ptr + batch * num_nodes, q_ptr)
    epsilon = epsilon_bits.to(tl.int64).to(tl.float64, bitcast=True)
    delta = delta_bits.to(tl.int64).to(tl.float64, bitcast=True)
    needs_nodes = greedy  # the second launch skips greedy rows
    if draft is None:
        needs_nodes = batch >= 0
    if needs_nodes:
        prepare_nodes(drafts, nodes, law, draft_law, vocab_map, epsilon, delta, BLOCK_NODES, BLOCK_TILES)
    output = Output(
        output.ids_ptr + batch * num_nodes, output.count_ptr + batch, output.accepted_ptr + batch * (num_nodes - 1)
    )
    zero = tl.full([], 0.0, tl.float64)
    if RULE == "chain":
        if rest_ptr is not None:
            rest_ptr += batch * law.num_tiles
        rest, count, unreadable = walk_chain(rest_ptr, law, drafts, nodes, output, BLOCK_TILES)
    elif RULE == "tree":
        if rest_ptr is not None:
            rest_ptr += batch * law.num_tiles
            left_ptr += batch * law.num_tiles
        rest, count, unreadable = walk_tree(
            *(rest_ptr, left_ptr, law, draft_law, drafts, nodes, output, vocab_map),
            *(WITH_REPLACEMENT, BLOCK, BLOCK_NODES, BLOCK_TILES),
        )
    elif RULE == "block":
        if rest_ptr is not None:
            rest_ptr += batch * (num_nodes - 1) * law.num_tiles
        rest, unreadable, last_row = walk_block(rest_ptr, law, drafts, nodes, BLOCK_TILES)
        count = rest.node
        emit_chain(output, drafts, count, BLOCK_NODES)
        unreadable = unreadable | is_unreadable(law, last_row, BLOCK_TILES)
        if rest_ptr is not None:
            rest_ptr += rest.node.to(tl.int64) * law.num_tiles
    else:
        node, count, unreadable = longest_typical(drafts, nodes, BLOCK_NODES)
        rest = Rest(node, zero + 1, zero, 0, zero > 0)
        emit_path(output, drafts, nodes, node, count)
    if drafts.greedy:
        final = greedy_final(law, rest.node, BLOCK_TILES)
    else:
        final = draw_final(*(rest_ptr, law, draft_law, drafts, nodes, vocab_map, rest, BLOCK, BLOCK_NODES, BLOCK_TILES))
    final = tl.where(unreadable, -1, final)
    finish(output, count, final, num_nodes, BLOCK_NODES)
