"""Sentences of the documentation with figures of a result: what they say of runs made up here."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.e2e import calibrated, sentences
from benchmarks.e2e.rows import Run, write_run
from benchmarks.e2e.weights import memory_sizes
from specdec_kernels.decoding.budget import CostTable
from specdec_kernels.decoding.calibration import Calibration, DrafterProfile, Setting

from .test_e2e import HEAD, row

NOW = {**HEAD, "shipped": sentences.shipped(), "absent": {}}


@pytest.fixture
def said(tmp_path):
    def say(block, rows, **head):
        path = tmp_path / "e2e_x.jsonl"
        write_run(path, Run({**NOW, **head}, rows))
        return "\n".join(block(path))

    return say


def test_about_names_the_fastest_and_what_it_gains(said):
    rows = [row(1, "generate", 10, 2), row(2, "generate", 10, 2, "rag"), row(1, "vllm", 10, 1), row(2, "vllm", 10, 1)]
    rows += [row(1, "plain", 10, 1), row(2, "plain", 10, 1), row(1, "ngram", 10, 0.5), row(2, "ngram", 10, 0.25, "rag")]
    rows += [row(1, "hf-lookup", 10, 0.1)]
    text = said(sentences.about, rows, prepared=True, absent={"llama.cpp": "no environment\nat all"})
    assert text == (
        "2 prompts (2 kinds of task), 8 new tokens, batch 1, bfloat16, Some CPU, 2 threads, ours prepared "
        "(`e2e_x.jsonl`). The fastest, our `ngram`, is 5.66 × as fast as HF `generate`, 2.83 × as our plain decoding "
        "and 2.83 × as vllm, the fastest of the others; by kind of task 4.00 × (qa) to 8.00 × (rag). "
        "Asked for fewer prompts: HF lookup (1). Without llama.cpp: no environment."
    )


def test_gaps_are_told_where_they_were_measured(said):
    rows = [row(1, "generate", 10, 2), row(1, "plain", 10, 1, gap_ulp=1.0), row(1, "ngram", 10, 1, gap_ulp=4.0)]
    assert "(2 first differences), its two candidates lie in the median 2.5 and at most 4 bf16 units" in said(
        sentences.about, [*rows, row(1, "vllm", 10, 1, gap_ulp=90.0)]
    )
    assert "differences" not in said(sentences.about, [row(1, "generate", 10, 2), row(1, "plain", 10, 1)])


def test_a_run_of_other_heads_says_so(said):
    rows = [row(1, "generate", 10, 2), row(1, "medusa+ngram", 10, 1)]
    shipped = sentences.shipped()
    assert len(shipped) >= 3
    assert "heads" not in said(sentences.about, rows)
    assert "The heads have been replaced since." in said(sentences.about, rows, shipped={})
    old = {path: "another" if path.startswith("adapters") else digest for path, digest in shipped.items()}
    assert "since" not in said(sentences.about, rows, shipped=old), "a run without Kangaroo"
    rows += [row(1, "kangaroo-tree", 10, 1)]
    assert "The adapter has been replaced since." in said(sentences.about, rows, shipped=old)
    assert "The heads and adapter have been replaced since." in said(sentences.about, rows, shipped={})


def test_gains_over_plain_decoding(said):
    rows = [row(1, "plain", 10, 2), row(1, "ngram", 10, 1), row(1, "medusa", 10, 4), row(1, "generate", 10, 9)]
    assert said(sentences.over_plain, rows).endswith("same run: 2.00 × with `ngram` and 0.50 × with `medusa`.")


def test_first_tokens_come_in_order(said):
    rows = [
        row(1, "generate", 11, 2, first_token_s=1.0),
        row(1, "vllm", 11, 1, first_token_s=0.25),
        row(1, "plain", 11, 1, first_token_s=0.5),
    ]
    assert said(sentences.first_tokens, rows, prompt_tokens=700).endswith(
        "The first token comes after (median) 250 ms (vllm), 500 ms (our `plain`) and 1000 ms (HF `generate`); whole "
        "calls over HF `generate`: vllm 2.00 × (1.33 × after the prompt) and our "
        "`plain` 2.00 × (2.00 × after the prompt)."
    )


def test_equal_texts_are_counted_for_every_file_of_a_pattern(tmp_path):
    for name, at in (("b1", None), ("b4", 7)):
        rows = [row(1, "generate", 10, 2)]
        rows += [row(1, "medusa", 10, 1, differs_from={"generate": at})]
        rows += [row(1, "ngram", 10, 1, differs_from={"generate": None})]
        write_run(tmp_path / f"texts_{name}.jsonl", Run(NOW, rows))
    one, four = sentences.texts(tmp_path / "texts_*.jsonl")
    assert one.endswith("HF `generate`: **1 of 1** with `medusa` and `ngram`.")
    assert four.endswith("HF `generate`: **0 of 1** with `medusa`; **1 of 1** with `ngram`.")
    rows = [row(1, "generate", 10, 2), row(1, "plain", 10, 2, differs_from={"generate": 3})]
    rows += [row(1, "medusa", 10, 1, differs_from={"generate": 3, "plain": None})]
    write_run(tmp_path / "half.jsonl", Run(NOW, rows))
    (half,) = sentences.texts(tmp_path / "half.jsonl", "plain")
    assert half.endswith("Texts equal to those of our `plain`: **1 of 1** with `medusa`.")


def test_memory_is_held_against_weights_and_cache(said):
    rows = [
        row(1, "generate", 10, 2, peak_bytes=9 * 10**9),
        row(1, "plain", 10, 2, peak_bytes=129 * 10**6, prompt_tokens=92),
    ]
    sizes = {"weight_bytes": 90 * 10**6, "cache_bytes_per_token": 10**5}
    assert said(sentences.memory, rows, **sizes) == (
        "Our largest peak is 129 MB (our `plain`): the weights take 90 MB, keys and values of 100 tokens 10.0 MB, and "
        "1.3 times both are 130 MB (`e2e_x.jsonl`)."
    )
    rows[1].peak_bytes = 131 * 10**6
    assert "exceeded" in said(sentences.memory, rows, **sizes)
    assert "does not say how large" in said(sentences.memory, rows)


def test_sizes_of_a_folder(tmp_path):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16()
    model.save_pretrained(tmp_path)
    found = memory_sizes(tmp_path, torch.bfloat16)
    assert found["cache_bytes_per_token"] == 2 * 3 * 2 * 8 * 2
    weights = sum(parameter.numel() * 2 for parameter in model.parameters())
    assert weights <= found["weight_bytes"] <= weights + 8192


def test_tables_of_a_calibration(tmp_path):
    points = [[batch, 256, nodes, 1000.0 * max(1, batch * nodes / 4)] for batch in (1, 8) for nodes in (1, 4, 8)]
    profile = DrafterProfile([1, 0.5, 0.5, 0.5], [0, 0, 0, 0, 9], CostTable([[1, 256, 1, 1.0]]), 9)
    calibration = Calibration(Setting("x", 1, "bfloat16", True), CostTable(points), {"medusa": profile})
    assert calibrated.markdown(calibration.save(tmp_path / "calibration.json")) == [
        "| ms behind 256 tokens, nodes | B = 1 | B = 8 |",
        "|---|---|---|",
        "| 1 | 1.0 | 2.0 |",
        "| 4 | 1.0 | 8.0 |",
        "| 8 | 2.0 | 16.0 |",
        "",
        "For one row, 4 nodes 1.00 × and 8 nodes 2.00 × what one takes. The fastest drafts by this calibration:",
        "",
        "| fastest nodes, over plain decoding | B = 1 | B = 8 |",
        "|---|---|---|",
        "| medusa | 4: 2.50 × | 1: 1.00 × |",
    ]
