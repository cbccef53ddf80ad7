"""The attention implementation: what it passes on, without copies, and what it refuses."""

import pytest
import torch

from specdec_kernels.hf import attention
from specdec_kernels.hf.attention import IMPLEMENTATION, TreeState, tree_attention_forward
from specdec_kernels.hf.target import HFTarget
from tests.hf.tiny import record_calls, tiny_model


def test_layer_options_reach_the_op_and_the_cache_is_not_copied(monkeypatch):
    recording, calls = record_calls(attention.tree_attention)
    monkeypatch.setattr(attention, "tree_attention", recording)
    model = tiny_model("gpt_oss")
    target = HFTarget(model, batch_size=2, capacity=8)
    target.prefill(torch.ones(2, 4, dtype=torch.int64), torch.tensor([4, 2], dtype=torch.int32))
    assert len(calls) == 3
    for layer, call in enumerate(calls):
        query, keys, values, _, prefix_len = call["args"]
        assert query.shape == (2, 4, 4, 16)
        assert keys.shape == (2, 8, 2, 16)
        assert prefix_len.tolist() == [0, 0]
        assert keys.data_ptr() == target.cache.buffers[2 * layer].data_ptr()
        assert values.data_ptr() == target.cache.buffers[2 * layer + 1].data_ptr()
        assert call["sinks"] is model.model.layers[layer].self_attn.sinks
        assert call["window"] == (None if layer == 1 else model.config.sliding_window)
        assert call["scale"] == 16**-0.5
        assert call["softcap"] is None


def test_outside_of_a_target_it_raises():
    model = tiny_model()
    model.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(RuntimeError, match="'specdec_tree' works only inside HFTarget"):
        model(torch.ones(1, 3, dtype=torch.int64))


def test_a_padding_mask_is_not_dropped_silently():
    model = tiny_model()
    model.set_attn_implementation(IMPLEMENTATION)
    mask = torch.tensor([[0, 1, 1]])
    with pytest.raises(NotImplementedError, match=r"takes no attention_mask, got \(1, 3\)"):
        model(torch.ones(1, 3, dtype=torch.int64), attention_mask=mask)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 2, 4)}, r"attention_mask=\(1, 1, 2, 4\)"),
        ({"position_bias": torch.zeros(1, 2, 2, 4)}, r"position_bias=\(1, 2, 2, 4\)"),
        ({"dropout": 0.1}, "dropout=0.1"),
    ],
    ids=["mask", "bias", "dropout"],
)
def test_refuses_what_it_cannot_apply(option, message):
    q, kv = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 4, 8)
    state = TreeState(torch.tensor([[[1], [3]]]), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match=message):
        tree_attention_forward(None, q, kv, kv, **{"attention_mask": None, "tree_state": state, **option})
