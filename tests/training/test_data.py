import json
import re
import shutil

import pytest
import torch

from specdec_kernels._native import load_errors
from specdec_kernels.hf.load import load_model, load_tokenizer
from specdec_kernels.hf.prepare import is_prepared
from specdec_kernels.training import data
from specdec_kernels.training.data import (
    GenerationOptions,
    generate_conversations,
    is_held_out,
    prompt_jobs,
    read_conversations,
    read_prompts,
    self_jobs,
    template_of,
)
from specdec_kernels.training.generate import Conversation, Limits

LIMITS = Limits(user_len=4, answer_len=8)


def options(model: str, **changes) -> GenerationOptions:
    return GenerationOptions(
        **{"model": model, "data": None, "dtype": "float32", "seed": 0, "limits": LIMITS} | changes
    )


def test_template_is_cut_around_the_user_turn(tiny):
    template = template_of(load_tokenizer(tiny))
    assert (template.before_user, template.after_user, template.stop) == ((1, 4), (2, 1, 5), frozenset({2}))


def test_a_template_without_the_users_text_is_refused(tiny):
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = "nothing of the user"
    with pytest.raises(ValueError, match="once, found it 0 times"):
        template_of(tokenizer)
    tokenizer.chat_template = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="or with a bos or eos token"):
        template_of(tokenizer)


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    """A model without a chat template."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("chat_template*"))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder)).chat_template is None
    return str(folder)


def test_a_model_without_turns_goes_on_from_its_own_text(base, tmp_path):
    found = generate_conversations(tmp_path, options(base), num_tokens=300, num_slots=7)
    assert all(c.prompt[0] == 2 for c in found)  # begins with the end of texts, for want of a bos token
    assert max(len(c.prompt) for c in found if c.index // 2 % 2 == 0) == 1 + LIMITS.user_len  # those without an opener
    model = load_model(base, torch.float32)
    greedy = [c for c in found if c.greedy]
    assert len(greedy) > 5
    for c in greedy:
        with torch.no_grad():
            predicted = model(torch.tensor([c.prompt + c.answer])).logits[0, len(c.prompt) - 1 : -1].argmax(-1)
        assert predicted.tolist() == list(c.answer)


def test_prompts_for_a_model_without_turns(base, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"turns": ["w1 w2", "w3"]}) + "\n" + json.dumps({"prompt": "w5"}))
    job = prompt_jobs(load_tokenizer(base), read_prompts(path))
    vocabulary = load_tokenizer(base).get_vocab()
    assert [job(i).start for i in range(2)] == [(vocabulary["w1"], vocabulary["w2"]), (vocabulary["w5"],)]


def test_prompts_of_every_form(tmp_path):
    system = {"role": "system", "content": "s"}
    lines = [
        {"turns": ["first", "second"]},
        {"prompt": "plain"},
        {"messages": [system, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    user = [{"role": "user", "content": text} for text in ("first", "plain", "u")]
    assert read_prompts(path) == [[user[0]], [user[1]], [system, user[2]]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "x"}\nnot json', ":2: not JSON"),
        ('{"question": "x"}', ":1: needs"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ":1: needs"),
        ("[1]", ":1: needs"),
        ("\n", "holds no prompts"),
    ],
)
def test_bad_prompts_are_named(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_prompt_jobs_answer_each_prompt_twice(tiny):
    job = prompt_jobs(load_tokenizer(tiny), [[{"role": "user", "content": "w0"}], [{"role": "user", "content": "w1"}]])
    jobs = [job(i) for i in range(4)]
    assert [j.greedy for j in jobs] == [True, True, False, False]
    assert jobs[0].start == jobs[2].start == (1, 4, 6, 2, 1, 5)
    assert jobs[1].start != jobs[0].start
    assert job(4) is None


def test_self_jobs_open_every_second_pair_of_user_turns(tiny):
    tokenizer = load_tokenizer(tiny)
    template = template_of(tokenizer)
    job = self_jobs(tokenizer, template)
    assert [len(job(i).start) > len(template.before_user) for i in range(4)] == [False, False, True, True]
    assert [job(i).greedy for i in range(4)] == [True, False, True, False]


def test_interrupted_generation_continues_to_the_same_texts(tiny, tmp_path, monkeypatch):
    whole = generate_conversations(tmp_path / "whole", options(tiny), num_tokens=150, num_slots=3)
    assert sum(len(c.answer) for c in whole) >= 150

    write = data.BatchedWriter.write

    def stop_early(self, jobs):
        for count, conversation in enumerate(write(self, jobs)):
            if count == 5:
                raise KeyboardInterrupt
            yield conversation

    monkeypatch.setattr(data.BatchedWriter, "write", stop_early)
    with pytest.raises(KeyboardInterrupt):
        generate_conversations(tmp_path / "cut", options(tiny), num_tokens=150, num_slots=3)
    monkeypatch.undo()
    file = tmp_path / "cut" / "conversations-0.jsonl"
    file.write_text(file.read_text()[:-20])  # the last line was being written
    before = read_conversations(tmp_path / "cut")
    assert len(before) == 4
    continued = generate_conversations(tmp_path / "cut", options(tiny), num_tokens=150, num_slots=3)
    assert set(before) <= set(continued)
    written = re.findall(r'"index":(\d+)', file.read_text())
    assert len(written) - len(set(written)) <= 1  # only the one that was cut off is written again
    common = {c.index: c for c in whole}
    assert len(common.keys() & {c.index for c in continued}) > 5
    assert all(c == common.get(c.index, c) for c in continued)


def test_enough_text_is_not_extended(tiny, tmp_path):
    first = generate_conversations(tmp_path, options(tiny), num_tokens=40, num_slots=2)
    assert generate_conversations(tmp_path, options(tiny), num_tokens=40, num_slots=2) == first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bf16_texts_are_written_by_a_prepared_model(tiny, tmp_path, monkeypatch, dtype):
    models = []

    class Watched(data.BatchedWriter):
        def __init__(self, model, *args, **more):
            models.append(model)
            super().__init__(model, *args, **more)

    monkeypatch.setattr(data, "BatchedWriter", Watched)
    found = generate_conversations(tmp_path, options(tiny, dtype=dtype), num_tokens=40, num_slots=2)
    assert sum(len(c.answer) for c in found) >= 40
    assert is_prepared(models[0]) == (dtype == "bfloat16" and load_errors["_C"] is None)


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_workers_share_the_jobs(tiny, tmp_path, monkeypatch, processes):
    if not processes:
        monkeypatch.setattr(torch.multiprocessing, "spawn", lambda f, a, nprocs: [f(i, *a) for i in range(nprocs)])
        monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    found = generate_conversations(tmp_path, options(tiny), num_tokens=120, num_slots=2, num_workers=2)
    parities = [{json.loads(x)["index"] % 2 for x in p.read_text().split()} for p in sorted(tmp_path.glob("c*.jsonl"))]
    assert parities == [{0}, {1}]
    assert sum(len(c.answer) for c in found) >= 120
    assert found[0] == generate_conversations(tmp_path / "one", options(tiny), num_tokens=9, num_slots=1)[0]


def test_another_run_in_the_folder_is_refused(tiny, tmp_path):
    generate_conversations(tmp_path, options(tiny), num_tokens=1, num_slots=1)
    with pytest.raises(ValueError, match=r"another seed \(0, now 1\); use another --work"):
        generate_conversations(tmp_path, options(tiny, seed=1), num_tokens=1)


def test_prompts_file_ends_the_run(tiny, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"w{i}"}) for i in range(3)))
    found = generate_conversations(tmp_path / "run", options(tiny, data=str(path)), num_tokens=10_000, num_slots=4)
    assert [c.index for c in found if c.greedy] == [0, 1, 2]
    assert len(found) <= 6  # equal texts are kept once


def test_equal_texts_are_kept_once(tmp_path):
    lines = [{"index": i, "prompt": [1], "answer": [2, 3], "greedy": True} for i in range(3)]
    (tmp_path / "conversations-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_conversations(tmp_path) == [Conversation(0, (1,), (2, 3), True)]


def test_split_is_decided_by_the_prompt():
    conversations = [Conversation(i, (1, i // 2, 5), (i,), i % 2 == 0) for i in range(4000)]
    sides = [is_held_out(c) for c in conversations]
    assert sides[::2] == sides[1::2]
    assert 0.03 < sum(sides) / len(sides) < 0.07
