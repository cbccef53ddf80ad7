"""Loaders for `benchmarks.e2e.worker` that need no model: a text continues its prompt by counting."""

import time
from types import SimpleNamespace

from benchmarks.e2e.worker import Decoded, Provider


def counting(settings: SimpleNamespace) -> Provider:
    print("a library prints while it loads")

    def decode(prompts: list[list[int]], max_new_tokens: int) -> Decoded:
        print("and while it decodes")
        held = bytearray(settings.held_bytes)
        held[::4096] = b"x" * len(held[::4096])
        return Decoded([[prompt[-1] + 1 + i for i in range(max_new_tokens)] for prompt in prompts], max_new_tokens // 2)

    return Provider(decode, {"version": "1"}, lambda prompts, queries: [float(len(prompts))] * len(queries))


def failing(settings: SimpleNamespace) -> Provider:
    raise OSError("no such model\nand a long story")


def crashing(settings: SimpleNamespace) -> Provider:
    raise SystemExit(3)


def sleeping(settings: SimpleNamespace) -> Provider:
    time.sleep(60)
    raise AssertionError("nobody waits so long")
