"""All pairs of option values in few cases."""

from collections.abc import Sequence
from itertools import combinations, product


def pairwise(options: dict[str, Sequence]) -> list[dict]:
    """Return cases such that every two values of two options meet in one; greedy, and always the same."""
    names = list(options)
    missing = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(options[a])), range(len(options[b])))
    }
    cases = []
    while missing:
        first = min(missing)
        chosen = {first[0]: first[1], first[2]: first[3]}
        for name in names:
            if name not in chosen:
                size = range(len(options[name]))
                chosen[name] = max(size, key=lambda i: (_gain(missing, names, chosen | {name: i}), -i))
        missing -= _pairs(names, chosen)
        cases.append({name: options[name][i] for name, i in chosen.items()})
    return cases


def _pairs(names: list[str], chosen: dict[str, int]) -> set:
    return {(a, chosen[a], b, chosen[b]) for a, b in combinations(names, 2) if a in chosen and b in chosen}


def _gain(missing: set, names: list[str], chosen: dict[str, int]) -> int:
    return len(missing & _pairs(names, chosen))
