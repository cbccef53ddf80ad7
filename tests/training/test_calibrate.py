import json

import pytest
import torch

from specdec_kernels.modules.medusa import MedusaHeads
from specdec_kernels.training.calibrate import (
    format_accuracies,
    label_ranks,
    measure_accuracies,
    row_of_token,
    save_accuracies,
)
from specdec_kernels.training.generate import Conversation
from specdec_kernels.training.hidden import HiddenStates


def test_ranks_count_better_logits_and_equal_ones_before():
    logits = torch.tensor([[0.1, 0.9, 0.5, 0.9]] * 4)
    assert label_ranks(logits, torch.arange(4)).tolist() == [3, 0, 2, 1]


def setup(vocab_map=None, own=False):
    torch.manual_seed(2)
    items = [Conversation(i, (1,), tuple(torch.randint(0, 20, (40,)).tolist()), True) for i in range(8)]
    states = HiddenStates(torch.randn(320, 16), items)
    heads = MedusaHeads(2, 1, 16, 20, own_projection=own, vocab_map=vocab_map)
    torch.nn.init.normal_(heads.w_res, std=0.1)
    return heads.requires_grad_(False), torch.randn(20, 16), states


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_accuracies_equal_a_plain_count(own, reduced):
    vocab_map = torch.tensor([0, 2, 3, 5, 7, 11, 13, 17, 19]) if reduced else None
    heads, lm_head, states = setup(vocab_map, own)
    weight = None if own else heads.select_rows(lm_head)
    rows = torch.arange(0, 320, 3)
    counter = measure_accuracies(heads, weight, states, rows, max_rank=4)

    logits = heads(states.hidden[rows], weight)
    ids = logits.argsort(dim=-1, descending=True)
    ids = ids if vocab_map is None else vocab_map[ids]
    labels = states.labels(rows, 2)
    for head in range(2):
        known = labels[:, head] >= 0
        hits = ids[known, head] == labels[known, head, None]
        assert counter.totals[head] == known.sum() < len(rows)
        assert counter.counts[head].tolist() == hits[:, :4].sum(0).tolist()
        shares = (hits[:, :4].sum(0) / known.sum()).tolist()
        assert counter.accuracies()[head] == pytest.approx(shares, abs=1e-6)
    assert counter.counts.sum() > 0


def test_rows_of_tokens():
    heads, *_ = setup(torch.tensor([3, 5]))
    assert row_of_token(heads, torch.device("cpu"))[[3, 5, 4]].tolist() == [0, 1, -100]
    assert row_of_token(setup()[0], torch.device("cpu")) is None


def test_table_is_cumulative_and_the_file_is_not(tmp_path):
    accuracies = [[0.5, 0.25, 0.125], [0.25, 0.125, 0.0]]
    table = format_accuracies(accuracies, [1000, 900]).splitlines()
    assert table[0].split() == ["head", "token", "top-1", "top-2", "top-3", "tokens"]
    assert table[1].split() == ["1", "t+2", "0.500", "0.750", "0.875", "1,000"]
    assert table[2].split() == ["2", "t+3", "0.250", "0.375", "0.375", "900"]
    save_accuracies(tmp_path / "accuracy.json", accuracies, model="m", held_out_tokens=7)
    found = json.loads((tmp_path / "accuracy.json").read_text())
    assert found == {"heads": accuracies, "model": "m", "held_out_tokens": 7}
