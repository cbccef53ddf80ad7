"""The target's contract on a tiny Llama."""

import threading

import pytest
import torch

from specdec_kernels.hf import _chunks
from specdec_kernels.hf.target import HFTarget
from specdec_kernels.tree.mask import depths_from_mask, mask_from_parents
from tests.hf.tiny import VOCAB, path_logits, tiny_model


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tree(*parents):
    mask = mask_from_parents(torch.tensor([parents], dtype=torch.int32))
    return mask, depths_from_mask(mask)


ROOT = tree(-1)
PROMPTS = torch.arange(3, 25).view(2, 11)


@pytest.fixture
def model():
    return tiny_model(attn_implementation="sdpa")


def greedy_tokens(model, prompts, lengths, count, chain=1):
    """Decode greedily in steps of ``chain`` nodes, all but the root wrong or right as luck has it."""
    target = HFTarget(model, len(lengths), capacity=prompts.shape[1] + count + chain)
    token = target.prefill(prompts, int32(*lengths)).logits[:, 0].argmax(-1)
    tokens = [token]
    nothing = torch.full((len(lengths), chain - 1), -1, dtype=torch.int32)
    while len(tokens) < count:
        nodes = torch.cat([token[:, None], torch.randint(3, VOCAB, (len(lengths), chain - 1))], dim=1)
        output = target.forward(nodes, *tree(*range(-1, chain - 1)))
        target.commit(nothing, torch.zeros_like(target.prefix_len), torch.ones(len(lengths), dtype=torch.bool))
        token = output.logits[:, 0].argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, dim=1)


@pytest.mark.parametrize("chain", [1, 5])
@pytest.mark.parametrize("lengths", [[11, 4], [1, 11], [3, 3]], ids=str)
def test_greedy_decoding_equals_generate_with_left_padding(model, lengths, chain):
    """Positions count from the first token of each row, as `generate` derives them from a left-padded mask."""
    width = max(lengths)
    padded, mask = torch.zeros(2, width, dtype=torch.int64), torch.zeros(2, width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        padded[row, width - length :] = PROMPTS[row, :length]
        mask[row, width - length :] = 1
    expected = model.generate(
        padded, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )[:, width:]
    assert torch.equal(greedy_tokens(model, PROMPTS[:, :width], lengths, 8, chain), expected)


def test_hidden_states_are_those_after_the_last_norm(model):
    target = HFTarget(model, 1, 32)
    output = target.prefill(PROMPTS[:1, :7], int32(7))
    own = model(PROMPTS[:1, :10], output_hidden_states=True)
    torch.testing.assert_close(output.hidden, own.hidden_states[-1][:, 6:7])
    output = target.forward(PROMPTS[:1, 7:10], *tree(-1, 0, 1))
    torch.testing.assert_close(output.hidden, own.hidden_states[-1][:, 7:10])
    torch.testing.assert_close(model.lm_head(output.hidden), output.logits)


def test_prefill_projects_only_the_last_tokens(model, monkeypatch):
    monkeypatch.setattr(_chunks, "PREFILL_CHUNK", 4)
    sizes = []
    model.lm_head.register_forward_hook(lambda _, __, logits: sizes.append(tuple(logits.shape)))
    output = HFTarget(model, 2, 16).prefill(PROMPTS, int32(11, 2))
    assert sizes == [(2, 0, VOCAB), (1, 0, VOCAB), (2, 1, VOCAB)]
    assert output.logits.shape == (2, 1, VOCAB)
    assert output.hidden.shape == (2, 1, 64)


@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
def test_chunks_do_not_change_the_prefill(model, monkeypatch, chunk):
    whole = HFTarget(model, 2, 16).prefill(PROMPTS, int32(11, 4))
    monkeypatch.setattr(_chunks, "PREFILL_CHUNK", chunk)
    parts = HFTarget(model, 2, 16).prefill(PROMPTS, int32(11, 4))
    torch.testing.assert_close(parts.logits, whole.logits)
    torch.testing.assert_close(parts.hidden, whole.hidden)


def test_padding_ids_do_not_matter(model):
    clean = HFTarget(model, 2, 16)
    expected = clean.prefill(PROMPTS, int32(11, 4)).logits
    dirty = PROMPTS.clone()
    dirty[1, 4:] = -1
    dirty[1, 7:] = VOCAB + 5
    target = HFTarget(model, 2, 16)
    assert torch.equal(target.prefill(dirty, int32(11, 4)).logits, expected)
    assert dirty[1, 4] == -1, "the argument is not written to"
    assert target.prefix_len.tolist() == [11, 4]


def test_prefill_starts_over(model):
    target = HFTarget(model, 2, 16)
    first = target.prefill(PROMPTS, int32(11, 4)).logits
    target.forward(PROMPTS[:, :3], *tree(-1, 0, 0))
    assert torch.equal(target.prefill(PROMPTS, int32(11, 4)).logits, first)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 9])
@pytest.mark.parametrize("chosen", [[0, 1, 2], [1], [0, 2]], ids=str)
def test_refill_replaces_one_row_and_no_other(model, monkeypatch, num_tokens, chosen):
    """Also in the very first step, across chunks, and with any rows chosen to run."""
    monkeypatch.setattr(_chunks, "PREFILL_CHUNK", 4)
    prompts, nodes = torch.randint(3, VOCAB, (3, 9)), torch.randint(3, VOCAB, (3, 2))
    target, everything = HFTarget(model, 3, 24), torch.ones(3, dtype=torch.bool)
    for row, length in enumerate((5, 9, 2)):
        target.refill(row, prompts[row, :length])
    target.forward(nodes, *tree(-1, 0))
    target.commit(int32([1], [1], [1]), int32(0, 1, 0), everything)
    target.run_only(chosen)
    target.refill(1, prompts[2, :num_tokens])
    assert target.prefix_len.tolist() == [6, num_tokens, 3]
    output = target.forward(nodes, *tree(-1, 0))
    texts = [[*prompts[0, :5], nodes[0, 0]], prompts[2, :num_tokens], [*prompts[2, :2], nodes[2, 0]]]
    for row in chosen:
        ids = torch.tensor([*texts[row], *nodes[row]])
        torch.testing.assert_close(output.logits[row], model(ids[None]).logits[0, -2:])


def test_refill_that_does_not_fit_leaves_the_row_empty(model):
    target = HFTarget(model, 2, 12)
    target.prefill(PROMPTS, int32(11, 4))
    with pytest.raises(ValueError, match="capacity is 12"):
        target.refill(1, PROMPTS[0, :4])
    assert target.prefix_len.tolist() == [11, 0]
    target.refill(0, PROMPTS[0, :10])
    target.refill(1, PROMPTS[0, :1])
    assert target.prefix_len.tolist() == [10, 1]


def test_lengths_given_by_the_caller_stay_his(model):
    target, lengths = HFTarget(model, 2, 16), int32(11, 4)
    target.prefill(PROMPTS, lengths)
    lengths.fill_(1)
    assert target.prefix_len.tolist() == [11, 4]


def test_attention_is_switched_only_during_a_forward(model):
    target = HFTarget(model, 1, 16)
    seen = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: seen.append(model.config._attn_implementation))
    target.prefill(PROMPTS[:1], int32(11))
    handle.remove()
    assert seen == ["specdec_tree"]
    assert model.config._attn_implementation == "sdpa"
    assert not model.lm_head._forward_pre_hooks


def test_everything_is_restored_when_the_model_fails(model):
    target = HFTarget(model, 1, 16)
    target.prefill(PROMPTS[:1], int32(11))

    def fail(*_):
        raise KeyError("from the model")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyError, match="from the model"):
        target.forward(PROMPTS[:1, :2], *tree(-1, 0))
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert not model.lm_head._forward_pre_hooks
    assert target.prefix_len.tolist() == [11]
    target.forward(PROMPTS[:1, :2], *tree(-1, 0))


def test_two_targets_may_share_a_model_and_models_a_config(model):
    draft = type(model)(model.config).eval()
    targets = [HFTarget(m, 1, 16) for m in (model, draft, model)]
    outputs = [t.prefill(PROMPTS[:1], int32(11)).logits for t in targets]
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_outputs_may_enter_a_graph_afterwards(model):
    """Heads are trained on hidden states, which inference tensors would forbid."""
    output = HFTarget(model, 1, 16).prefill(PROMPTS[:1], int32(11))
    assert not output.hidden.requires_grad
    assert not output.hidden.is_inference()
    head = torch.nn.Linear(64, 2)
    head(output.hidden).sum().backward()
    assert head.weight.grad is not None


def test_training_mode_is_refused_and_left_alone(model):
    target = HFTarget(model.train(), 1, 16)
    with pytest.raises(RuntimeError, match=r"training mode; call model.eval\(\)"):
        target.prefill(PROMPTS[:1], int32(11))
    assert model.training


def test_capacity_raises_before_any_write(model):
    """Case 48."""
    target = HFTarget(model, 1, 16)
    target.prefill(torch.arange(3, 17)[None], int32(14))
    before = target.cache.buffers.clone()
    with pytest.raises(ValueError, match="6 nodes after 14 rows need 20 rows, but the capacity is 16"):
        target.forward(PROMPTS[:1, :6], *tree(-1, 0, 0, 1, 1, 2))
    torch.testing.assert_close(target.cache.buffers, before, rtol=0, atol=0, equal_nan=True)
    target.forward(PROMPTS[:1, :2], *tree(-1, 0))


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        (PROMPTS[:1], int32(11), r"ids must have shape \(2, L\), L >= 1, got \(1, 11\)"),
        (PROMPTS[:, :0], int32(0, 0), r"ids must have shape \(2, L\), L >= 1, got \(2, 0\)"),
        (PROMPTS, int32(11), r"lengths must have shape \(2,\), got \(1,\)"),
        (PROMPTS, int32(11, 0), r"lengths must be in \[1, 11\], got \[11, 0\]"),
        (PROMPTS, int32(12, 1), r"lengths must be in \[1, 11\], got \[12, 1\]"),
        (torch.zeros(2, 17, dtype=torch.int64), int32(1, 1), "17 tokens do not fit into a capacity of 16"),
    ],
)
def test_prefill_rejects(model, ids, lengths, message):
    with pytest.raises(ValueError, match=message):
        HFTarget(model, 2, 16).prefill(ids, lengths)


@pytest.mark.parametrize(
    ("ids", "depths", "message"),
    [
        (PROMPTS[:1, :2], tree(-1, 0)[1], r"ids must have shape \(2, T\), got \(1, 2\)"),
        (PROMPTS[:, :2], tree(-1, 0, 0)[1], r"depths must have shape \(2 or 1, 2\), got \(1, 3\)"),
        (PROMPTS[:, :2], tree(-1, 0)[1][0], r"depths must have shape \(2 or 1, 2\), got \(2,\)"),
    ],
)
def test_forward_rejects(model, ids, depths, message):
    target = HFTarget(model, 2, 16)
    target.prefill(PROMPTS[:, :3], int32(3, 3))
    with pytest.raises(ValueError, match=message):
        target.forward(ids, tree(-1, 0)[0], depths)


def test_rows_may_have_trees_of_their_own(model):
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32)
    mask = mask_from_parents(parents)
    target = HFTarget(model, 2, 16)
    target.prefill(PROMPTS[:, :3], int32(3, 2))
    both = target.forward(PROMPTS[:, 5:8], mask, depths_from_mask(mask)).logits
    for row, length in enumerate((3, 2)):
        alone = HFTarget(model, 1, 16)
        alone.prefill(PROMPTS[row : row + 1, :length], int32(length))
        one = alone.forward(PROMPTS[row : row + 1, 5:8], mask[row : row + 1], depths_from_mask(mask)[row : row + 1])
        torch.testing.assert_close(both[row : row + 1], one.logits)


def test_bf16_cache_under_an_fp32_model_is_the_callers_choice(model):
    target = HFTarget(model.bfloat16(), 1, 16)
    target.prefill(PROMPTS[:1], int32(11))
    assert target.cache.buffers.dtype == torch.bfloat16


def test_another_thread_gets_an_error_and_not_wrong_numbers(model):
    """The documented limit: one model, one thread."""
    target = HFTarget(model, 1, 16)
    errors = []

    def call_the_model(*_):
        def other():
            try:
                model(PROMPTS[:1])
            except RuntimeError as error:
                errors.append(str(error))

        handle.remove()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    handle = model.model.layers[0].register_forward_hook(call_the_model)
    target.prefill(PROMPTS[:1], int32(11))
    assert len(errors) == 1
    assert "works only inside HFTarget" in errors[0]


@pytest.mark.parametrize("is_readable", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_refilled_row_starts_over_and_the_others_go_on(model, batch, is_readable):
    """Also where lengths are not read, as on a GPU."""
    target, row = HFTarget(model, batch, 32), batch - 1
    target.cache._lengths_readable = is_readable
    prompts, lengths = torch.randint(3, VOCAB, (batch, 9)), torch.arange(9, 9 - batch, -1).int()
    target.prefill(prompts, lengths)
    target.refill(row, PROMPTS[0, :4])
    lengths[row] = 4
    assert torch.equal(target.prefix_len, lengths)
    assert target.prefix_len.dtype == torch.int32
    output = target.forward(torch.full((batch, 1), 7), *tree(-1))
    for i, length in enumerate(lengths.tolist()):
        text = PROMPTS[0, :4] if i == row else prompts[i, :length]
        torch.testing.assert_close(output.logits[i, 0], path_logits(model, text, torch.tensor([7]))[-1])
