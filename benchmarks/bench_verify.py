"""Chain verification from logits against the torch composite: softmax of both sides, gather, product, multinomial.

``read_once`` only reads the logits and is no verification; it is in the table to be divided by.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdec_kernels import verify_chain
from specdec_kernels.reference.verify import verify_chain_ref

from .harness import Cost, Result
from .memory import describe_peak

OP = "verify"
OURS = ("specdec_kernels", "read_once")


@dataclass(frozen=True)
class Case:
    """One row, N drafts drawn from q.

    Attributes:
        num_accepted: how many are accepted before one is rejected; N: all.
    """

    vocab: int
    num_drafts: int
    num_accepted: int

    @property
    def num_rows(self) -> tuple[int, int]:
        """Rows that must be looked at: of the target, of the drafter."""
        return self.num_accepted + 1, min(self.num_accepted + 1, self.num_drafts)


def _mean_accepted(num_drafts: int, chance: float = 0.8) -> int:
    return round(sum(chance**i for i in range(1, num_drafts + 1)))


CASES = {
    f"V{vocab}-N{drafts}-{'all' if accepted == drafts else 'some'}": Case(vocab, drafts, accepted)
    for vocab in (32_000, 128_256)
    for drafts in (5, 25, 63)
    for accepted in (_mean_accepted(drafts), drafts)
}


@dataclass(frozen=True)
class Inputs:
    """What the verification rules take, and which providers share."""

    draft_ids: Tensor
    target_logits: Tensor
    draft_logits: Tensor
    temperature: Tensor
    uniforms: Tensor


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Let q equal p, except where a draft is to be rejected: there q wants it four times as much."""
    generator = torch.Generator().manual_seed(0)
    target = 2 * torch.randn(1, case.num_drafts + 1, case.vocab, generator=generator)
    draft = target[:, :-1].clone()
    ids = torch.randint(case.vocab, (1, case.num_drafts), generator=generator)
    uniforms = torch.full((1, case.num_drafts + 1), 0.5)
    if case.num_accepted < case.num_drafts:
        draft[0, case.num_accepted, ids[0, case.num_accepted]] += 4
        uniforms[0, case.num_accepted + 1] = 0.9
    tensors = ids, target, draft, torch.ones(1), uniforms
    return Inputs(*(tensor.to(device) for tensor in tensors))


def cost(case: Case) -> Cost:
    """Every row that the walk visits is read once."""
    return Cost(sum(case.num_rows) * case.vocab * 4)


def check(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare what is accepted; multinomial draws its own final token."""
    for have, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0)


def providers(case: Case) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    """Return the reference, ours, the composite, and a mere reader of the same rows."""
    return {
        "reference": partial(_call, verify_chain_ref),
        "specdec_kernels": partial(_call, verify_chain),
        "composite": _composite,
        "read_once": partial(_read_once, case),
    }


def _call(op: Callable, inputs: Inputs) -> list[Tensor]:
    result = op(inputs.draft_ids, inputs.target_logits, inputs.draft_logits, inputs.temperature, inputs.uniforms)
    return [result[1]]


def _composite(inputs: Inputs) -> list[Tensor]:
    p, q = inputs.target_logits.softmax(-1), inputs.draft_logits.softmax(-1)
    ids = inputs.draft_ids[..., None]
    ratio = (p[:, :-1].gather(-1, ids) / q.gather(-1, ids))[..., 0]
    count = (inputs.uniforms[:, 1:] < ratio).int().cumprod(1).sum(1, dtype=torch.int32)
    rows = torch.arange(len(count), device=count.device)
    law = p[rows, count]
    rest = (law - torch.nn.functional.pad(q, (0, 0, 0, 1))[rows, count]).clamp(min=0)
    torch.multinomial(torch.where((count < q.shape[1])[:, None], rest, law), 1)
    return [count]


def _read_once(case: Case, inputs: Inputs) -> list[Tensor]:
    num_target, num_draft = case.num_rows
    inputs.target_logits[:, :num_target].amax(-1)
    inputs.draft_logits[:, :num_draft].amax(-1)
    return [torch.full((1,), case.num_accepted, dtype=torch.int32)]


def notes(results: list[Result], device: torch.device) -> str:
    """Say how we do against the composite and against merely reading, and what memory the calls take."""
    lines = []
    for case_id in dict.fromkeys(result.case for result in results):
        median = {result.provider: result.median_us for result in results if result.case == case_id}
        ours, case = median["specdec_kernels"], CASES[case_id]
        inputs = make_inputs(case, device)
        runs = [providers(case)[name] for name in ("specdec_kernels", "composite")]
        memory = [describe_peak(partial(run, inputs), device) for run in runs]
        lines.append(
            f"{case_id:17} {median['composite'] / ours:5.1f} times as fast as the composite, "
            f"{ours / median['read_once']:4.1f} times one reading; peak extra memory {memory[0]}, composite {memory[1]}"
        )
    return "\n".join(lines)
