"""On the CPU in 16 bits, the bits of a node's logits depend on its path alone, so speculation changes no text."""

import pytest
import torch

from specdec_kernels.decoding.protocols import LayerPlan
from specdec_kernels.hf import _chunks
from specdec_kernels.hf import target as target_module
from specdec_kernels.hf.families import FAMILIES
from specdec_kernels.hf.generate import generate
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.hf.target import HFTarget
from specdec_kernels.testing import random_parents
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents

from ..marks import needs_native
from .half_precision import equal_bits
from .test_generate import BATCHES, medusa, oracle
from .tiny import VOCAB, tiny_model

DENSE = sorted(name for name, what in FAMILIES.items() if "experts" not in what)
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
PATHS = [[0, 1, 3, 6, 8], [0, 1, 3, 7], [0, 1, 4], [0, 2, 5]]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tree(parents):
    mask = mask_from_parents(torch.tensor([parents], dtype=torch.int32))
    return mask, depths_from_mask(mask)


def prefilled(model, tokens, batch_size=1):
    target = HFTarget(model, batch_size, 40)
    output = target.prefill(tokens.expand(batch_size, -1), int32(*[tokens.shape[-1]] * batch_size))
    return target, output


def one_by_one(model, tokens):
    """Return the logits ``(len, V)`` after each token, from a prompt of one token and steps of one node."""
    target, output = prefilled(model, tokens[None, :1])
    logits = [output.logits[0, 0]]
    for token in tokens[1:]:
        output = target.forward(token.view(1, 1), *tree([-1]))
        target.commit(torch.empty(1, 0, dtype=torch.int32), int32(0), torch.tensor([True]))
        logits.append(output.logits[0, 0])
    return torch.stack(logits)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


@equal_bits
@pytest.mark.parametrize("family", DENSE)
def test_prompts_chains_and_trees_give_the_bits_of_single_steps(family, dtype, monkeypatch):
    model = tiny_model(family).to(dtype)
    tokens = torch.randint(3, VOCAB, (17,))
    expected = one_by_one(model, tokens)
    for length in (1, 2, 9, 16, 17):
        assert torch.equal(prefilled(model, tokens[None, :length])[1].logits[0, 0], expected[length - 1])
    target, _ = prefilled(model, tokens[None, :8])
    chain = target.forward(tokens[None, 8:], *tree(list(range(-1, 8)))).logits[0]
    assert torch.equal(chain, expected[8:])
    monkeypatch.setattr(_chunks, "PREFILL_CHUNK", 4)  # the last chunk has one token
    assert torch.equal(prefilled(model, tokens[None])[1].logits[0, 0], expected[-1])
    nodes = torch.randint(3, VOCAB, (len(PARENTS),))
    branches = target.forward(nodes[None], *tree(PARENTS)).logits[0]
    for path in PATHS:
        assert torch.equal(branches[path], one_by_one(model, torch.cat([tokens[:8], nodes[path]]))[8:])


@equal_bits
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_layers_run_one_node_at_a_time_give_the_bits_of_whole_steps(family, dtype):
    """What self-speculation does: the first layers while drafting, the others for all nodes at once."""
    model = tiny_model(family).to(dtype)
    tokens = torch.randint(3, VOCAB, (12,))
    target, _ = prefilled(model, tokens[None, :8])
    shallow = []
    for node in range(4):
        mask, depths = tree(list(range(-1, node)))
        ids = tokens[None, 8 + node : 9 + node]
        output = target.run_layers(ids, mask, depths[:, node:], LayerPlan(stop=2), first_node=node)
        shallow.append(output.hidden)
    chain = tree([-1, 0, 1, 2])
    hidden = torch.cat(shallow, dim=1)
    assert hidden.shape == (1, 4, 64)
    output = target.run_layers(tokens[None, 8:], *chain, LayerPlan(start=2), hidden=hidden)
    assert torch.equal(output.logits[0], one_by_one(model, tokens)[8:])
    target, output = prefilled(model, tokens[None, :8])
    lone = target.run_layers(tokens[None, 8:9], *tree([-1]), LayerPlan(start=2), hidden=shallow[0])
    assert torch.equal(lone.logits[0], one_by_one(model, tokens[:9])[8:])


def test_a_tapped_prompt_of_one_token_has_one_state():
    target = HFTarget(tiny_model("llama").bfloat16(), 1, 8)
    target.tap(1)
    assert target.prefill(torch.tensor([[5]]), int32(1)).tapped.shape == (1, 1, 64)


@pytest.mark.parametrize("num_nodes", [1, 5, 63, 64, 65, 128])
def test_a_twin_has_the_ancestors_of_the_last_node(num_nodes):
    parents = random_parents(num_nodes, seed=num_nodes)
    expected = mask_from_parents(torch.tensor([[*parents, parents[-1]]], dtype=torch.int32))
    if num_nodes == 1:
        expected = torch.tensor([[[1], [2]]])
    twins = target_module._with_twin(mask_from_parents(torch.tensor([parents], dtype=torch.int32)))
    assert torch.equal(twins, expected)


@equal_bits
@pytest.mark.parametrize("family", ["gemma2", "llama", "qwen3"])
def test_batches_give_the_bits_of_single_rows(family, dtype):
    model = tiny_model(family).to(dtype)
    tokens = torch.randint(3, VOCAB, (3, 9))
    target = HFTarget(model, 3, 12)
    output = target.prefill(tokens, int32(8, 3, 1))
    step = target.forward(tokens[:, 8:], *tree([-1]))
    for row, length in enumerate((8, 3, 1)):
        alone = one_by_one(model, torch.cat([tokens[row, :length], tokens[row, 8:]]))
        assert torch.equal(output.logits[row, 0], alone[-2])
        assert torch.equal(step.logits[row, 0], alone[-1])


@equal_bits
@pytest.mark.parametrize("batch", BATCHES)
def test_texts_and_logits_are_those_of_plain_decoding(dtype, batch):
    model = tiny_model("llama", initializer_range=0.5).to(dtype)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = generate(model, **BATCHES[batch], drafter=None, **options)
    for drafter in (medusa(model), oracle(BATCHES[batch], plain.sequences)):
        ours = generate(model, **BATCHES[batch], drafter=drafter, **options)
        assert torch.equal(ours.sequences, plain.sequences)
        assert all(torch.equal(a, b) for a, b in zip(ours.logits, plain.logits, strict=True))


@pytest.mark.parametrize(
    ("dtype", "batch_size", "prepares", "rows"),
    [
        ("bfloat16", 1, False, 2),
        ("bfloat16", 2, False, 2),
        ("float32", 1, False, 1),
        pytest.param("bfloat16", 1, True, 1, marks=needs_native),
    ],
)
def test_a_single_row_gets_company_where_it_needs_it(dtype, batch_size, prepares, rows):
    model = tiny_model("llama").to(getattr(torch, dtype))
    if prepares:
        model = prepare(model)
    seen = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, arguments: seen.add(arguments[0][..., 0].numel()))
    target, output = prefilled(model, torch.tensor([[5]]), batch_size)
    assert target.prefix_len.tolist() == [1] * batch_size
    assert output.logits.shape == (batch_size, 1, VOCAB)
    output = target.forward(torch.tensor([[7]]).expand(batch_size, 1), *tree([-1]))
    assert output.logits.shape == (batch_size, 1, VOCAB)
    assert output.hidden.shape == (batch_size, 1, 64)
    assert seen == {rows}


def test_the_last_row_of_a_full_cache_has_room_for_company():
    model = tiny_model("llama").bfloat16()
    target = HFTarget(model, 1, 4)
    assert target.capacity == 4
    target.prefill(torch.tensor([[5, 6, 7]]), int32(3))
    target.forward(torch.tensor([[8]]), *tree([-1]))
    target.commit(torch.empty(1, 0, dtype=torch.int32), int32(0), torch.tensor([True]))
    assert target.prefix_len.tolist() == [4]
