"""Sentences of the documentation with figures of result files: none is older than its file."""

import hashlib
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.e2e.catalogue import OURS
from benchmarks.e2e.rows import Row, Run, geometric, read_run
from benchmarks.e2e.shown import by_speed, fastest, named, shown

# What is shipped, by its folder among the examples, and which drafters need it.
TRAINED = {"heads": "heads", "adapters": "adapter", "skips": "skip sets"}
SHIPPED_FOR = {"medusa": "heads", "kangaroo": "adapters", "layer-skip": "skips"}
EXAMPLES = Path(__file__).parents[2] / "examples"
# Of the weights and the cache together: what a call may have at its peak.
MEMORY_SHARE = 1.3
# Of a provider's reason to be absent.
REASON_LENGTH = 140


def shipped() -> dict[str, str]:
    """Return a digest of every trained file that is shipped: a result says which ones it is of."""
    files = sorted([*EXAMPLES.glob("*/*/*.safetensors"), *EXAMPLES.glob("*/*/layer_skip.json")])
    return {path.relative_to(EXAMPLES).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


def age(run: Run) -> str:
    """Return what there is to say if a run is not known to be of what is shipped, as far as its drafters need that."""
    if "shipped" not in run.head:
        return " The run does not say which heads it is of; they may be older than the shipped ones."
    then, now = run.head["shipped"], shipped()
    changed = {path.partition("/")[0] for path in {**then, **now} if then.get(path) != now.get(path)}
    used = {folder for drafter, folder in SHIPPED_FOR.items() if any(drafter in name for name in run.providers())}
    replaced = [what for folder, what in TRAINED.items() if folder in changed & used]
    return (
        f" The {listed(replaced)} {'has' if replaced == ['adapter'] else 'have'} been replaced since."
        if replaced
        else ""
    )


def about(path: Path) -> list[str]:
    """Return what was run, what it comes to, and who was left out."""
    run = read_run(path)
    sentences = [setting(run, path), *_gains(run), *_gaps(run)]
    most = max(len(run.of(name)) for name in run.providers())
    rare = [name for name in run.providers() if len(run.of(name)) < most]
    if rare:
        sentences.append(f"Asked for fewer prompts: {listed(f'{named(n)} ({len(run.of(n))})' for n in rare)}.")
    for name, reason in run.head.get("absent", {}).items():
        line = reason.splitlines()[0]
        line = line if len(line) <= REASON_LENGTH else line[:REASON_LENGTH].rsplit(" ", 1)[0] + " …"
        sentences.append(f"Without {named(name)}: {line.rstrip('.')}.")
    return [" ".join(sentences) + age(run)]


def setting(run: Run, path: Path) -> str:
    """Return the sentence that names the prompts, the lengths, the machine and the file."""
    head, machine = run.head, run.head["machine"]
    prompts = {row.question_id: row.task for row in run.rows}
    lengthened = f" of about {head['prompt_tokens']} tokens" if "prompt_tokens" in head else ""
    prepared = ", ours prepared" if head.get("prepared") else ""
    return (
        f"{len(prompts)} prompts{lengthened} ({len(set(prompts.values()))} kinds of task), {head['max_new_tokens']} "
        f"new tokens, batch {head['batch_size']}, {head['dtype']}, {machine['model']}, {machine['threads']} "
        f"thread{'s' if machine['threads'] > 1 else ''}{prepared} (`{path.name}`)."
    )


def _gains(run: Run) -> list[str]:
    most = max(len(run.of(name)) for name in run.providers())
    asked = [name for name in run.providers() if len(run.of(name)) == most]
    ours, others = ([name for name in asked if (name in OURS) is own] for own in (True, False))
    if "generate" not in others or not ours:
        return []
    best = fastest(run, ours)
    parts = [f"{shown('{:.2f}', run.speed_up(best, 'generate'))} × as fast as HF `generate`"]
    if "plain" in ours and best != "plain":
        parts.append(f"{shown('{:.2f}', run.speed_up(best, 'plain'))} × as our plain decoding")
    if len(others) > 1:
        other = fastest(run, others)
        parts.append(f"{shown('{:.2f}', run.speed_up(best, other))} × as {named(other)}, the fastest of the others")
    kinds = list(dict.fromkeys(row.task for row in run.rows))
    ratios = sorted((run.speed_up(best, "generate", kind), kind) for kind in kinds)
    (low, low_kind), (high, high_kind) = ratios[0], ratios[-1]
    spread = f"; by kind of task {low:.2f} × ({low_kind}) to {high:.2f} × ({high_kind})" if len(kinds) > 1 else ""
    return [f"The fastest, {named(best)}, is {listed(parts)}{spread}."]


def _gaps(run: Run) -> list[str]:
    gaps = [row.gap_ulp for row in run.rows if row.gap_ulp is not None and row.provider in OURS]
    if not gaps:
        return []
    return [
        f"Where our texts leave those of HF `generate` ({len(gaps)} first differences), its two candidates lie in the "
        f"median {statistics.median(gaps):g} and at most {max(gaps):g} bf16 units in the last place apart."
    ]


def over_plain(path: Path) -> list[str]:
    """Return what each of our drafters gains over our plain decoding in the same run."""
    run = read_run(path)
    gains = [(run.speed_up(name, "plain"), name) for name in run.providers() if name in OURS and name != "plain"]
    said = listed(f"{shown('{:.2f}', gain)} × with `{name}`" for gain, name in gains)
    return [f"{setting(run, path)} Over plain decoding in the same run: {said}.{age(run)}"]


def first_tokens(path: Path) -> list[str]:
    """Return how long prompts take, and the speed-up of whole calls and after the prompt."""
    run = read_run(path)
    known = {name: [r.first_token_s for r in run.of(name) if r.first_token_s is not None] for name in by_speed(run)}
    firsts = sorted((statistics.median(values) * 1e3, name) for name, values in known.items() if values)
    calls = [(name, run.speed_up(name, "generate"), _after_prompt(run, name)) for name in run.providers()]
    ratios = [
        f"{named(name)} {shown('{:.2f}', call)} × ({shown('{:.2f}', after)} × after the prompt)"
        for name, call, after in calls
        if name != "generate"
    ]
    return [
        f"{setting(run, path)} The first token comes after (median) "
        f"{listed(f'{time:.0f} ms ({named(name)})' for time, name in firsts)}; whole calls over HF `generate`: "
        f"{listed(ratios)}.{age(run)}"
    ]


def _after_prompt(run: Run, name: str) -> float:
    others = {row.question_id: row.decode_tokens_per_s for row in run.of("generate")}
    return geometric(row.decode_tokens_per_s / others.get(row.question_id, float("nan")) for row in run.of(name))


def texts(pattern: Path, standard: str = "generate") -> list[str]:
    """Return, for each of the files that fit a pattern, whose texts are those of a standard."""
    lines = []
    for path in sorted(pattern.parent.glob(pattern.name)):
        run = read_run(path)
        shares: dict[str, list[str]] = {}
        for name in run.providers():
            if name not in ("generate", standard):
                shares.setdefault(same_texts(run.of(name), standard), []).append(named(name).removeprefix("our "))
        said = "; ".join(f"**{share}** with {listed(names)}" for share, names in shares.items())
        lines.append(f"- {setting(run, path)} Texts equal to those of {named(standard)}: {said}.{age(run)}")
    return lines


def same_texts(rows: list[Row], standard: str) -> str:
    """Return how many texts are those of a standard, ``-`` when it was not compared."""
    compared = [row.differs_from[standard] for row in rows if standard in row.differs_from]
    return f"{compared.count(None)} of {len(compared)}" if compared else "-"


def memory(path: Path) -> list[str]:
    """Return our largest peak beside the weights and the cache of the longest row."""
    run = read_run(path)
    peaks = [(row.peak_bytes, row) for row in run.rows if row.peak_bytes is not None and row.provider in OURS]
    if not peaks or "weight_bytes" not in run.head:
        return [f"`{path.name}` does not say how large its weights and its cache are."]
    peak, row = max(peaks, key=lambda pair: pair[0])
    longest = max((row.prompt_tokens or 0) + run.head["max_new_tokens"] for row in run.rows)
    weights = run.head["weight_bytes"] / 1e6
    cache = run.head["cache_bytes_per_token"] * longest * run.head["batch_size"] / 1e6
    limit = MEMORY_SHARE * (weights + cache)
    return [
        f"Our largest peak is {peak / 1e6:.0f} MB ({named(row.provider)}): the weights take {weights:.0f} MB, keys and "
        f"values of {longest} tokens {cache:.1f} MB, and {MEMORY_SHARE:g} times both are {limit:.0f} MB"
        f"{'' if peak / 1e6 <= limit else ', **which is exceeded**'} (`{path.name}`)."
    ]


def listed(parts: Iterable[str]) -> str:
    """Return ``a, b and c``."""
    *some, last = parts
    return f"{', '.join(some)} and {last}" if some else last
