"""The parent's end of `worker`: one process for each provider, stopped while it is not asked.

A stopped process has no threads that spin, so providers that are kept loaded do not disturb the one that is timed.
"""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """A provider in a process of its own.

    Args:
        python: the interpreter that has the provider's packages.
        settings: what `worker.serve` and the provider's loader read.
        environment: variables for that process.
        log: where it writes whatever its libraries print.
        load_s: how long loading may take.

    Raises:
        RuntimeError: it could not be started, or it ended; the message has its own words.
    """

    def __init__(
        self,
        python: str,
        settings: dict[str, Any],
        environment: dict[str, str],
        log: IO[str],
        load_s: float | None = None,
    ) -> None:
        command = [python, "-m", "benchmarks.e2e.worker"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise RuntimeError(f"{python}: {error.strerror}") from error
        self.notes: dict[str, Any] = self.ask(settings, load_s)["notes"]

    def ask(self, request: dict[str, Any], limit_s: float | None = None) -> dict[str, Any]:
        """Wake the process, send a request, wait for its answer, and stop the process again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal("SIGCONT")
        try:
            self._process.stdin.write(json.dumps(request, default=str) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError("its process has ended") from None
        if limit_s is not None and not select.select([self._process.stdout], [], [], limit_s)[0]:
            self.close()
            raise RuntimeError(f"not done within {limit_s:g} s")
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"its process has ended with {self._process.wait()}"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self._signal("SIGSTOP")
        if hasattr(os, "waitid"):
            # A signal takes a moment; whoever is asked next must not share a core with this one.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _signal(self, name: str) -> None:
        if sys.platform != "win32":
            self._process.send_signal(getattr(signal, name))
