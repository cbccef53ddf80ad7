"""Rank accuracies of loaded heads on prompts, against counting over the model's own greedy answers."""

import json

import pytest
import torch

from specdec_kernels.cli.__main__ import main
from specdec_kernels.hf.load import load_model, load_tokenizer
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.training.calibrate import MAX_RANK
from specdec_kernels.training.data import read_prompts
from specdec_kernels.training.prompt_accuracies import measure_on_prompts

from .tiny import VOCAB, save_tiny_model

PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10", "w2 w2", "w11 w3"]
NEW = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, heads that differ from the identity, without any accuracies, and prompts."""
    folder = tmp_path_factory.mktemp("accuracies")
    heads = MedusaHeads(2, 1, 32, len(VOCAB))
    torch.manual_seed(5)
    heads.w_res.data.normal_(0, 0.3)
    heads.save_pretrained(folder / "heads")
    lines = [json.dumps({"turns": [prompt]}) + "\n" for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(lines))
    return save_tiny_model(folder / "model"), folder


def counted(model, tokenizer, heads):
    """Return, one answer and one position at a time, the shares ``[head][rank]`` and the number of labels."""
    counts, totals = torch.zeros(2, len(VOCAB)), torch.zeros(2)
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        text = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0]
        states = model.model(input_ids=text[None]).last_hidden_state[0]
        for at in range(ids.shape[1] - 1, len(text)):
            logits = heads(states[at], model.lm_head.weight)
            for head in range(2):
                if at + 2 + head < len(text):
                    order = logits[head].argsort(descending=True, stable=True).tolist()
                    rank = order.index(text[at + 2 + head].item())
                    totals[head] += 1
                    counts[head, rank] += 1
    return counts[:, :MAX_RANK] / totals[:, None], totals.tolist()


@torch.no_grad()
def test_shares_are_those_counted_one_by_one(folders):
    name, folder = folders
    model, tokenizer = load_model(name, dtype=torch.float32), load_tokenizer(name)
    heads = MedusaHeads.from_pretrained(folder / "heads")
    chats = read_prompts(folder / "prompts.jsonl")
    found = measure_on_prompts(model, tokenizer, heads, chats, answer_len=NEW, num_slots=2)
    shares, totals = counted(model, tokenizer, heads)
    assert found.totals.tolist() == totals
    torch.testing.assert_close(torch.tensor(found.accuracies()), shares, atol=1e-5, rtol=0)
    assert 0 < shares[0, 0] < 1


def test_published_heads_get_a_tree(folders, capsys):
    name, folder = folders
    optimize = ["tree", "optimize", "--heads", str(folder / "heads"), "--nodes", "4"]
    assert main(optimize) == 2
    common = ["calibrate", "--accuracy", "--model", name, "--heads", str(folder / "heads"), "--dtype", "float32"]
    assert main([*common, "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", str(NEW)]) == 0
    assert "top-1" in capsys.readouterr().out
    known = json.loads((folder / "heads" / "accuracy.json").read_text())
    assert known["split"] == "greedy answers to 5 prompts"
    assert str(folder) not in known["command"]
    assert main(optimize) == 0
    assert json.loads((folder / "heads" / "tree.json").read_text())["choices"]
