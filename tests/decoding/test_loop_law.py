"""Sampling through the whole loop: the joint law of the first tokens is the target's, whatever is drafted."""

import pytest
import torch

from specdec_kernels.decoding import RejectionAcceptance, TypicalAcceptance, decode
from specdec_kernels.decoding.randomness import draft_uniforms_at, row_seeds
from specdec_kernels.tree import DraftTree

from .toy import TableTarget, chi_square_excess, draft_of

VOCAB = 5
NUM_ROWS = 20_000
NUM_TOKENS = 3
PROMPT = (1, 4)
TREE = DraftTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
# 4.5 standard deviations: a right sampler fails one seed in 300,000, and the seed is fixed.
LIMIT = 4.5


class FixedDrafter:
    """Draft tokens that depend on the pending one and the node only: deterministic, often wrong, siblings distinct."""

    max_nodes = TREE.num_nodes

    def begin(self, *_):
        pass

    def propose(self, pending):
        shift = torch.tensor([0, 1, 2, 4, 3, 1, 2])
        ids = (pending[:, None] + shift) % VOCAB
        ids[:, 0] = pending
        return draft_of(TREE, ids)

    observe = begin


class ChainDrafter:
    """Draw a chain of two from its own distribution, a Markov model, and say so in ``logits``."""

    tree = DraftTree.chain(2)
    max_nodes = 3

    def __init__(self, table, seeds, honest=True):
        self.table, self.seeds, self.honest = table, seeds, honest
        self.positions = None

    def begin(self, prompt_ids, prompt_len, output):
        self.positions = prompt_len.long()

    def propose(self, pending):
        uniforms = draft_uniforms_at(self.seeds, self.positions, 3)
        ids, logits = [pending], []
        for node in (1, 2):
            logits.append(self.table[ids[-1]])
            cdf = logits[-1].softmax(-1).cumsum(-1)
            ids.append((cdf <= uniforms[:, node, None]).sum(-1).clamp_max(VOCAB - 1))
        logits.append(logits[-1])
        stacked = torch.stack(logits, 1)
        return draft_of(self.tree, torch.stack(ids, 1), stacked if self.honest else torch.zeros_like(stacked))

    def observe(self, draft, output, verification, active):
        self.positions = self.positions + (verification.num_accepted + 1) * active


@pytest.fixture(scope="module")
def table():
    generator = torch.Generator().manual_seed(5)
    table = 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    table[:, :, 3] = torch.where(table[:, :, 0] > 0, -torch.inf, table[:, :, 3])  # filtered tokens, as top-k leaves
    return table


def law_of(table, temperature):
    """Return the probability of each of the ``V³`` continuations of the prompt, by enumeration."""
    probs = (table / temperature).softmax(-1).double()
    first = probs[PROMPT]
    second = probs[PROMPT[1]]
    return first[:, None, None] * second[:, :, None] * probs


def sample(table, make_drafter, acceptance, temperature, prompt=PROMPT):
    """Decode ``NUM_ROWS`` rows of the same prompt, which ends as `PROMPT`, and count the outcomes, ``(V, V, V)``."""
    seeds = row_seeds(3, NUM_ROWS)
    drafter = make_drafter(seeds)
    target = TableTarget(table, NUM_ROWS, len(prompt) + NUM_TOKENS - 1 + drafter.max_nodes)
    ids = torch.tensor(prompt).repeat(NUM_ROWS, 1)
    lengths = torch.full((NUM_ROWS,), len(prompt), dtype=torch.int32)
    options = {"acceptance": acceptance, "temperature": temperature, "seeds": seeds}
    rows = [[] for _ in range(NUM_ROWS)]
    for step in decode(target, drafter, ids, lengths, max_new_tokens=NUM_TOKENS, **options):
        for row, tokens in zip(rows, step.tokens, strict=True):
            row += tokens
    counts = torch.zeros(VOCAB, VOCAB, VOCAB)
    return counts.index_put_(tuple(torch.tensor(rows).T), torch.tensor(1.0), accumulate=True)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_deterministic_tree_leaves_the_law_alone(table, temperature):
    counts = sample(table, lambda seeds: FixedDrafter(), RejectionAcceptance(), temperature)
    assert chi_square_excess(counts, law_of(table, temperature)) < LIMIT


def test_sampled_drafts_leave_the_law_alone(table):
    drafts = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(6))
    counts = sample(table, lambda seeds: ChainDrafter(drafts, seeds), RejectionAcceptance(), 1.0)
    assert chi_square_excess(counts, law_of(table, 1.0)) < LIMIT


@pytest.mark.parametrize(
    ("drafter", "acceptance"),
    [
        (lambda seeds: FixedDrafter(), TypicalAcceptance()),
        (lambda seeds: ChainDrafter(2 * torch.eye(VOCAB), seeds, honest=False), RejectionAcceptance()),
    ],
    ids=["typical acceptance", "a drafter that misreports its distribution"],
)
def test_negative_controls_fail(table, drafter, acceptance):
    assert chi_square_excess(sample(table, drafter, acceptance, 1.0), law_of(table, 1.0)) > 2 * LIMIT
