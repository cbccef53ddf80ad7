"""Kangaroo: the text and the law of the target, nothing computed twice, one cache, early exits, chains and trees."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specdec_kernels.decoding import ExitRule
from specdec_kernels.decoding.drafters import KangarooDrafter
from specdec_kernels.hf import HFTarget
from specdec_kernels.modules.kangaroo import KangarooAdapter, Rope, rope_of
from specdec_kernels.tree import DraftTree
from tests.decoding.test_loop_law import LIMIT
from tests.decoding.toy import ToyTarget
from tests.hf.self_drafting import BATCHES, LENGTHS, NEW_TOKENS, excess, generated, law_model
from tests.hf.tiny import VOCAB, tiny_model

NO_EXIT = ExitRule(threshold=0.0, target_rate=None)
# Not sorted by depth, with nodes that have no children on every level.
TREE = DraftTree.from_parents([-1, 0, 1, 2, 0, 1, 4, 0], [0, 0, 0, 0, 1, 1, 0, 3])


def adapter_for(model, exit_layer, kind="layer", vocab_map=None, noise=0.0):
    """An adapter that begins as the model's last layer: right after all others it is the model."""
    config = model.config
    adapter = KangarooAdapter(
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads, exit_layer, rope_of(model),
        dtype=model.dtype, head_dim=getattr(config, "head_dim", None),
        intermediate_size=config.intermediate_size if kind == "layer" else None,
        vocab_map=vocab_map, eps=getattr(config, "rms_norm_eps", 1e-6),
    )  # fmt: skip
    adapter.start_from(model.base_model.layers[-1], model.base_model.norm)
    torch.manual_seed(8)
    for parameter in adapter.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return adapter.requires_grad_(False)


def hopping(model, exit_layer=2, *, tree=None, max_drafts=4, exit_rule=NO_EXIT, **options):
    adapter = adapter_for(model, exit_layer, **options)
    weight = model.get_output_embeddings().weight
    return KangarooDrafter(adapter, weight, max_drafts=max_drafts, tree=tree, exit_rule=exit_rule)


def llama():
    return tiny_model(num_hidden_layers=4)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("model_type", "lengths"), BATCHES, ids=lambda v: v if isinstance(v, str) else f"B{len(v)}")
def test_text_equals_generate(model_type, lengths, tree):
    model = tiny_model(model_type)
    expected, _ = generated(model, lengths=lengths)
    actual, stats = generated(model, hopping(model, tree=tree), lengths)
    assert torch.equal(actual, expected)
    assert stats.num_row_steps > 0


@pytest.mark.parametrize("tree", [None, DraftTree.chain(3)], ids=["chain", "tree"])
def test_an_adapter_that_is_the_last_layer_is_accepted_whole(tree):
    """So it sees the target's hidden states, positions and mask at every node of every row, and its cache is right."""
    model = llama()
    expected, _ = generated(model)
    actual, stats = generated(model, hopping(model, 3, max_drafts=3, tree=tree))
    assert torch.equal(actual, expected)
    assert stats.accepted_histogram == [0, 4, 0, 12]  # of 14 tokens: 1 from the prompt, then 4 + 4 + 4 + 1


@pytest.mark.parametrize("kind", ["layer", "attention"])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_the_caches_after_partial_acceptance_are_right(tree, kind, monkeypatch):
    """Every committed row holds what a forward over the text puts there, in the target's layers and the adapter's."""
    model, targets, lengths = llama(), [], [9, 9]
    commit = HFTarget.commit

    def recording(self, *arguments):
        commit(self, *arguments)
        targets.append(self)

    monkeypatch.setattr(HFTarget, "commit", recording)
    drafter = hopping(model, 3, tree=tree, kind=kind, noise=0.06 if kind == "layer" else 0.0)
    text, stats = generated(model, drafter, lengths)
    assert 0.1 < stats.mean_accepted < 2.8
    length = 9 + NEW_TOKENS - 1
    assert targets[-1].prefix_len.tolist() == [length] * 2
    plain = HFTarget(model, 2, length)
    plain.prefill(text[:, :-1], torch.full((2,), length, dtype=torch.int32))
    plain_rows = [rows.transpose(1, 2) for rows in plain.cache.buffers.unbind()]
    _, *adapter_rows = drafter.adapter.attention_inputs(
        model(text[:, :-1], output_hidden_states=True).hidden_states[3], torch.arange(length)[None]
    )
    for rows, expected in zip(targets[-1].cache.buffers, [*plain_rows, *adapter_rows], strict=True):
        torch.testing.assert_close(rows[:, :length], expected[:, :length], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_no_layer_runs_twice_for_a_node(tree, monkeypatch):
    """Shallow layers see each node once, while drafting; deep layers see all nodes at once, in the verification."""
    model = llama()
    tokens = [0] * 4
    for index, layer in enumerate(model.model.layers):

        def count(_, __, out, index=index):
            tokens[index] += out[0].shape[1]

        layer.self_attn.register_forward_hook(count)
    drafter = hopping(model, 2, max_drafts=3, tree=tree)
    _, stats = generated(model, drafter, [5])
    assert tokens == [5 + stats.num_steps * drafter.max_nodes] * 4


@pytest.mark.parametrize(("kind", "temperature"), [("chain", 1.0), ("tree", 0.7), ("reduced vocabulary", 0.7)])
def test_sampled_text_has_the_targets_law(kind, temperature):
    rule = ExitRule(threshold=0.3, target_rate=None)
    tree = DraftTree.from_choices([[0], [1], [0, 0], [1, 2]]) if kind == "tree" else None
    vocab_map = torch.tensor([0, 2, 3]) if kind == "reduced vocabulary" else None
    drafter = hopping(law_model(), 2, max_drafts=2, tree=tree, exit_rule=rule, vocab_map=vocab_map)
    assert excess(law_model(), drafter, temperature) < LIMIT


def test_a_misreported_distribution_is_found_out(monkeypatch):
    """The negative control of the test above."""
    propose = KangarooDrafter.propose

    def lie(self, pending):
        draft = propose(self, pending)
        return draft._replace(logits=torch.zeros_like(draft.logits))

    monkeypatch.setattr(KangarooDrafter, "propose", lie)
    assert excess(law_model(), hopping(law_model(), 2, max_drafts=2), 1.0) > 2 * LIMIT


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_a_rows_sample_does_not_depend_on_the_batch(tree):
    model = llama()
    rule = ExitRule(threshold=0.15, step=0.1)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    together, stats = generated(model, hopping(model, 3, tree=tree, exit_rule=rule), seed=[5, 6, 7, 8], **options)
    assert stats.mean_accepted > 0.2
    for row, length in enumerate(LENGTHS):
        drafter = hopping(model, 3, tree=tree, exit_rule=rule)
        alone, _ = generated(model, drafter, [length], seed=[5 + row], **options)
        assert torch.equal(alone[0, length:], together[row, max(LENGTHS) :])


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_filtered_tokens_are_not_drafted(tree):
    """With a filter on, a perfect adapter stays perfect: its distribution is filtered as the target's is."""
    model = llama()
    options = {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "suppress_tokens": [7, 8]}
    expected, _ = generated(model, **options)
    actual, stats = generated(model, hopping(model, 3, max_drafts=3, tree=tree), **options)
    assert torch.equal(actual, expected)
    assert stats.accepted_histogram[0] == 0


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_stops_at_the_limit_and_at_eos_inside_a_draft(max_new_tokens, tree):
    model = llama()
    options = {"max_new_tokens": max_new_tokens}
    assert torch.equal(generated(model, hopping(model, 3, tree=tree), **options)[0], generated(model, **options)[0])
    eos = int(generated(model)[0][0, max(LENGTHS) + 5])
    options = {"eos_token_id": eos}
    assert torch.equal(generated(model, hopping(model, 3, tree=tree), **options)[0], generated(model, **options)[0])


def drafts_of(drafter):
    """Record what a drafter proposes."""
    drafts, propose = [], drafter.propose
    drafter.propose = lambda pending: drafts.append(propose(pending)) or drafts[-1]
    return drafts


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_rows_stop_drafting_on_their_own(tree):
    model = llama()
    drafter = hopping(model, 2, max_drafts=5, tree=tree, exit_rule=ExitRule(threshold=0.1, step=0.05))
    drafts = drafts_of(drafter)
    expected, _ = generated(model)
    assert torch.equal(generated(model, drafter)[0], expected)
    counts = [draft.num_nodes.tolist() for draft in drafts]
    assert any(len({n for n in nodes if n > 1}) > 1 for nodes in counts), "rows of one step differ"
    assert all(max(nodes) == draft.ids.shape[1] for nodes, draft in zip(counts, drafts, strict=True))
    assert drafter.exits.threshold.unique().numel() > 1


def test_a_sure_stop_drafts_one_level():
    model = llama()
    rule = ExitRule(threshold=1.0, target_rate=None)
    for tree, nodes in ((None, 2), (TREE, 4)):
        drafter = hopping(model, 2, max_drafts=5, tree=tree, exit_rule=rule)
        drafts = drafts_of(drafter)
        generated(model, drafter, [9])
        assert {draft.ids.shape[1] for draft in drafts} == {nodes}
        assert {draft.max_depth for draft in drafts} == {1}


@pytest.mark.parametrize("kind", ["layer", "attention"])
def test_a_tree_holds_the_adapters_best_candidates_of_every_node(kind):
    """What the adapter, both kinds of it, makes of the node's whole text in one forward without any cache."""
    model = llama()
    vocab_map = torch.arange(3, VOCAB, 2)
    drafter = hopping(model, 2, tree=TREE, kind=kind, vocab_map=vocab_map)
    drafts = drafts_of(drafter)
    text, _ = generated(model, drafter, [9], max_new_tokens=6)
    draft, prefix = drafts[0], text[0, :9]
    own, weight = drafter.adapter, model.get_output_embeddings().weight[vocab_map]
    tree = drafter.tree
    assert list(tree.depths) == sorted(tree.depths)
    assert sorted(tree.to_choices()) == sorted(TREE.to_choices())
    for node in range(1, tree.num_nodes):
        path = tree.path(tree.parents[node])
        ids = torch.cat([prefix, draft.ids[0, list(path)]])[None]
        hidden = model(ids, output_hidden_states=True).hidden_states[2]
        order = (own(hidden)[0, -1] @ weight.T).argsort(descending=True)
        assert draft.ids[0, node] == vocab_map[order[tree.ranks[node]]]
    assert draft.logits is None


class Grafting:
    """Add one more node below the root to the chains of a drafter."""

    def __init__(self, inner):
        self.inner, self.max_nodes = inner, inner.max_nodes + 1
        self.bind, self.begin, self.observe = inner.bind, inner.begin, inner.observe

    def propose(self, pending):
        draft = self.inner.propose(pending)
        tree = DraftTree.from_parents([-1, 0, 1, 0])
        ids = torch.cat([draft.ids, (draft.ids[:, 1:2] + 1) % VOCAB], dim=1)
        mask, depths = tree.to_packed_mask()[None], tree.to_depths_tensor()[None]
        hidden, _ = self.inner.run_nodes(ids[:, 3:], mask, depths[:, 3:], 3)
        return draft._replace(
            ids=ids, parents=tree.to_parents_tensor()[None], tree_mask=mask, depths=depths, num_nodes=None,
            hidden=torch.cat([draft.hidden, hidden], dim=1),
        )  # fmt: skip


def test_others_may_add_nodes_to_a_draft():
    model = llama()
    expected, _ = generated(model, lengths=[9, 3])
    actual, stats = generated(model, Grafting(hopping(model, 3, max_drafts=2)), [9, 3])
    assert torch.equal(actual, expected)
    assert stats.accepted_histogram == [0, 2, 8]  # of 14 tokens: 1 from the prompt, then 3 + 3 + 3 + 3 + 1


def test_misuse_is_refused():
    model = llama()
    weight = model.get_output_embeddings().weight
    adapter = adapter_for(model, 2, vocab_map=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="the tree has rank 3, but 2 tokens are drafted"):
        KangarooDrafter(adapter, weight, tree=TREE)
    with pytest.raises(ValueError, match=r"shape \(97, 64\), got \(97, 65\)"):
        KangarooDrafter(adapter, torch.zeros(97, 65))
    with pytest.raises(ValueError, match="max_drafts must be in"):
        KangarooDrafter(adapter, weight, max_drafts=0)
    with pytest.raises(TypeError, match=r"run in part .LayeredTarget., got ToyTarget"):
        KangarooDrafter(adapter, weight).bind(type("Context", (), {"target": ToyTarget(1, 9)})())
    with pytest.raises(RuntimeError, match="calls bind and begin"):
        KangarooDrafter(adapter, weight).propose(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"got start 0, stop 4"):
        generated(model, hopping(model, 4))


def test_filters_reach_the_rows_of_a_reduced_vocabulary():
    model, vocab_map = llama(), torch.arange(3, VOCAB, 2)
    suppressed = vocab_map[::2].tolist()
    for tree in (None, TREE):
        drafter = hopping(model, 3, tree=tree, vocab_map=vocab_map)
        drafts = drafts_of(drafter)
        expected, _ = generated(model, suppress_tokens=suppressed)
        assert torch.equal(generated(model, drafter, suppress_tokens=suppressed)[0], expected)
        drafted = {token for draft in drafts for token in draft.ids[0, 1:].tolist()}
        assert len(drafted) > 3
        assert drafted <= set(vocab_map.tolist()) - set(suppressed)


def test_a_public_folder_needs_the_exit_layer(tmp_path):
    """It says nothing of layers and rotary positions; its weights are a pickle."""
    model = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    adapter = adapter_for(model, 2, "attention")
    adapter.save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    heads = {"hidden_size": 64, "num_attention_heads": adapter.num_heads, "vocab_size": VOCAB, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**heads, "intermediate_size": 999, "rms_norm_eps": adapter.eps}))
    with pytest.raises(ValueError, match="names no exit_layer"):
        KangarooDrafter.from_pretrained(tmp_path, model)
    loaded = KangarooDrafter.from_pretrained(tmp_path, model, exit_layer=2, exit_rule=NO_EXIT)
    expected, plain_stats = generated(model, KangarooDrafter(adapter, loaded._weight, exit_rule=NO_EXIT))
    actual, stats = generated(model, loaded)
    assert torch.equal(actual, expected)
    assert stats.accepted_histogram == plain_stats.accepted_histogram


def test_loads_a_folder_with_the_models_rope_and_a_tree(tmp_path):
    model = tiny_model(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 777.0})
    adapter = adapter_for(model, 2, "attention")
    KangarooDrafter(adapter, model.get_output_embeddings().weight).save_pretrained(tmp_path)
    loaded = KangarooDrafter.from_pretrained(tmp_path, model)
    assert torch.equal(loaded.adapter.inv_freq, model.model.rotary_emb.inv_freq)
    assert not torch.allclose(loaded.adapter.inv_freq, 1e4 ** (-torch.arange(0, 16, 2) / 16))
    assert loaded.tree is None
    assert not any(parameter.requires_grad for parameter in loaded.adapter.parameters())
    expected, _ = generated(model)
    assert torch.equal(generated(model, loaded)[0], expected)
    hopping(model, 2, tree=TREE).save_pretrained(tmp_path)
    assert sorted(KangarooDrafter.from_pretrained(tmp_path, model).tree.to_choices()) == sorted(TREE.to_choices())
    assert KangarooDrafter.from_pretrained(tmp_path, model, tree=DraftTree.chain(2)).max_nodes == 3


def test_rope_of_a_model_with_two_kinds_is_that_of_full_attention():
    model = tiny_model("gemma3_text")
    rope = rope_of(model)
    assert isinstance(rope, Rope)
    assert rope.inv_freq.shape == (12,)
    with pytest.raises(NotImplementedError, match="Linear keeps no rotary frequencies"):
        rope_of(type("Linear", (), {"base_model": None})())
