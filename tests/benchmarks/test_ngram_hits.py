"""How often n-grams are right: counted by hand, and what the drafter takes for it."""

import json

import pytest

from benchmarks.harness import RESULTS
from benchmarks.ngram_hits import Hits, added, count_hits
from specdec_kernels.decoding.drafters import ngram


def test_hits_of_a_text():
    #       prompt       | 2: as after 1 before  5: not as after 2; 1: never after 5 (new)  2: after 1, then 3 wrong (5)
    text = [9, 1, 2, 3, 1, 2, 5, 1, 2, 5]
    hits = count_hits(text, 4, max_ngram=2)
    # Behind "1": 2 is right, then 3 is wrong. Behind "1 2": 3 is wrong. Behind "5": nothing has occurred. Behind "1":
    # 2, 5 are right. Behind "1 2": 5 is right.
    assert hits == {1: Hits(2, 2, 1, 2), 2: Hits(1, 2, 0, 0)}
    assert added([hits, hits, {3: Hits(1, 1, 0, 0)}]) == {
        1: Hits(4, 4, 2, 4), 2: Hits(2, 4, 0, 0), 3: Hits(1, 1, 0, 0)
    }  # fmt: skip


def test_the_drafter_takes_what_was_counted():
    rows = [json.loads(line) for line in (RESULTS / "amd-epyc" / "ngram_hits.jsonl").read_text().splitlines()]
    counts = {row["suffix"]: row for row in rows if "suffix" in row}
    for suffix, first, following in zip((1, 2, 3), ngram._FIRST_HITS, ngram._NEXT_HITS, strict=True):
        assert first == pytest.approx(counts[suffix]["first"] / counts[suffix]["positions"], abs=0.006)
        assert following == pytest.approx(counts[suffix]["next"] / counts[suffix]["drafted"], abs=0.006)
