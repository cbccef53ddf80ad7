"""The name of the machine that something was measured on: no host names, no paths."""

import platform
import re
from pathlib import Path

import torch


def cpu_name() -> str:
    """Return the processor's model name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of this machine's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def slug(name: str) -> str:
    """Return a name for files and folders: ``amd-epyc-7763``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
