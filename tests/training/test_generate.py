import pytest
import torch

from specdec_kernels.hf.load import load_model, load_tokenizer
from specdec_kernels.training.data import template_of
from specdec_kernels.training.generate import BatchedWriter, Job, Limits, sample_rows
from tests.hf.tiny import tiny_model

LIMITS = Limits(user_len=5, answer_len=9)


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny, torch.float32)


@pytest.fixture(scope="module")
def template(tiny):
    return template_of(load_tokenizer(tiny))


def write(model, template, jobs, num_slots, seed=0, limits=LIMITS):
    writer = BatchedWriter(model, template, num_slots=num_slots, limits=limits, max_start=12, seed=seed)
    return sorted(writer.write(jobs), key=lambda c: c.index)


def prompts_of(template, count):
    """Prompts of different lengths, so that the slots are never in step."""
    return [(*template.before_user, *range(6, 7 + i), *template.after_user)[:12] for i in range(count)]


def test_greedy_answers_equal_generate(model, template):
    prompts = prompts_of(template, 5)
    jobs = [Job(i, p, writes_user_turn=False, greedy=True) for i, p in enumerate(prompts)]
    written = write(model, template, jobs, num_slots=2)
    assert [c.prompt for c in written] == prompts
    for conversation in written:
        expected = model.generate(
            torch.tensor([conversation.prompt]), attention_mask=torch.ones(1, len(conversation.prompt), dtype=int),
            max_new_tokens=LIMITS.answer_len, do_sample=False, eos_token_id=sorted(template.stop),
        )  # fmt: skip
        assert list(conversation.answer) == expected[0, len(conversation.prompt) :].tolist()


def test_sampled_texts_do_not_depend_on_the_slots(model, template):
    jobs = [Job(i, template.before_user, writes_user_turn=True, greedy=i % 2 == 0) for i in range(7)]
    alone = [write(model, template, [job], num_slots=1)[0] for job in jobs]
    assert write(model, template, jobs, num_slots=3) == alone
    assert write(model, template, jobs, num_slots=3, seed=1) != alone


def test_user_turn_is_written_and_closed(model, template):
    jobs = [Job(i, template.before_user, writes_user_turn=True, greedy=False) for i in range(6)]
    for conversation in write(model, template, jobs, num_slots=4):
        start, end = len(template.before_user), len(conversation.prompt) - len(template.after_user)
        assert conversation.prompt[:start] == template.before_user
        assert conversation.prompt[end:] == template.after_user
        user = conversation.prompt[start:end]
        assert len(user) <= LIMITS.user_len
        assert not template.stop & set(user)


def test_answers_end_at_the_stop_id_or_the_limit(model, template):
    jobs = [Job(i, template.before_user, writes_user_turn=True, greedy=False) for i in range(40)]
    answers = [c.answer for c in write(model, template, jobs, 8, limits=Limits(5, 9, 1.0, 2.0))]
    assert all(1 <= len(a) <= 9 for a in answers)
    assert all((a[-1] in template.stop) == bool(template.stop & set(a)) for a in answers)
    ended = [a for a in answers if a[-1] in template.stop]
    assert ended
    assert all(len(a) == 9 for a in answers if a not in ended)


def test_attention_implementation_is_restored(model, template):
    before = model.config._attn_implementation
    write(model, template, [Job(0, template.before_user, True, True)], num_slots=1)
    assert model.config._attn_implementation == before


def test_sample_rows_inverts_the_cumulated_distribution():
    probs = torch.tensor([0.5, 0.3, 0.2])
    logits = probs.log().expand(4, 3)
    assert sample_rows(logits, [1.0] * 4, torch.tensor([0.0, 0.49, 0.51, 0.999])) == [0, 0, 1, 2]
    assert sample_rows(logits, [0.0] * 4, torch.tensor([0.0, 0.49, 0.51, 0.999])) == [0, 0, 0, 0]
    # At T = 0.5 the odds are squared: 0.25, 0.09, 0.04 of 0.38.
    assert sample_rows(logits, [0.5] * 4, torch.tensor([0.65, 0.67, 0.88, 0.91])) == [0, 1, 1, 2]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
def test_families_with_caps_sinks_and_windows(template, family):
    """Texts longer than the window of 4; the answers are those of `generate`."""
    model = tiny_model(family)
    prompts = [(1, *range(6, 11 + i)) for i in range(3)]
    jobs = [Job(i, p, writes_user_turn=False, greedy=True) for i, p in enumerate(prompts)]
    for conversation in write(model, template, jobs, num_slots=2):
        ids = torch.tensor([conversation.prompt])
        expected = model.generate(
            ids, max_new_tokens=LIMITS.answer_len, do_sample=False, eos_token_id=sorted(template.stop), pad_token_id=0
        )
        assert list(conversation.answer) == expected[0, ids.shape[1] :].tolist()
