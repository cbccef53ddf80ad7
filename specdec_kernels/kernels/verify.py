"""Verification in Triton, from logits: statistics of all rows, sums over the row that was rejected at, the final draw.

1. Statistics: a program for each tile of each row of logits that may be needed.
2. Rest (only with draft logits): the programs of a batch row share the tiles of the row at which the first draft was
   rejected, and sum what the target still wants there. For a block of drafts this is done at every row in use.
3. Finish: one program for each batch row walks to the end and draws the final token from one tile.

Nothing as long as a row is written, and no program waits for another. ``docs/verification.md`` draws it.
"""

import struct
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from .._registry import OPS
from . import _common
from ._verify_columns import columns_by_id
from ._verify_kernels import _verify_finish_kernel, _verify_rest_kernel, _verify_statistics_kernel
from ._verify_nodes import Inputs, Nodes, VocabMap
from ._verify_rows import Logits, Statistics
from ._verify_walk import Output

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Plan:
    """Launch parameters: chosen by the device, never by data or sizes."""

    block: int  # logits in a tile: all sums follow its borders
    block_nodes: int
    statistics_options: dict  # how the first kernel is compiled
    options: dict  # and the others
    target_programs: int

    def num_splits(self, batch: int, num_rows: int, num_tiles: int) -> int:
        """Return how many programs share the tiles of each of ``num_rows`` rows; no sum depends on it.

        Each reads the statistics of all nodes: more than a dozen for a batch row would cost over 4 % of the traffic.
        """
        return max(1, min(num_tiles, 12 // num_rows, self.target_programs // (batch * num_rows)))


@cache
def choose_plan(device: _common.Device) -> Plan:
    """Choose the launch parameters. The file's own ``rule`` says why they are what they are."""
    facts = _common.launch_parameters("verify", device.names)
    # The last option is Triton's default, named because that is changing.
    statistics, others = (facts[name] | {"enable_fp_fusion": True} for name in ("statistics", "others"))
    return Plan(facts["block"], facts["block_nodes"], statistics, others, 2 * device.num_multiprocessors)


def verify_chain_triton(
    draft_ids, target_logits, draft_logits, temperature, uniforms, draft_len=None, *, block, draft_vocab_map=None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels for chains; see `specdec_kernels.verify_chain`."""
    args = (draft_ids, target_logits, draft_logits, temperature, uniforms, draft_len)
    plan = _plan(target_logits, draft_logits)
    if plan is None:
        return OPS["verify_chain"].reference(*args, block=block, draft_vocab_map=draft_vocab_map)
    inputs = Inputs(draft_ids, None, draft_len, temperature, uniforms)
    return _launch(plan, "block" if block else "chain", inputs, target_logits, draft_logits, draft_vocab_map)


def verify_tree_triton(
    ids,
    parents,
    target_logits,
    draft_logits,
    temperature,
    uniforms,
    num_nodes=None,
    *,
    with_replacement,
    draft_vocab_map=None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels for trees; see `specdec_kernels.verify_tree`."""
    args = (ids, parents, target_logits, draft_logits, temperature, uniforms, num_nodes)
    plan = _plan(target_logits, draft_logits)
    if plan is None:
        return OPS["verify_tree"].reference(*args, with_replacement=with_replacement, draft_vocab_map=draft_vocab_map)
    inputs = Inputs(ids, parents, num_nodes, temperature, uniforms)
    return _launch(plan, "tree", inputs, target_logits, draft_logits, draft_vocab_map, with_replacement)


def verify_tree_greedy_triton(ids, parents, target_logits, num_nodes=None) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels at temperature 0; see `specdec_kernels.verify_tree_greedy`."""
    plan = _plan(target_logits, None)
    if plan is None:
        return OPS["verify_tree_greedy"].reference(ids, parents, target_logits, num_nodes)
    return _launch(plan, "tree", Inputs(ids, parents, num_nodes, None, None), target_logits)


def verify_tree_typical_triton(
    ids, parents, target_logits, temperature, uniforms, num_nodes=None, *, epsilon, delta
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels for typical acceptance; see `specdec_kernels.verify_tree_typical`."""
    args = (ids, parents, target_logits, temperature, uniforms, num_nodes)
    plan = _plan(target_logits, None)
    if plan is None:
        return OPS["verify_tree_typical"].reference(*args, epsilon=epsilon, delta=delta)
    inputs = Inputs(ids, parents, num_nodes, temperature, uniforms)
    return _launch(plan, "typical", inputs, target_logits, thresholds=(epsilon, delta))


def _plan(target: Tensor, draft: Tensor | None) -> Plan | None:
    """Return the launch parameters, None for what runs on the reference: logits of doubles."""
    if target.dtype not in _DTYPES or (draft is not None and draft.dtype not in _DTYPES):
        return None
    return choose_plan(_common.device_of(target))


def _launch(
    plan, rule, inputs, target, draft=None, vocab_map=None, with_replacement=False, thresholds=(0.0, 0.0)
) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_nodes, vocab = target.shape
    output = Output(
        target.new_empty(batch, num_nodes, dtype=torch.int64),
        target.new_empty(batch, dtype=torch.int32),
        target.new_empty(batch, num_nodes - 1, dtype=torch.int32),
    )
    if batch == 0:
        return tuple(output)
    if num_nodes == 1:
        draft = None  # nothing was drawn
    num_tiles = triton.cdiv(vocab, plan.block)
    target_stats = _statistics(target, num_tiles, rule == "typical")
    draft_stats, columns, rest, left = None, VocabMap(None, None), None, None
    num_programs, widest = num_nodes * num_tiles, num_tiles
    if draft is not None:
        num_draft_tiles = triton.cdiv(draft.shape[2], plan.block)
        draft_stats = _statistics(draft, num_draft_tiles, False)
        num_programs += draft.shape[1] * num_draft_tiles
        widest = max(widest, num_draft_tiles)
        if vocab_map is not None:
            columns = VocabMap(*columns_by_id(vocab_map, vocab))
        num_rows = num_nodes - 1 if rule == "block" else 1
        rest = target.new_empty(batch, num_rows, num_tiles, dtype=torch.float64)
        left = torch.empty_like(rest) if rule == "tree" else None
    nodes = Nodes(
        target.new_empty(batch, num_nodes, dtype=torch.int32),
        target.new_empty(batch, num_nodes, dtype=torch.float64),
        None if draft is None else target.new_empty(batch, num_nodes, dtype=torch.float64),
    )
    logits = (_logits(target), None if draft is None else _logits(draft), target_stats, draft_stats)
    sizes = (num_nodes, *_strides(inputs))
    blocks = (plan.block, plan.block_nodes)
    with torch.cuda.device_of(target):
        _verify_statistics_kernel[(batch * num_programs,)](inputs, *logits, *sizes, *blocks, **plan.statistics_options)
        constants = (rule, with_replacement, *blocks, _common.block(widest))
        if draft is not None:
            num_splits = plan.num_splits(batch, num_rows, num_tiles)
            _verify_rest_kernel[(batch * num_rows * num_splits,)](
                *(inputs, *logits, nodes, columns, rest, left, *sizes, num_splits, *constants),
                **plan.options,
            )
        _verify_finish_kernel[(batch,)](
            *(inputs, *logits, nodes, columns, rest, left, output, *sizes, *map(_bits, thresholds), *constants),
            **plan.options,
        )
    return tuple(output)


def _statistics(logits: Tensor, num_tiles: int, entropy: bool) -> Statistics:
    shape = (*logits.shape[:2], num_tiles)
    peak, total = (logits.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.float64))
    return Statistics(peak, total, torch.empty_like(total) if entropy else None)


def _logits(logits: Tensor) -> Logits:
    return Logits(logits, logits.stride(0), logits.stride(1), logits.shape[2])


def _strides(inputs: Inputs) -> tuple[int, ...]:
    """Return the strides of the inputs, 0 for what is not there and for parents that all batch rows share."""
    ids, parents, *rows, uniforms = inputs
    parent_strides = (
        (0, 0) if parents is None else (0 if parents.shape[0] == 1 else parents.stride(0), parents.stride(1))
    )
    row_strides = (0 if x is None else x.stride(0) for x in rows)
    return (*ids.stride(), *parent_strides, *row_strides, *((0, 0) if uniforms is None else uniforms.stride()))


def _bits(value: float) -> int:
    """Return the bits of a double: Triton would pass it as fp32."""
    return struct.unpack("<q", struct.pack("<d", value))[0]
