"""`benchmarks.e2e.accuracies`: tables of what a training wrote."""

import json

from benchmarks.e2e import accuracies


def test_shares_add_up_by_rank(tmp_path):
    path = tmp_path / "accuracy.json"
    heads, greedy = [[0.4, 0.1, 0.1, *[0.01] * 7], [0.2] + [0.05] * 9], [[0.5] + [0.0] * 9, [0.25] * 4 + [0.0] * 6]
    path.write_text(json.dumps({"heads": heads, "greedy_heads": greedy}))
    assert accuracies.markdown(path) == [
        "| head | token | top-1 | top-2 | top-3 | top-5 | top-10 |",
        "|---|---|---|---|---|---|---|",
        "| 1 | t+2 | 0.400 | 0.500 | 0.600 | 0.620 | 0.670 |",
        "| 2 | t+3 | 0.200 | 0.250 | 0.300 | 0.400 | 0.650 |",
    ]
    assert accuracies.markdown(path, "greedy_heads")[3] == "| 2 | t+3 | 0.250 | 0.500 | 0.750 | 1.000 | 1.000 |"
    assert accuracies.markdown_by_head(path) == [
        "| held-out part | head 1 | head 2 |",
        "|---|---|---|",
        "| all answers, top-1 | 0.400 | 0.200 |",
        "| all answers, top-10 | 0.670 | 0.650 |",
        "| greedy answers, top-1 | 0.500 | 0.250 |",
    ]
