"""`benchmarks.e2e.replayed`: the record decides as the model did, and the table."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.e2e import replayed
from specdec_kernels.decoding import DecodeStats, DynamicTree
from specdec_kernels.decoding.drafters import MedusaDrafter, MergedDrafter, NGramDrafter
from specdec_kernels.decoding.protocols import Drafter
from specdec_kernels.hf import speculative_generate
from specdec_kernels.modules import MedusaHeads
from tests.hf.tiny import tiny_model


def drafter_of(model) -> Drafter:
    weight = model.get_output_embeddings().weight
    heads = MedusaHeads(3, 1, weight.shape[1], weight.shape[0])
    return MergedDrafter(MedusaDrafter(heads, DynamicTree(7), weight), NGramDrafter(max_drafts=4, num_branches=2))


@pytest.mark.parametrize("stops", [None, 11])
@torch.no_grad()
def test_a_replayed_text_takes_the_steps_of_a_decoded_one(stops):
    model: Any = tiny_model("llama", num_hidden_layers=1)
    model.generation_config.eos_token_id = stops
    prompt = [5, 6, 5, 6, 7, 5]
    text = replayed.record(model, prompt, 40)
    stats = DecodeStats()
    options = {"drafter": drafter_of(model), "max_new_tokens": 40, "do_sample": False}
    decoded = model.generate(torch.tensor([prompt]), custom_generate=speculative_generate, stats=stats, **options)
    assert decoded[0, len(prompt) :].tolist() == text.tokens.tolist()
    again = replayed.replay(text, drafter_of(model), model.config.vocab_size)
    assert (again.num_steps, again.num_tokens) == (stats.num_steps, stats.num_tokens)
    assert again.accepted_histogram == stats.accepted_histogram
    assert 0 < again.num_steps < len(text.tokens) - 1, "some drafts are right, or this tests nothing"


@torch.no_grad()
def test_counts_and_their_table(tmp_path):
    model: Any = tiny_model("llama", num_hidden_layers=1)
    model.generation_config.eos_token_id = None
    texts = replayed.texts_of(model, [[5, 6, 5, 6, 7, 5], [9, 8, 9]], 20)
    drafters: dict[tuple[str, int | None], Callable[[], Drafter]] = {
        ("fixed tree", 4): lambda: drafter_of(model),
        ("`--drafter ngram`", None): NGramDrafter,
    }
    counts = list(replayed.count(texts, drafters, model.config.vocab_size))
    assert [(c.drafter, c.nodes) for c in counts] == list(drafters)
    assert all(c.tokens_per_step >= 1 and c.mean_nodes >= 1 for c in counts)
    rows = [
        replayed.Count("fixed tree", 4, 1.5, 4.0),
        replayed.Count("fixed tree", 8, 1.634, 8.0),
        replayed.Count("merged", 8, 2.126, 12.0),
        replayed.Count("`--drafter ngram`", None, 1.52, 4.32),
    ]
    path = tmp_path / "replayed.jsonl"
    path.write_text("{}\n" + "".join(json.dumps(row.__dict__) + "\n" for row in rows))
    assert replayed.markdown(path) == [
        "| tokens/step of trees of at most | 4 nodes | 8 nodes |",
        "|---|---|---|",
        "| fixed tree | 1.50 | 1.63 |",
        "| merged |  | 2.13 |",
        "",
        "| as the commands draft | tokens/step | nodes on average |",
        "|---|---|---|",
        "| `--drafter ngram` | 1.52 | 4.3 |",
    ]
