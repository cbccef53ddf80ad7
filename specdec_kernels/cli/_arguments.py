"""Kinds of command-line arguments that several commands take; a bad one is a message, not a traceback."""

from argparse import ArgumentTypeError

import torch


def device(text: str) -> torch.device:
    """Read a device that is there: ``cpu``, ``cuda``, ``cuda:1``."""
    if text.partition(":")[0] not in ("cpu", "cuda"):
        raise ArgumentTypeError(f"must be cpu or cuda, got {text}")
    try:
        chosen = torch.device(text)
    except RuntimeError as error:
        raise ArgumentTypeError(str(error)) from error
    num_devices = torch.cuda.device_count() if chosen.type == "cuda" else 1
    if (chosen.index or 0) >= num_devices:
        raise ArgumentTypeError(f"there is no {text} here, torch sees {num_devices} devices of its kind")
    return chosen


def positive_int(text: str) -> int:
    """Read a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"must be at least 1, got {number}")
    return number
