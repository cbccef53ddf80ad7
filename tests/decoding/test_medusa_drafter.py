"""The Medusa drafter: which token goes to which node, whose hidden state counts, and the files."""

import types

import pytest
import torch

from specdec_kernels.decoding import DynamicTree, GreedyAcceptance, TargetOutput, decode
from specdec_kernels.decoding.drafters import MedusaDrafter, MergedDrafter
from specdec_kernels.decoding.dynamic_tree import grow_best_first
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.tree import DraftTree, depths_from_mask, mask_from_parents
from specdec_kernels.types import Verification

from .toy import ToyTarget, pad

VOCAB, HIDDEN = 32, 8
TREE = DraftTree.from_choices([[0], [2], [0, 1], [2, 0], [2, 3], [0, 1, 0]])


def random_heads(num_heads=3, **options):
    heads = MedusaHeads(num_heads, 2, HIDDEN, VOCAB, **options)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads.requires_grad_(False)


def output_of(hidden):
    return TargetOutput(torch.zeros(*hidden.shape[:2], VOCAB), hidden)


def model_with(weight, embedding=None):
    return types.SimpleNamespace(
        get_output_embeddings=lambda: types.SimpleNamespace(weight=weight),
        get_input_embeddings=lambda: types.SimpleNamespace(weight=embedding),
    )


def started(drafter, batch=3):
    """Begin with random hidden states and return them."""
    hidden = torch.randn(batch, 1, HIDDEN)
    drafter.begin(torch.zeros(batch, 1, dtype=torch.int64), torch.ones(batch, dtype=torch.int32), output_of(hidden))
    return hidden[:, 0]


@pytest.mark.parametrize("kind", ["shared", "own", "reduced vocabulary"])
def test_a_node_holds_the_candidate_of_its_depth_and_rank(kind):
    vocab_map = torch.tensor([1, 5, 6, 9, 20, 30]) if kind == "reduced vocabulary" else None
    heads = random_heads(own_projection=kind == "own", vocab_map=vocab_map)
    weight = None if kind == "own" else torch.randn(VOCAB, HIDDEN)
    drafter = MedusaDrafter(heads, TREE, weight)
    hidden = started(drafter)
    draft = drafter.propose(torch.tensor([7, 8, 9]))
    logits = heads(hidden, None if weight is None else heads.select_rows(weight))
    order = logits.argsort(dim=-1, descending=True)
    order = order if vocab_map is None else vocab_map[order]
    assert draft.ids[:, 0].tolist() == [7, 8, 9]
    for node, (depth, rank) in enumerate(zip(TREE.depths, TREE.ranks, strict=True)):
        if node:
            assert torch.equal(draft.ids[:, node], order[:, depth - 1, rank])


def test_root_conditioned_heads_see_the_pending_tokens():
    heads, weight, embedding = random_heads(root_conditioned=True), torch.randn(VOCAB, HIDDEN), torch.randn(40, HIDDEN)
    drafter = MedusaDrafter(heads, TREE, weight, embedding)
    hidden = started(drafter)
    pending = torch.tensor([7, 39, 7])
    draft = drafter.propose(pending)
    order = heads(hidden, weight, embedding[pending]).argsort(dim=-1, descending=True)
    for node, (depth, rank) in enumerate(zip(TREE.depths, TREE.ranks, strict=True)):
        if node:
            assert torch.equal(draft.ids[:, node], order[:, depth - 1, rank])


@pytest.mark.parametrize("root_conditioned", [False, True])
@pytest.mark.parametrize(
    "tree", [TREE, DynamicTree(12, 5), DynamicTree(12, 5, 1e-30)], ids=["fixed", "dynamic", "likely"]
)
def test_drafting_merging_and_observing_wait_for_nothing(tree, root_conditioned):
    """On the meta device there is nothing to wait for: whoever asked for a value would raise."""

    def shapes(device):
        heads = random_heads(root_conditioned=root_conditioned).to(device)
        weight, embedding = torch.randn(VOCAB, HIDDEN, device=device), torch.randn(40, HIDDEN, device=device)
        options = {"embedding_weight": embedding} if root_conditioned else {}
        first, other = (MedusaDrafter(heads, shape, weight, **options) for shape in (tree, DraftTree.chain(3)))
        drafter = MergedDrafter(first, other)
        hidden = torch.randn(3, 1, HIDDEN, device=device)
        ids, lengths = torch.zeros(3, 1, dtype=torch.int64, device=device), torch.ones(3, device=device).int()
        drafter.begin(ids, lengths, output_of(hidden))
        drafts = [first.propose(ids[:, 0]), drafter.propose(ids[:, 0])]
        path = torch.zeros(3, 3, dtype=torch.int32, device=device)
        output = output_of(torch.randn(3, drafts[1].ids.shape[1], HIDDEN, device=device))
        drafter.observe(drafts[1], output, Verification(ids.expand(3, 4), lengths, path), lengths > 0)
        drafts.append(drafter.propose(ids[:, 0]))
        return [[getattr(value, "shape", value) for value in draft] for draft in drafts]

    alone, merged, again = shapes("meta")
    used = alone.pop(6)
    assert (used is None) == (getattr(tree, "min_prob", 0.0) == 0.0), "what nobody may look at may be anything"
    on_cpu = shapes("cpu")[0]
    del on_cpu[6]
    assert alone == on_cpu
    # Nobody has looked how many nodes the two have in common.
    assert merged[0] == again[0] == (3, alone[0][1] + 3)


def test_a_dynamic_tree_has_the_likeliest_nodes_of_each_row():
    heads, weight = random_heads(), torch.randn(VOCAB, HIDDEN)
    drafter = MedusaDrafter(heads, DynamicTree(12, 5), weight)
    hidden = started(drafter)
    draft = drafter.propose(torch.tensor([7, 8, 9]))
    log_probs, ids = heads(hidden, weight).log_softmax(-1).sort(dim=-1, descending=True)
    trees = grow_best_first(log_probs[..., :5].contiguous(), 12)
    assert (drafter.max_nodes, draft.max_depth) == (12, 3)
    assert torch.equal(draft.parents, trees.parents)
    assert not torch.equal(draft.parents[0], draft.parents[1])
    assert torch.equal(draft.ids[:, 1:], ids[..., :5].flatten(1).gather(1, trees.columns))
    assert draft.ids[:, 0].tolist() == [7, 8, 9]
    assert torch.equal(draft.tree_mask, mask_from_parents(draft.parents))
    assert torch.equal(draft.depths, depths_from_mask(draft.tree_mask))
    assert draft.logits is None
    assert draft.num_nodes is None


@pytest.mark.parametrize("host_paths", [0, 512])
def test_a_dynamic_tree_has_no_nodes_that_are_too_unlikely(host_paths, monkeypatch):
    """Each row its own number, and the draft is as wide as the widest."""
    monkeypatch.setattr("specdec_kernels.decoding.drafters.medusa.HOST_PATHS", host_paths)
    heads, weight = random_heads(), torch.randn(VOCAB, HIDDEN)
    whole, likely = (MedusaDrafter(heads, DynamicTree(12, 5, p), weight) for p in (0.0, 0.2))
    hidden = started(whole)
    likely.begin(None, None, output_of(hidden[:, None]))
    pending = torch.tensor([7, 8, 9])
    expected, draft = whole.propose(pending), likely.propose(pending)
    best = heads(hidden, weight).softmax(-1).topk(5).values
    columns = grow_best_first(best.log(), 12).columns
    for row, used in enumerate(draft.num_nodes.tolist()):
        assert torch.equal(draft.ids[row, :used], expected.ids[row, :used])
        assert torch.equal(draft.parents[row, :used], expected.parents[row, :used])
        prob = [1.0]
        for parent, column in zip(expected.parents[row, 1:].tolist(), columns[row].tolist(), strict=True):
            prob.append(prob[parent] * float(best[row].flatten()[column]))
        assert used == sum(p >= 0.2 for p in prob)
    assert draft.ids.shape[1] == int(draft.num_nodes.max()) < 12
    assert len(set(draft.num_nodes.tolist())) > 1
    assert (likely.max_nodes, draft.max_depth < draft.ids.shape[1]) == (12, True)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 99])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_a_limit_of_the_run_gives_the_draft_of_a_smaller_tree(dynamic, limit):
    heads, weight = random_heads(), torch.randn(VOCAB, HIDDEN)
    trees = [DynamicTree(n, 6) if dynamic else TREE.prefix(min(n, 7)) for n in (7, min(limit, 7))]
    drafter, small = (MedusaDrafter(heads, tree, weight) for tree in trees)
    hidden = started(drafter)
    small.begin(None, None, output_of(hidden[:, None]))
    drafter.bind(types.SimpleNamespace(max_nodes=limit))
    pending = torch.tensor([7, 8, 9])
    limited, expected = drafter.propose(pending), small.propose(pending)
    assert limited.max_depth == expected.max_depth
    for name in ("ids", "parents", "tree_mask", "depths"):
        assert torch.equal(getattr(limited, name), getattr(expected, name))


@pytest.mark.parametrize(("num_rows", "tree", "size"), [(3, DynamicTree(64), 40), (20, DynamicTree(1), 1)])
def test_a_dynamic_tree_is_no_larger_than_what_there_is(num_rows, tree, size):
    heads = random_heads(vocab_map=torch.arange(num_rows))
    drafter = MedusaDrafter(heads, tree, torch.randn(VOCAB, HIDDEN))
    started(drafter)
    assert drafter.max_nodes == size
    assert drafter.propose(torch.tensor([7, 8, 9])).ids.shape == (3, size)


def test_the_draft_describes_its_tree():
    drafter = MedusaDrafter(random_heads(), TREE, torch.randn(VOCAB, HIDDEN))
    started(drafter)
    draft = drafter.propose(torch.tensor([1, 2, 3]))
    assert (drafter.max_nodes, draft.max_depth) == (TREE.num_nodes, 3)
    assert draft.ids.shape == (3, 7)
    assert draft.parents.tolist() == [list(TREE.parents)]
    assert draft.depths.tolist() == [list(TREE.depths)]
    assert torch.equal(draft.tree_mask, TREE.to_packed_mask()[None])
    assert draft.parents.dtype == draft.depths.dtype == torch.int32
    assert draft.logits is None
    assert draft.num_nodes is None


def test_each_row_continues_from_its_last_accepted_node():
    drafter = MedusaDrafter(random_heads(), TREE, torch.randn(VOCAB, HIDDEN))
    started(drafter)
    draft = drafter.propose(torch.tensor([1, 2, 3]))
    hidden = torch.randn(3, TREE.num_nodes, HIDDEN)
    accepted = torch.tensor([[1, 3, 6], [2, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    verification = Verification(torch.zeros(3, 4, dtype=torch.int64), torch.tensor([3, 1, 0]).int(), accepted)
    drafter.observe(draft, output_of(hidden), verification, torch.ones(3, dtype=torch.bool))
    after = drafter.propose(torch.tensor([4, 5, 6])).ids
    for row, node in enumerate([6, 2, 0]):
        alone = MedusaDrafter(drafter.heads, TREE, drafter._shared_weight)
        chosen = hidden[row, node][None, None]
        alone.begin(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int32), output_of(chosen))
        assert torch.equal(alone.propose(torch.tensor([4 + row])).ids[0], after[row])


def test_a_tree_of_the_root_alone_asks_no_head():
    drafter = MedusaDrafter(random_heads(), DraftTree.chain(0), torch.randn(VOCAB, HIDDEN))
    started(drafter)
    drafter.heads = None
    draft = drafter.propose(torch.tensor([4, 5, 6]))
    assert draft.ids.tolist() == [[4], [5], [6]]
    empty = Verification(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3).int(), torch.zeros(3, 0).int())
    drafter.observe(draft, output_of(torch.randn(3, 1, HIDDEN)), empty, torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("tree", [TREE, DynamicTree(9)], ids=["fixed", "dynamic"])
def test_decodes_as_plain_decoding_does(tree):
    """The toy target's hidden states are zeros: the drafts are constant, the text must not care."""
    prompts = [[3, 1, 4], [5]]
    target = ToyTarget(2, 40)
    plain = [target.plain(prompt, 10) for prompt in prompts]
    heads = MedusaHeads(3, 1, 1, 13)
    drafter = MedusaDrafter(heads, tree, torch.randn(13, 1))
    steps = decode(target, drafter, *pad(prompts), acceptance=GreedyAcceptance(), max_new_tokens=10)
    rows = [[], []]
    for step in steps:
        for row, tokens in zip(rows, step.tokens, strict=True):
            row += tokens
    assert rows == plain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MedusaDrafter(random_heads(2), TREE, torch.randn(VOCAB, HIDDEN)), "3 deep, but there are 2 heads"),
        (
            lambda: MedusaDrafter(random_heads(vocab_map=torch.tensor([4, 5])), TREE, torch.randn(VOCAB, HIDDEN)),
            "rank 2, but top_k is 2",
        ),
        (lambda: MedusaDrafter(random_heads(), TREE), "lm_head_weight must be given"),
        (
            lambda: MedusaDrafter(random_heads(own_projection=True), TREE, torch.randn(VOCAB, HIDDEN)),
            "lm_head_weight must not be given",
        ),
        (
            lambda: MedusaDrafter(random_heads(root_conditioned=True), TREE, torch.randn(VOCAB, HIDDEN)),
            "embedding_weight must be given: these heads are root-conditioned",
        ),
        (
            lambda: MedusaDrafter(random_heads(), TREE, *torch.randn(2, VOCAB, HIDDEN)),
            "embedding_weight must not be given: these heads are not root-conditioned",
        ),
        (
            lambda: MedusaDrafter(
                random_heads(root_conditioned=True), TREE, torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, 9)
            ),
            "embeddings of size 8, got 9",
        ),
        (lambda: MedusaDrafter(random_heads(), TREE, torch.randn(VOCAB, 9)), r"shape \(32, 8\), got \(32, 9\)"),
        (lambda: MedusaDrafter(random_heads(), TREE, torch.randn(31, HIDDEN)), r"\(32, 8\), got \(31, 8\)"),
    ],
    ids=[
        "too deep",
        "rank",
        "missing",
        "not wanted",
        "no embedding",
        "unwanted embedding",
        "embedding size",
        "hidden size",
        "vocabulary",
    ],
)
def test_rejects(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_propose_before_begin():
    with pytest.raises(RuntimeError, match="call begin first"):
        MedusaDrafter(random_heads(), TREE, torch.randn(VOCAB, HIDDEN)).propose(torch.tensor([1]))


@pytest.mark.parametrize("root_conditioned", [False, True])
@pytest.mark.parametrize("own_projection", [False, True])
def test_saves_and_loads(tmp_path, own_projection, root_conditioned):
    weight, embedding = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    heads = random_heads(own_projection=own_projection, root_conditioned=root_conditioned)
    drafter = MedusaDrafter(heads, TREE, None if own_projection else weight, embedding if root_conditioned else None)
    drafter.tree_metadata = {"expected_tokens_per_step": 1.5}
    drafter.save_pretrained(tmp_path)
    model = model_with(weight, embedding)
    loaded = MedusaDrafter.from_pretrained(tmp_path, model)
    assert loaded.tree == TREE
    assert loaded.tree_metadata == {"expected_tokens_per_step": 1.5}
    assert not any(parameter.requires_grad for parameter in loaded.heads.parameters())
    hidden = started(drafter)
    loaded.begin(None, None, output_of(hidden[:, None]))
    pending = torch.tensor([1, 2, 3])
    assert torch.equal(loaded.propose(pending).ids, drafter.propose(pending).ids)
    again = MedusaDrafter.from_pretrained(tmp_path, model, tree=DraftTree.chain(2))
    assert again.tree == DraftTree.chain(2)


def test_saves_and_loads_a_dynamic_tree(tmp_path):
    weight = torch.randn(VOCAB, HIDDEN)
    drafter = MedusaDrafter(random_heads(), DynamicTree(10, 4, 0.25), weight)
    drafter.tree_metadata = {"source": "a test"}
    drafter.save_pretrained(tmp_path)
    loaded = MedusaDrafter.from_pretrained(tmp_path, model_with(weight))
    assert loaded.tree == DynamicTree(10, 4, 0.25)
    assert loaded.tree_metadata == {"source": "a test"}
    assert MedusaDrafter.from_pretrained(tmp_path, model_with(weight), tree=DynamicTree(3)).tree == DynamicTree(3)


def test_without_a_tree_file_the_default_tree_fits_the_heads(tmp_path):
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16)
    random_heads(2).save_pretrained(tmp_path)
    model = model_with(weight)
    drafter = MedusaDrafter.from_pretrained(tmp_path, model)
    assert drafter.tree.max_depth == 2
    assert drafter.max_nodes > 10
    assert drafter.heads.w_res.dtype == torch.bfloat16


@pytest.mark.parametrize("own_projection", [False, True])
@pytest.mark.parametrize("shape", [(VOCAB, HIDDEN + 1), (VOCAB + 1, HIDDEN)])
def test_heads_of_another_model_are_refused(tmp_path, own_projection, shape):
    random_heads(own_projection=own_projection).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the heads are made for an lm_head weight of shape \\(32, 8\\)"):
        MedusaDrafter.from_pretrained(tmp_path, model_with(torch.randn(shape)))
