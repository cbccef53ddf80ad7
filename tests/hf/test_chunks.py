"""Prompts in chunks: every token is fed once, little padding is, and nobody notices."""

import pytest
import torch

from specdec_kernels.hf import _chunks
from specdec_kernels.hf._chunks import prompt_chunks
from specdec_kernels.hf.prepare import prepare
from specdec_kernels.hf.target import HFTarget

from ..marks import needs_native
from .half_precision import equal_bits
from .tiny import VOCAB, tiny_model

LENGTHS = [(11, 4, 6), (1, 11, 11), (5, 5, 5), (9, 2, 3)]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_feed_every_token_once_and_little_padding(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 1500, (seed % 5 + 1,), generator=generator)
    width, fed = int(lengths.max()), torch.zeros(len(lengths), 1500, dtype=torch.int32)
    expected_start, last_rows = 0, range(len(lengths))
    for start, size, rows in prompt_chunks(lengths, width):
        assert start == expected_start
        assert 1 <= size <= _chunks.PREFILL_CHUNK
        assert set(rows) <= set(last_rows)
        fed[list(rows), start : start + size] += 1
        expected_start, last_rows = start + size, rows
        padding = max(start + size - int(lengths[row]) for row in rows)
        assert padding < _chunks.SPARED_PADDING
    assert expected_start == width
    assert all((fed[row, :length] == 1).all() for row, length in enumerate(lengths.tolist()))


def test_lengths_on_a_device_are_not_read():
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    assert list(prompt_chunks(lengths, 700)) == [(0, 512, [0, 1, 2]), (512, 188, [0, 1, 2])]


def test_padding_of_all_rows_is_fed():
    assert list(prompt_chunks(int32(40, 3), 50)) == [(0, 3, [0, 1]), (3, 47, [0])]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(_chunks, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(_chunks, "SPARED_PADDING", 1)


def ragged(model, lengths):
    prompts = torch.randint(3, VOCAB, (len(lengths), max(lengths)))
    target = HFTarget(model, len(lengths), 16)
    target.tap(1)
    return target, prompts, target.prefill(prompts, int32(*lengths))


def alone(model, prompt):
    target = HFTarget(model, 1, 16)
    target.tap(1)
    return target, target.prefill(prompt[None], int32(len(prompt)))


def next_step(target, tokens):
    mask, depths = torch.ones(1, 1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
    return target.forward(tokens[:, None], mask, depths).logits[:, 0]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_rows_that_end_early_have_what_they_have_alone(family, lengths, small_chunks):
    model = tiny_model(family).double()
    target, prompts, output = ragged(model, lengths)
    assert target.prefix_len.tolist() == list(lengths)
    tokens = torch.randint(3, VOCAB, (len(lengths),))
    step = next_step(target, tokens)
    for row, length in enumerate(lengths):
        own, expected = alone(model, prompts[row, :length])
        torch.testing.assert_close(output.logits[row], expected.logits[0])
        torch.testing.assert_close(output.hidden[row], expected.hidden[0])
        torch.testing.assert_close(output.tapped[row, :length], expected.tapped[0])
        torch.testing.assert_close(step[row], next_step(own, tokens[row : row + 1])[0])


@equal_bits
@pytest.mark.parametrize("prepared", [False, pytest.param(True, marks=needs_native)], ids=["plain", "prepared"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rows_that_end_early_have_their_bits(lengths, prepared, small_chunks):
    model = tiny_model("llama", head_dim=16).bfloat16()
    model = prepare(model) if prepared else model
    _, prompts, output = ragged(model, lengths)
    for row, length in enumerate(lengths):
        assert torch.equal(output.logits[row], alone(model, prompts[row, :length])[1].logits[0])


def test_rows_that_have_ended_take_no_part(small_chunks):
    model, seen = tiny_model(), []
    model.base_model.layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[:2]))
    ragged(model, (11, 4, 6))
    assert seen == [(3, 4), (2, 2), (1, 4), (1, 1)]
