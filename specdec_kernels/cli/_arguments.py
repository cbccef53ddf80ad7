"""Kinds of command-line arguments that several commands take; a bad one is a message, not a traceback."""

import math
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable
from typing import Any

import torch

from .._native import load_errors
from ..decoding.calibration import Setting


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


def positive_float(text: str) -> float:
    """Read a number above 0."""
    return _number(text, lambda number: 0 < number < math.inf, "above 0")


def not_negative(text: str) -> float:
    """Read a number of at least 0."""
    return _number(text, lambda number: 0 <= number < math.inf, "at least 0")


def probability(text: str) -> float:
    """Read a number in [0, 1]."""
    return _number(text, lambda number: 0 <= number <= 1, "in [0, 1]")


def _number(text: str, is_right: Callable[[float], bool], what: str) -> float:
    number = float(text)
    if not is_right(number):
        raise ArgumentTypeError(f"must be {what}, got {text}")
    return number


def add_setting_arguments(parser: Any) -> None:
    """Declare what tells calibrations of one machine apart."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", type=device, default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=positive_int, help="of the CPU kernels; default: torch's choice")
    add_prepare_argument(parser, "measure a prepared model")


def add_prepare_argument(parser: Any, what: str) -> None:
    """Declare ``--prepare`` and ``--no-prepare``; `prepares` says what neither of them means."""
    why = "(default: in bfloat16 on the CPU, when the native kernels are there)"
    parser.add_argument("--prepare", action=BooleanOptionalAction, help=f"{what} {why}")


def prepares(args: Namespace) -> bool:
    """Say whether the model is to be prepared.

    Raises:
        ValueError: it is asked for where it changes nothing.
    """
    can_prepare = args.dtype == "bfloat16" and torch.device(args.device).type == "cpu"
    if args.prepare and not can_prepare:
        raise ValueError(f"--prepare needs --dtype bfloat16 and --device cpu, got {args.dtype} and {args.device}")
    return can_prepare and load_errors["_C"] is None if args.prepare is None else args.prepare


def setting_of(args: Namespace) -> Setting:
    """Return the setting that the arguments name, after setting the number of threads."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return Setting.here(torch.device(args.device), getattr(torch, args.dtype), prepared=prepares(args))
