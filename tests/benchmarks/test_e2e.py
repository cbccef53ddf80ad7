"""`benchmarks.e2e`: what it compares, what it reports, and that the documentation has the result file's figures."""

import math
from types import SimpleNamespace

import pytest

from benchmarks.e2e import compare, report, scaling, starting
from benchmarks.e2e.prompts import encode, lengthened, read_prompts
from benchmarks.e2e.rows import Row, Run, percentile, read_run, without_folders, write_run

HEAD = {
    "machine": {"model": "Some CPU", "threads": 2},
    "command": "python -m benchmarks.e2e.compare",
    "model": "m",
    "dtype": "bfloat16",
    "batch_size": 1,
    "max_new_tokens": 8,
    "absent": {"vllm": "needs --peer-python vllm=PYTHON"},
}


class FakeWorker:
    """Answers like `processes.WorkerProcess`, with given texts."""

    def __init__(self, *texts: list[int]):
        self.texts, self.closed = list(texts), False

    def ask(self, request: dict) -> dict:
        if "queries" in request:
            return {"gaps": [float(position) for _, position, _, _ in request["queries"]]}
        if not self.texts:
            raise RuntimeError("out of memory")
        return {"texts": self.texts, "seconds": 0.5, "passes": 1, "tokens_per_step": None, "peak_bytes": 7}

    def close(self) -> None:
        self.closed = True


def options(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"max_new_tokens": 4, "gaps": False, "texts_only": False, **changes})


def row(question: int, provider: str, tokens: int, seconds: float, task: str = "qa", **rest) -> Row:
    return Row(question, task, provider, tokens, tokens, seconds, **rest)


def test_first_difference() -> None:
    assert compare.first_difference([1, 2], [1, 2]) is None
    assert compare.first_difference([1, 2], [1, 3]) == 1
    assert compare.first_difference([1, 2], [1]) == 1


def test_every_text_is_held_against_generate_and_its_own_plain_text() -> None:
    workers = {"generate": FakeWorker([1, 2, 3]), "plain": FakeWorker([1, 2, 4]), "ngram": FakeWorker([1, 2, 4])}
    rows = compare.compare_batch(workers, [[0]], [{"question_id": 3, "task": "qa"}], options(), {})
    assert {r.provider: r.differs_from for r in rows} == {
        "generate": {},
        "plain": {"generate": 2},
        "ngram": {"generate": 2, "plain": None},
    }
    assert [(r.question_id, r.task, r.new_tokens, r.seconds, r.peak_bytes) for r in rows] == [(3, "qa", 3, 0.5, 7)] * 3
    assert compare.kept(rows, "bfloat16")
    assert not compare.kept(rows, "float32")


def test_who_fails_on_the_way_is_left_out_from_there_on() -> None:
    workers, absent = {"generate": FakeWorker([1]), "vllm": FakeWorker()}, {}
    rows = compare.compare_batch(workers, [[0]], [{"question_id": 3, "task": "qa"}], options(), absent)
    assert [r.provider for r in rows] == ["generate"]
    assert absent == {"vllm": "failed at question 3: out of memory"}


def test_gaps_are_asked_for_where_a_text_leaves_generate() -> None:
    workers = {"generate": FakeWorker([1, 2], [1, 2]), "plain": FakeWorker([1, 2], [1, 5])}
    questions = [{"question_id": i, "task": "qa"} for i in (0, 1)]
    rows = compare.compare_batch(workers, [[0], [0]], questions, options(gaps=True), {})
    assert [r.gap_ulp for r in rows] == [None, None, None, 1.0]
    assert "1 are near-ties" in report.table(Run(HEAD, rows))[-1]


def test_untimed_runs_have_no_times() -> None:
    rows = compare.compare_batch(
        {"generate": FakeWorker([1])}, [[0]], [{"question_id": 0, "task": "qa"}], options(texts_only=True), {}
    )
    assert rows[0].seconds is None
    assert rows[0].peak_bytes is None
    assert report.progress(rows) == "all equal"


def test_who_fails_or_has_other_weights_is_left_out(capsys) -> None:
    beginning = [1, 2, 3, 4]
    workers = {
        "generate": FakeWorker([*beginning, 5]),
        "vllm": FakeWorker([*beginning, 6]),
        "llama.cpp": FakeWorker([1, 2, 3, 5]),
        "hf-lookup": FakeWorker(),
    }
    absent: dict[str, str] = {}
    other = workers["llama.cpp"]
    starting.warm_up(workers, [[0]], absent)
    assert list(workers) == ["generate", "vllm"]
    assert absent.keys() == {"llama.cpp", "hf-lookup"}
    assert "not the same weights" in absent["llama.cpp"]
    assert other.closed
    assert "without hf-lookup: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "batch_size", "reason"),
    [
        ("vllm", 1, "needs --peer-python vllm=PYTHON"),
        ("hf-lookup", 2, "decodes at most 1 at once"),
        ("draft-model", 1, "needs --draft-model"),
        ("plain", 4, None),
    ],
)
def test_says_beforehand_who_cannot_take_part(name, batch_size, reason) -> None:
    args = SimpleNamespace(peer_python={}, batch_size=batch_size, draft_model=None, model="smollm2")
    found = starting.reason_against(name, args)
    assert found == reason if reason is None else reason in found


def test_no_path_of_the_machine_is_written() -> None:
    assert without_folders("no heads at /some/where/heads; 3/4 are") == "no heads at heads; 3/4 are"
    assert without_folders("vllm=/opt/x/bin/python") == "vllm=python"


def test_a_limit_takes_from_every_kind_of_task(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"question_id": {i}, "task": "{task}"}}\n' for i, task in enumerate("aaabbc")))
    assert [q["question_id"] for q in read_prompts(file, 4)] == [0, 3, 5, 1]
    assert len(read_prompts(file, None)) == 6


class WordTokenizer:
    """A token for each word; a chat has one more in front."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": text.split()}

    def decode(self, ids):
        return " ".join(ids)

    def apply_chat_template(self, chats, **_):
        return {"input_ids": [["<user>", *chat[0]["content"].split()] for chat in chats]}


def test_prompts_are_lengthened_by_those_behind_them() -> None:
    questions = [{"question_id": i, "task": "qa", "turns": [f"{i}a {i}b {i}c"]} for i in range(4)]
    found = lengthened([questions[2], questions[0]], questions, WordTokenizer(), 8)
    words = [" ".join(q["turns"][0].split()) for q in found]
    assert words == ["3a 3b 3c 0a 2a 2b 2c", "1a 1b 1c 2a 0a 0b 0c"]
    assert [len(ids) for ids in encode(WordTokenizer(), [q["turns"][0] for q in found])] == [8, 8]
    assert lengthened(questions[:1], questions, WordTokenizer(), 3)[0] == questions[0]


def test_percentile() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0, 0.5, 0.75, 1)] == [1, 2, 2.5, 3]


def test_speed_up_is_the_geometric_mean_of_the_ratios() -> None:
    rows = [row(1, "generate", 10, 1), row(2, "generate", 10, 1, "rag"), row(1, "ngram", 10, 0.25)]
    rows.append(row(2, "ngram", 10, 1, "rag"))
    run = Run(HEAD, rows)
    assert run.speed_up("ngram", "generate") == pytest.approx(2)
    assert run.speed_up("ngram", "generate", "qa") == pytest.approx(4)
    assert math.isnan(run.speed_up("ngram", "plain"))


def test_figures_of_a_provider() -> None:
    rows = [row(1, "generate", 10, 1)]
    rows.append(
        row(1, "ngram", 10, 0.5, passes=4, tokens_per_step=2.25, peak_bytes=3 * 10**8, differs_from={"generate": 4})
    )
    run = Run(HEAD, rows)
    assert report.figures(run, "ngram") == [
        *("20.0", "20.0", "20.0–20.0", "2.00", "2.25", "100.0", "300"),
        *("0 of 1", "-"),
    ]
    assert "without vllm: needs --peer-python vllm=PYTHON" in report.table(run)


def test_ours_come_last_and_the_fastest_stands_out() -> None:
    rows = [
        row(1, name, 10, seconds) for name, seconds in (("plain", 0.4), ("generate", 1), ("vllm", 0.2), ("ngram", 0.1))
    ]
    lines = report.markdown(Run(HEAD, rows))[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| HF `generate`", "| vllm", "| ours, `plain`", "| ours, ngram"]
    assert ["**" in line for line in lines] == [False, False, False, True]
    some = report.markdown(Run(HEAD, rows), "plain", "kangaroo", "generate")[2:]
    assert [line.split(" | ")[0] for line in some] == ["| HF `generate`", "| ours, `plain`"]
    assert not any("**" in line for line in some)


def test_result_files_are_read_as_written(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    run = Run(HEAD, [row(1, name, 10, 1, differs_from={"plain": 3}) for name in ("generate", "ngram")])
    write_run(tmp_path / "e2e.jsonl", run)
    assert read_run(tmp_path / "e2e.jsonl") == run
    assert "HF generate" in report.plot(tmp_path / "e2e.jsonl").read_text()


def test_filled_replaces_marked_blocks_only(tmp_path) -> None:
    run = Run(HEAD, [row(1, "generate", 10, 1)])
    write_run(tmp_path / "a" / "b.jsonl", run)
    text = "before\n<!-- e2e a/b -->\nold\n<!-- /e2e -->\nafter\n"
    page = report.filled(text, tmp_path)
    lines = ["before", "<!-- e2e a/b -->", "", *report.markdown(run), "", "<!-- /e2e -->", "after", ""]
    assert page == "\n".join(lines)
    assert report.filled(page, tmp_path) == page
    text = "<!-- e2e a/b plain ngram -->\nold\n<!-- /e2e -->\n"
    assert report.filled(text, tmp_path).splitlines() == [
        *("<!-- e2e a/b plain ngram -->", "", *report.markdown(run, "plain"), "", "<!-- /e2e -->")
    ]


def test_the_prompts_time_and_the_rate_after_it() -> None:
    rows = [row(1, "generate", 11, 2, first_token_s=1.0), row(1, "plain", 11, 0.5, first_token_s=0.25)]
    rows.append(row(1, "vllm", 11, 1))
    run = Run(HEAD, rows)
    assert report.phases(run, "plain") == ["4.00", "250", "4.00", "40.0", "4.00"]
    assert report.phases(run, "vllm") == ["2.00", "-", "-", "-", "-"]
    assert rows[0].decode_tokens_per_s == 10
    assert math.isnan(row(1, "plain", 1, 0.5, first_token_s=0.25).decode_tokens_per_s), "nothing came after the first"
    assert any("first token ms" in line for line in report.table(run))
    assert len(report.markdown_phases(run)) == 2 + 3


def test_rates_over_plain_decoding_for_every_prompt() -> None:
    rows = [row(1, "plain", 11, 2, first_token_s=1.0), row(2, "plain", 11, 2, "rag", first_token_s=1.0)]
    rows.append(row(2, "medusa", 11, 0.75, "rag", first_token_s=0.25))
    lines = report.markdown_prompts(Run(HEAD, rows))
    assert lines[0] == "| then tokens/s × own plain | qa | rag |"
    assert lines[2:] == ["| ours, `plain` | 1.00 | 1.00 |", "| ours, medusa | - | 2.00 |"]


def test_drafters_by_kind_of_task_beside_generate() -> None:
    rows = [row(1, "generate", 10, 1), row(2, "generate", 10, 1, "rag"), row(1, "medusa", 10, 0.25, tokens_per_step=2)]
    lines = report.markdown_drafters(Run(HEAD, rows), "generate", "medusa", "ngram")
    assert lines[0] == "| | tokens/step | tokens/s | × HF | × HF, qa | × HF, rag |"
    assert lines[2:] == [
        "| HF `generate` | - | 10.0 | 1.00 | 1.00 | 1.00 |",
        "| ours, medusa | 2.00 | 40.0 | 4.00 | 4.00 | - |",
    ]


def test_points_of_a_scaling_run_become_tables(tmp_path) -> None:
    speeds = {"plain": 50.0, "budget": 60.0, "largest": 40.0}
    points = [scaling.Point("batch", 2, p, 256, 2, v, 1.5, 20.0, [0, 1], 2 * v) for p, v in speeds.items()]
    points += [scaling.Point("context", 512, p, 512, 1, v, 1.5, 20.0, [0, 1], 2 * v) for p, v in speeds.items()]
    points += [scaling.Point("nodes", 4, "speculative", 256, 1, 80.0, 2.0, 25.0, [0, 1], 60.0)]
    (tmp_path / "calibration.json").write_text("{}")
    scaling.save(tmp_path / "points.jsonl", points, tmp_path / "calibration.json")
    lines = scaling.markdown(tmp_path / "points.jsonl")
    numbers = "| 50 | 60 | 40 | 1.20 × | 1.50 / 1.50 / 1.50 | 2.00 / 2.00 / 2.00 |"
    assert lines[2:5] == [f"| 512 tokens, B = 1 {numbers}", f"| B = 2, 256 tokens {numbers}", ""]
    assert lines[7:9] == ["| 4 | 80 | 2.00 | 25.0 | 0.75 |", ""]
    assert lines[9].startswith("`python -m benchmarks.e2e.scaling")
    assert lines[9].endswith("`. The calibration is another one now.")


def test_the_documentation_has_the_figures_of_the_result_files() -> None:
    pages = report.pages()
    assert "README.md" in [page.name for page in pages]
    for page in pages:
        assert page.read_text() == report.filled(page.read_text()), f"python -m benchmarks.e2e.report --write ({page})"
