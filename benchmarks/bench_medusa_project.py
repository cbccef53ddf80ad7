"""Medusa heads, from hidden states to candidates, against the loop over heads that every peer runs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels import medusa_project_topk
from specdec_kernels.reference.medusa_project import medusa_project_topk_ref

from .cases import MODELS
from .harness import Cost, Result
from .memory import describe_peak

OP = "medusa_project"
OURS = ("specdec_kernels",)
NUM_HEADS, NUM_LAYERS, TOP_K = 4, 1, 10


@dataclass(frozen=True)
class Case:
    """One step in bf16: four heads of one residual layer, ten candidates each.

    Attributes:
        own: each head has its own projection; otherwise all share the model's.
        num_rows: of a reduced vocabulary, None for the whole.
    """

    model: str
    batch: int
    own: bool
    num_rows: int | None = None

    @property
    def vocab(self) -> int:
        """Rows of the projection."""
        return self.num_rows or MODELS[self.model].vocab_size


def _case_id(case: Case) -> str:
    return f"{case.model}-B{case.batch}-{'own' if case.own else 'shared'}" + (
        f"-V{case.num_rows}" if case.num_rows else ""
    )


CASES = {
    _case_id(case): case
    for case in (
        *(
            Case(model, batch, own)
            for model in ("smollm2_135m", "llama3_8b")
            for own in (False, True)
            for batch in (1, 8)
        ),
        Case("llama3_8b", 1, False, 32768),
    )
}


@dataclass(frozen=True)
class Inputs:
    """What the op takes."""

    hidden: Tensor
    w_res: Tensor
    b_res: Tensor
    w_out: Tensor


@lru_cache(maxsize=1)  # nothing is written to; own projections of Llama-3-8B are 4.2 GB
def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draw weights as small whole numbers times a power of two, which is fast and exact in bf16."""
    width = MODELS[case.model].hidden_size
    generator = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> Tensor:
        numbers = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        return numbers.to(device, torch.bfloat16).mul_(2.0 ** round(torch.tensor(2 * width**-0.5 / 73).log2().item()))

    hidden = torch.randn(case.batch, width, generator=generator).to(device, torch.bfloat16)
    w_out = weights(*((NUM_HEADS, case.vocab, width) if case.own else (case.vocab, width)))
    return Inputs(hidden, weights(NUM_HEADS, NUM_LAYERS, width, width), weights(NUM_HEADS, NUM_LAYERS, width), w_out)


def cost(case: Case) -> Cost:
    """Every weight is read once, and multiplied with as many rows as want it."""
    width, rows = MODELS[case.model].hidden_size, NUM_HEADS * case.batch
    num_layer, num_projection = NUM_HEADS * NUM_LAYERS * width * width, case.vocab * width
    num_read = num_layer + num_projection * (NUM_HEADS if case.own else 1)
    return Cost(2 * num_read, flops=2 * (num_layer * case.batch + num_projection * rows), dtype="bfloat16")


def check(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare the values and the log-sum-exp to some units in the last place: states are rounded to bf16 between."""
    for have, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=2**-6, atol=2**-4)


def providers(case: Case) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    """Return the reference, ours, the loop over heads, and torch with all heads in one product.

    Only ours and the reference compute the log-sum-exp, too.
    """
    return {
        "reference": lambda inputs: _topk(medusa_project_topk_ref, inputs),
        "specdec_kernels": lambda inputs: _topk(medusa_project_topk, inputs),
        "head_loop": _head_loop,
        "one_product": _one_product,
    }


def _topk(op: Callable, inputs: Inputs) -> list[Tensor]:
    return [op(inputs.hidden, inputs.w_res, inputs.b_res, inputs.w_out, TOP_K)[0]]


def _head_loop(inputs: Inputs) -> list[Tensor]:
    """Linear, SiLU, linear and top-k for one head after the other, as in the original code of Medusa."""
    values = []
    for head in range(NUM_HEADS):
        x = inputs.hidden
        for layer in range(NUM_LAYERS):
            x = x + F.silu(F.linear(x, inputs.w_res[head, layer], inputs.b_res[head, layer]))
        logits = F.linear(x, inputs.w_out[head] if inputs.w_out.dim() == 3 else inputs.w_out)
        values.append(logits.topk(TOP_K).values)
    return [torch.stack(values, dim=1).float()]


def _one_product(inputs: Inputs) -> list[Tensor]:
    """A batched product for the residual layers, one product for all heads' logits, one top-k."""
    x = inputs.hidden.expand(NUM_HEADS, *inputs.hidden.shape)
    for layer in range(NUM_LAYERS):
        x = x + F.silu(torch.baddbmm(inputs.b_res[:, layer, None], x, inputs.w_res[:, layer].mT))
    if inputs.w_out.dim() == 3:
        logits = torch.bmm(x, inputs.w_out.mT)
    else:
        logits = F.linear(x.flatten(0, 1), inputs.w_out).unflatten(0, x.shape[:2])
    return [logits.topk(TOP_K).values.transpose(0, 1).float()]


def notes(results: list[Result], device: torch.device) -> str:
    """Say how we do against the loop, and what memory the calls take beside that of all logits."""
    lines = []
    for case_id in dict.fromkeys(result.case for result in results):
        median = {result.provider: result.median_us for result in results if result.case == case_id}
        ours, case = median["specdec_kernels"], CASES[case_id]
        inputs = make_inputs(case, device)
        runs = [providers(case)[name] for name in ("specdec_kernels", "one_product")]
        memory = [describe_peak(partial(run, inputs), device) for run in runs]
        logits = 2 * case.batch * NUM_HEADS * case.vocab / 1e6
        lines.append(
            f"{case_id:24} {median['head_loop'] / ours:5.2f} times as fast as the loop, "
            f"{cost(case).read_bytes / ours / 1e3:5.1f} GB/s; peak extra memory {memory[0]}, "
            f"one product {memory[1]}; all logits are {logits:.2f} MB"
        )
    return "\n".join(lines)
