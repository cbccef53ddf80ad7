import pytest
import torch

from specdec_kernels.hf.load import load_model
from specdec_kernels.training import hidden as hidden_module
from specdec_kernels.training.generate import Conversation
from specdec_kernels.training.hidden import HiddenStates, cache_hidden_states


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny, torch.float32)


def conversations(count=9):
    generator = torch.Generator().manual_seed(5)
    lengths = [(2 + i % 4, 1 + (7 * i) % 5) for i in range(count)]
    draw = [[torch.randint(3, 30, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    return [Conversation(i, tuple(p), tuple(a), i % 2 == 0) for i, (p, a) in enumerate(draw)]


def cache(folder, items, model, **options):
    return cache_hidden_states(folder, items, model, hidden_size=32, dtype=torch.float32, **options)


def test_rows_are_the_states_before_each_answer_token(model, tmp_path, capsys):
    items = conversations()
    states = cache(tmp_path, items, model, max_tokens=24)
    num_rows = sum(len(c.answer) for c in items)
    assert f"{num_rows} rows × 32 × 4 bytes" in capsys.readouterr().out
    start = 0
    for c in sorted(items, key=lambda c: (len(c.prompt) + len(c.answer), c.index)):
        ids = torch.tensor([c.prompt + c.answer])
        with torch.no_grad():
            expected = model.base_model(ids).last_hidden_state[0, len(c.prompt) - 1 : -1]
        rows = slice(start, start + len(c.answer))
        torch.testing.assert_close(states.hidden[rows], expected)
        assert states.pending_ids[rows].tolist() == list(c.answer)
        assert states.greedy[rows].tolist() == [c.greedy] * len(c.answer)
        start += len(c.answer)
    assert start == num_rows == len(states.hidden)


def test_labels_look_past_the_pending_token_and_stop_at_the_answers_end():
    items = [Conversation(0, (1,), (10, 11, 12), True), Conversation(1, (1,), (20, 21), True)]
    states = HiddenStates(torch.zeros(5, 4), items)
    ignored = -100
    assert states.labels(torch.arange(5), 3).tolist() == [
        [11, 12, ignored],
        [12, ignored, ignored],
        [ignored] * 3,
        [21, ignored, ignored],
        [ignored] * 3,
    ]


def test_teachers_predict_the_labels(model, tmp_path):
    """A greedy answer's labels are the argmax of the teachers' logits."""
    prompt = torch.tensor([[1, 4, 9, 2, 1, 5]])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=7, eos_token_id=None)
    items = [Conversation(0, tuple(ids[0, :6].tolist()), tuple(ids[0, 6:].tolist()), True)]
    states = cache(tmp_path, items, model)
    rows = torch.arange(len(states.hidden))
    labels = states.labels(rows, 3)
    predicted = (states.teachers(rows, 3) @ model.get_output_embeddings().weight.detach().T).argmax(-1)
    assert (labels >= 0).sum() == 6 + 5 + 4
    assert torch.equal(predicted[labels >= 0], labels[labels >= 0])


def test_parts_are_disjoint_and_leave_out_rows_without_a_label(monkeypatch):
    monkeypatch.setattr(hidden_module, "is_held_out", lambda c: c.index % 3 == 0)
    items = [Conversation(i, (1, i), (10,) * (1 + i % 4), True) for i in range(12)]
    states = HiddenStates(torch.zeros(sum(len(c.answer) for c in items), 4), items)
    training, held_out = states.rows(held_out=False), states.rows(held_out=True)
    assert not set(training.tolist()) & set(held_out.tolist())
    assert len(training) + len(held_out) == sum(len(c.answer) - 1 for c in items)
    assert len(held_out) == sum(len(c.answer) - 1 for c in items if c.index % 3 == 0)
    assert (states.labels(torch.cat([training, held_out]), 1) >= 0).all()


class _Counting:
    """A model that counts its forwards and fails at one of them."""

    def __init__(self, model, fail_at=None):
        self.model, self.fail_at, self.calls = model, fail_at, 0

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def base_model(self, **options):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        return self.model.base_model(**options)


def test_interrupted_caching_continues(model, tmp_path):
    items = conversations()
    whole = cache(tmp_path / "whole", items, counting := _Counting(model), max_tokens=12)
    assert counting.calls > 4
    with pytest.raises(KeyboardInterrupt):
        cache(tmp_path / "cut", items, _Counting(model, fail_at=4), max_tokens=12)
    with open(tmp_path / "cut" / "states.bin", "ab") as file:
        file.write(b"half a row")  # written, but not yet counted as done
    continued = cache(tmp_path / "cut", items, rest := _Counting(model), max_tokens=12)
    assert rest.calls == counting.calls - 3
    assert torch.equal(continued.hidden, whole.hidden)
    cache(tmp_path / "cut", items, again := _Counting(model), max_tokens=12)
    assert again.calls == 0


def test_conversations_that_come_later_are_added(model, tmp_path):
    before = cache(tmp_path, conversations(), model)
    num_before = len(before.hidden)
    first = before.hidden.clone()
    items = conversations(13)
    states = cache(tmp_path, [*items[9:], *items[:9]], counting := _Counting(model), max_tokens=12)
    assert 0 < counting.calls <= 4
    assert torch.equal(states.hidden[:num_before], first)
    added = cache(tmp_path / "added", items[9:], model)
    torch.testing.assert_close(states.hidden[num_before:], added.hidden)
    assert states.pending_ids.tolist() == before.pending_ids.tolist() + added.pending_ids.tolist()


def test_what_follows_another_conversation_is_computed_again(model, tmp_path):
    items = conversations()
    cache(tmp_path, items, model)
    shortest, *others = hidden_module.by_length(items)
    states = cache(tmp_path, others, counting := _Counting(model))
    assert counting.calls > 0
    assert len(states.hidden) == sum(len(c.answer) for c in others)
    longest = others[-1]
    kept = cache(tmp_path, [*others[:-1], shortest], again := _Counting(model))
    assert again.calls == 1
    assert len(kept.hidden) == sum(len(c.answer) for c in items) - len(longest.answer)
