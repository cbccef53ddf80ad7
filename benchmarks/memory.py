"""How much memory a call needs beyond its inputs, at its peak."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def peak_extra_bytes(run: Callable[[], Any], device: "torch.device") -> int | None:
    """Return how far memory grows while ``run`` runs, its results included; None where the system does not tell.

    On a CPU these are resident pages, so the answer is right to a few of them. Memory that an earlier call has freed is
    handed back first, or it would be used again unseen. Call ``run`` once before: its code must be loaded.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    resident = reset_resident_peak()
    run()
    return None if resident is None else max(0, resident_peak() - resident)


def reset_resident_peak() -> int | None:
    """Hand freed memory back, forget the peak, and return the resident bytes now; None where Linux does not tell."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or not CLEAR.exists():
        return None
    trim(0)
    CLEAR.write_text(RESET_PEAK)
    return _status_bytes("VmRSS")


def resident_peak() -> int:
    """Return the most bytes that were resident since `reset_resident_peak`."""
    return _status_bytes("VmHWM")


def describe_peak(run: Callable[[], Any], device: "torch.device") -> str:
    """Return `peak_extra_bytes` of a call for reading, in MB; the call is made once before."""
    run()
    peak = peak_extra_bytes(run, device)
    return "unknown" if peak is None else f"{peak / 1e6:.2f} MB"


def _status_bytes(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, key
    return int(found.group(1)) * 1024
