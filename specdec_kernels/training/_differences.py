"""What a stored run was asked for, compared with what is asked for now."""

from collections.abc import Mapping
from typing import Any


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Say in which entries two mappings, or mappings inside them, differ: ``lr (0.1, now 0.2), seed (0, now 1)``.

    None is as good as no entry: an option that came after a run, and is not used, does not change it.
    """
    texts = []
    for name in {**found, **wanted}:
        before, now = found.get(name), wanted.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            texts.append(differences(before, now))
        elif before != now:
            texts.append(f"{name} ({before}, now {now})")
    return ", ".join(filter(None, texts))
