"""One provider's process: load a model once, then decode what the parent sends.

`processes.WorkerProcess` starts this file with the interpreter that has the provider's packages. One JSON object a line
goes each way. The first request holds the settings and is answered when the model is loaded; the others hold prompts.
Nothing but the standard library is imported before the provider is known: peers do not have our packages.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TextIO

from benchmarks import memory

PR_SET_PDEATHSIG = 1


class Decoded(NamedTuple):
    """The new tokens of each row up to their end, and what else is known.

    Attributes:
        texts: of each row.
        passes: the target's forward passes after the prompt's.
        tokens_per_step: that a row emitted after its first token.
        first_token_at: `time.perf_counter` when the prompts' pass was done.
    """

    texts: list[list[int]]
    passes: int | None = None
    tokens_per_step: float | None = None
    first_token_at: float | None = None


class Provider(NamedTuple):
    """What a loader returns: how to decode ``(prompts, max_new_tokens)``, and what else to say or to answer."""

    decode: Callable[[list[list[int]], int], Decoded]
    notes: Mapping[str, Any] = MappingProxyType({})
    gaps: Callable[[list[list[int]], list[list[int]]], list[float]] | None = None


def tokens_per_step(decoded: Decoded) -> float | None:
    """Return the tokens of a step after the first token, which the prompt's pass gives; None when unknown."""
    if decoded.tokens_per_step is not None or not decoded.passes or len(decoded.texts) > 1:
        return decoded.tokens_per_step
    return (len(decoded.texts[0]) - 1) / decoded.passes


def decode(provider: Provider, request: dict, resident_before: int | None) -> dict:
    """Decode a batch, and measure it."""
    tracked = memory.reset_resident_peak() is not None and resident_before is not None
    start = time.perf_counter()
    decoded = provider.decode(request["prompts"], request["max_new_tokens"])
    seconds = time.perf_counter() - start
    return {
        "texts": decoded.texts,
        "seconds": seconds,
        "first_token_s": None if decoded.first_token_at is None else decoded.first_token_at - start,
        "passes": decoded.passes,
        "tokens_per_step": tokens_per_step(decoded),
        "peak_bytes": memory.resident_peak() - (resident_before or 0) if tracked else None,
    }


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until the parent closes its end."""

    def answer(record: dict) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    settings = SimpleNamespace(**json.loads(requests.readline()))
    # What is resident before the model is there: the interpreter and the libraries.
    for package in settings.packages:
        importlib.import_module(package)
    before = memory.reset_resident_peak()
    provider: Provider = getattr(importlib.import_module(settings.module), settings.loader)(settings)
    answer({"notes": dict(provider.notes)})
    for line in requests:
        request = json.loads(line)
        if "queries" in request:
            assert provider.gaps is not None
            answer({"gaps": provider.gaps(request["prompts"], request["queries"])})
        else:
            answer(decode(provider, request, before))


def main() -> None:
    """Keep the pipe to the parent for answers, and send whatever libraries print to the log instead."""
    if sys.platform == "linux":
        # A parent that is killed must not leave a stopped process behind.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, answers)
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {first_line(error)}"}) + "\n")
        answers.flush()
        raise


def first_line(error: BaseException) -> str:
    """Return the first line of a message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


if __name__ == "__main__":
    # As a module of its package, so that the providers use the same classes.
    from benchmarks.e2e import worker

    worker.main()
