"""Draw the results of a benchmark as SVG: one group of bars for each case, on a logarithmic axis of time."""

import json
from pathlib import Path


def plot(jsonl: Path) -> Path:
    """Draw ``<op>.jsonl`` as ``<op>.svg`` beside it.

    Raises:
        RuntimeError: matplotlib is not installed (``pip install specdec-kernels[bench]``).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("drawing needs matplotlib: pip install 'specdec-kernels[bench]'") from error

    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    cases = list(dict.fromkeys(record["case"] for record in records))
    # One row a record, and an empty row between cases.
    rows = {(r["case"], r["provider"]): slot + cases.index(r["case"]) for slot, r in enumerate(records)}
    figure = Figure(figsize=(9, 1.6 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(record["provider"] for record in records):
        mine = [record for record in records if record["provider"] == name]
        medians = [record["median_us"] for record in mine]
        spread = [
            [record["median_us"] - record["p20_us"] for record in mine],
            [record["p80_us"] - record["median_us"] for record in mine],
        ]
        at = [rows[record["case"], name] for record in mine]
        axes.barh(at, medians, xerr=spread, label=name, error_kw={"linewidth": 0.7})
    of_case = {case: [row for (other, _), row in rows.items() if other == case] for case in cases}
    axes.set_yticks([sum(at) / len(at) for at in of_case.values()], cases)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("median time of a call, µs (whiskers: 20th to 80th percentile)")
    machine = records[0]["machine"]
    axes.set_title(f"{records[0]['op']} on {machine['model']}, {machine['threads']} threads, torch {machine['torch']}")
    figure.legend(loc="outside lower center", ncols=3)
    path = jsonl.with_suffix(".svg")
    figure.savefig(path)
    return path
