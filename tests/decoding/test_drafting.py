"""Drawn chains: exact whatever they are drawn from and wherever they stop, and filtered as the target."""

import pytest
import torch

from specdec_kernels.decoding import DraftContext, RejectionAcceptance, decode
from specdec_kernels.decoding.drafting import ChainLayout, DrawnChain
from specdec_kernels.decoding.randomness import row_seeds
from specdec_kernels.tree import DraftTree

from .test_loop_law import LIMIT, NUM_ROWS, PROMPT, VOCAB, law_of, table  # noqa: F401 (a fixture)
from .toy import TableTarget, ToyTarget, chi_square_excess, pad


class MarkovDrafter:
    """Draw chains from a first-order Markov model; rows stop behind an improbable token."""

    def __init__(self, logits, max_nodes=4, threshold=None):
        self.logits, self.max_nodes, self.threshold = logits, max_nodes, threshold
        self.layout, self.drafts = ChainLayout(max_nodes), []

    def bind(self, context):
        self.context = context

    def begin(self, *_):
        pass

    def propose(self, pending):
        chain = DrawnChain(self.context, self.layout, pending, self.max_nodes)
        while chain.wants_more():
            chain.extend(self.logits[chain.last], self.threshold)
        self.drafts.append(chain.draft())
        return self.drafts[-1]

    observe = begin


def draft_logits(seed=6):
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def decoded(target, drafter, prompts, max_new_tokens, **options):
    rows = [[] for _ in prompts]
    options = {"acceptance": RejectionAcceptance(), **options}
    for step in decode(target, drafter, *pad(prompts), max_new_tokens=max_new_tokens, **options):
        for row, tokens in zip(rows, step.tokens, strict=True):
            row += tokens
    return rows


@pytest.mark.parametrize("threshold", [None, 0.3], ids=["all drafts", "early exit"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drawn_chains_leave_the_law_alone(table, temperature, threshold):  # noqa: F811
    drafter = MarkovDrafter(draft_logits(), threshold=threshold)
    target = TableTarget(table, NUM_ROWS, len(PROMPT) + 3 + drafter.max_nodes)
    rows = decoded(target, drafter, [list(PROMPT)] * NUM_ROWS, 3, temperature=temperature, seeds=row_seeds(3, NUM_ROWS))
    counts = torch.zeros(VOCAB, VOCAB, VOCAB)
    counts.index_put_(tuple(torch.tensor(rows).T), torch.tensor(1.0), accumulate=True)
    assert chi_square_excess(counts, law_of(table, temperature)) < LIMIT
    lengths = set(torch.cat([draft.num_nodes for draft in drafter.drafts]).tolist())
    # Rows that have ended draft nothing.
    assert lengths == ({1, 4} if threshold is None else {1, 2, 3, 4})


def test_a_row_does_not_depend_on_its_slot_or_neighbours():
    prompts, seeds = [[3, 1, 4], [5], [2, 2]], torch.tensor([11, 12, 13])
    logits = 3 * torch.randn(13, 13, generator=torch.Generator().manual_seed(2))

    def run(rows):
        drafter = MarkovDrafter(logits, threshold=0.5)
        picked = [prompts[row] for row in rows]
        return decoded(ToyTarget(len(rows), 40), drafter, picked, 12, temperature=1.0, seeds=seeds[rows])

    together = run([0, 1, 2])
    assert together[::-1] == run([2, 1, 0])
    assert together == [run([row])[0] for row in range(3)]


def test_greedy_runs_report_no_distribution_and_equal_plain_decoding():
    prompts = [[3, 1, 4], [5]]
    target, drafter = ToyTarget(2, 40), MarkovDrafter(torch.randn(13, 13), threshold=0.2)
    plain = [target.plain(prompt, 10) for prompt in prompts]
    assert decoded(target, drafter, prompts, 10) == plain
    assert all(draft.logits is None for draft in drafter.drafts)


def test_greedy_and_sampled_rows_share_a_batch():
    target, drafter = ToyTarget(2, 40), MarkovDrafter(torch.randn(13, 13))
    plain = target.plain([3, 1, 4], 10)
    options = {"temperature": torch.tensor([0.0, 1.0]), "seeds": torch.tensor([1, 2])}
    assert decoded(target, drafter, [[3, 1, 4], [3, 1, 4]], 10, **options)[0] == plain


def test_drafts_are_processed_as_the_target_is():
    """Tokens that a filter forbids at this place of the context are never drafted."""
    seen = []

    def forbid_repeats(logits, nodes, *, draft, emitted):
        """Forbid the node's own token and, through the context, the one before it."""
        logits = logits.clone()
        for row, node in enumerate(nodes.tolist()):
            if node >= 0:
                path = [*emitted[row][:-1], *draft.ids[row, : node + 1].tolist()]
                seen.append(node)
                logits[row, path[-2:]] = -torch.inf
        return logits

    logits = 4 * torch.eye(13)  # would repeat itself
    drafter = MarkovDrafter(logits, max_nodes=5)
    options = {"temperature": 1.0, "seeds": torch.tensor([1]), "process_logits": forbid_repeats}
    (row,) = decoded(ToyTarget(1, 40), drafter, [[3]], 20, **options)
    assert max(seen) >= 3
    for draft in drafter.drafts:
        ids = draft.ids[0].tolist()
        assert all(ids[i] not in ids[max(0, i - 2) : i] for i in range(1, len(ids)))
        assert torch.isinf(draft.logits[0, 0, ids[0]])
    assert all(row[i] not in row[max(0, i - 2) : i] for i in range(1, len(row)))


def context_of(batch, finished=None, **options):
    rows = type("Rows", (), {"emitted": [[1]] * batch, "finished": finished or [False] * batch})
    temperature = options.pop("temperature", torch.zeros(batch))
    return DraftContext(ToyTarget(batch, 8), rows, temperature, torch.zeros(batch, dtype=torch.int64), **options)


def test_rows_stop_behind_an_improbable_token_and_at_nan():
    context = context_of(4, [False, False, True, False], is_greedy=True)
    chain = DrawnChain(context, ChainLayout(4), torch.arange(4), 4)
    sure = torch.tensor([0.0, 9.0, 0.0])
    first = torch.stack([sure, torch.zeros(3), sure, torch.full((3,), torch.nan)])
    chain.extend(first, threshold=0.5)
    assert chain.drafting.tolist() == [True, False, False, False]
    chain.extend(sure.expand(4, 3), torch.tensor([0.99999, 0.0, 0.0, 0.0]))
    assert not chain.wants_more()
    draft = chain.draft()
    assert draft.num_nodes.tolist() == [3, 2, 1, 1]
    assert draft.ids[0].tolist() == [0, 1, 1]
    assert (draft.parents.tolist(), draft.depths.tolist(), draft.max_depth) == ([[-1, 0, 1]], [[0, 1, 2]], 2)
    assert torch.equal(draft.tree_mask, DraftTree.chain(2).to_packed_mask()[None])


def test_logits_of_some_tokens_give_the_ids_of_all():
    chains = [DrawnChain(context_of(2, is_greedy=True), ChainLayout(3), torch.arange(2), 3) for _ in range(2)]
    few, token_map = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]]), torch.tensor([6, 2, 4])
    everything = torch.full((2, 7), -torch.inf)
    everything[:, token_map] = few
    chains[0].extend(few, 0.75, token_map=token_map)
    chains[1].extend(everything, 0.75)
    assert chains[0].last.tolist() == chains[1].last.tolist() == [2, 6]
    assert chains[0].drafting.tolist() == chains[1].drafting.tolist() == [True, True]
    assert chains[0].draft().ids.tolist() == [[0, 2], [1, 6]]


def test_chains_cross_a_word_of_the_mask():
    layout = ChainLayout(70)
    for num_nodes in (1, 63, 64, 65, 70):
        assert torch.equal(layout.mask(num_nodes), DraftTree.chain(num_nodes - 1).to_packed_mask()[None])


def test_improbable_numbers_never_draw_a_filtered_token():
    context = context_of(2, is_greedy=False, temperature=torch.ones(2))
    logits = torch.tensor([[0.0, 0.0, -torch.inf]]).expand(2, 3)
    ids, probs = context.draw(logits, torch.tensor([1 - 2**-24, 2**-30]))
    assert ids.tolist() == [1, 0]
    assert probs.tolist() == [0.5, 0.5]
