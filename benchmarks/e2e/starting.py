"""Who takes part in a run of `benchmarks.e2e.compare`: start every provider that can, and say why the others cannot."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.e2e.catalogue import OURS, PROVIDERS, drafter_of
from benchmarks.e2e.peers import environment
from benchmarks.e2e.processes import WorkerProcess
from benchmarks.e2e.weights import GGUF_FILE, MODEL_FOLDER
from specdec_kernels.cli import _drafters

# The same weights give the same first tokens where the model is sure of them; later ones may be near-ties.
GATE_PROMPT, GATE_TOKENS, WARM_UP_TOKENS = "What is the capital of France?", 4, 16


def settings_of(name: str, args, folder: Path, shared: dict[str, Any]) -> dict[str, Any]:
    """Return what a worker is told."""
    entry = PROVIDERS[name]
    own = {"name": name, "module": f"benchmarks.e2e.{entry.module}", "loader": entry.loader, "packages": entry.packages}
    heads = args.heads or _drafters.SHIPPED_HEADS
    paths = {"folder": folder / MODEL_FOLDER, "gguf": args.gguf or folder / GGUF_FILE, "medusa_heads": heads}
    return {**vars(args), **shared, **own, **{key: str(path) for key, path in paths.items()}}


def reason_against(name: str, args) -> str | None:
    """Say why a provider cannot take part, None when nothing is known against it; loads nothing."""
    entry = PROVIDERS[name]
    if entry.peer and entry.peer not in args.peer_python:
        return f"needs --peer-python {entry.peer}=PYTHON"
    if args.batch_size > entry.max_batch:
        return f"decodes at most {entry.max_batch} at once"
    try:
        if name in OURS:
            _drafters.check(drafter_of(name), args)
    except SystemExit as error:
        return str(error)
    return None


@contextlib.contextmanager
def started(args, folder: Path, shared: dict[str, Any], log) -> Iterator[tuple[dict[str, WorkerProcess], dict]]:
    """Start every provider that can run; yield them by name, and why the others are left out."""
    workers: dict[str, WorkerProcess] = {}
    absent: dict[str, str] = {}
    try:
        for name in args.provider:
            reason = reason_against(name, args)
            if reason is None:
                python = args.peer_python.get(PROVIDERS[name].peer or "", sys.executable)
                variables = environment(PROVIDERS[name].peer or "", python, torch.get_num_threads())
                try:
                    settings = settings_of(name, args, folder, shared)
                    workers[name] = WorkerProcess(python, settings, variables, log, args.load_seconds)
                    print(f"loaded {name} {workers[name].notes or ''}", flush=True)
                except RuntimeError as error:
                    reason = str(error)
            if reason is not None:
                absent[name] = reason
                print(f"without {name}: {reason}", flush=True)
        yield workers, absent
    finally:
        for worker in workers.values():
            worker.close()


def warm_up(workers: dict[str, WorkerProcess], prompts: list[list[int]], absent: dict[str, str]) -> None:
    """Let every provider decode once; leave out those that fail or begin otherwise than ``generate``."""
    request = {"prompts": prompts, "max_new_tokens": WARM_UP_TOKENS}
    beginnings: dict[str, list[list[int]]] = {}
    for name, worker in workers.items():
        try:
            beginnings[name] = [text[:GATE_TOKENS] for text in worker.ask(request)["texts"]]
        except RuntimeError as error:
            absent[name] = str(error)
    wanted = beginnings.get("generate", next(iter(beginnings.values()), None))
    for name, beginning in beginnings.items():
        if beginning != wanted:
            absent[name] = f"begins with {beginning[0]} where {wanted and wanted[0]} is right: not the same weights"
    for name in [name for name in workers if name in absent]:
        workers.pop(name).close()
        print(f"without {name}: {absent[name]}", flush=True)
