"""How providers and figures are shown to readers."""

import math

from benchmarks.e2e.catalogue import OURS
from benchmarks.e2e.rows import Run, geometric

LABELS = {"generate": "HF `generate`", "plain": "ours, `plain`"}


def shown(form: str, value: float) -> str:
    """Format a number; ``-`` stands for what is not known."""
    return "-" if math.isnan(value) else form.format(value)


def label(name: str) -> str:
    """Return a provider's name for readers."""
    return LABELS.get(name) or (f"ours, {name}" if name in OURS else name.replace("hf-", "HF "))


def named(name: str) -> str:
    """Return a provider's name inside a sentence."""
    return f"our `{name}`" if name in OURS else label(name)


def by_speed(run: Run) -> list[str]:
    """Return the providers, others before ours, the slower before the faster."""
    return sorted(run.providers(), key=lambda name: (name in OURS, geometric(r.tokens_per_s for r in run.of(name))))


def fastest(run: Run, names: list[str]) -> str:
    """Return the one with the greatest speed-up over ``generate``, on the prompts that it was asked."""
    return max(names, key=lambda name: run.speed_up(name, "generate"))
