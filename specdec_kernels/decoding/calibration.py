"""What steps and drafters cost on a machine, measured once and kept beside the heads."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._machine import device_name, slug
from .budget import CostPoint, CostTable, NodeBudget
from .learning_budget import LearningBudget


@dataclass(frozen=True)
class Setting:
    """What a step's time depends on besides its sizes.

    Attributes:
        device: the name of the processor or GPU.
        threads: of torch's CPU kernels.
        dtype: of the model, ``"bfloat16"``.
        prepared: whether `specdec_kernels.hf.prepare.prepare` was applied.
    """

    device: str
    threads: int
    dtype: str
    prepared: bool

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}"
        return f"{self.device}, {threads}, {self.dtype}, {'prepared' if self.prepared else 'not prepared'}"

    @classmethod
    def here(cls, device: torch.device, dtype: torch.dtype, *, prepared: bool) -> "Setting":
        """Return the setting of a model on a device of this machine, with the present number of threads."""
        return cls(device_name(device), torch.get_num_threads(), str(dtype).removeprefix("torch."), prepared)


@dataclass(frozen=True)
class DrafterProfile:
    """What a drafter brings and costs.

    Attributes:
        gains: how often each node of its drafts was accepted; the root's is 1.
        widths: ``widths[t]`` steps of one row had drafts of *t* nodes.
        rest: the time of a step outside the target's forward: drafting, verification, compaction, the loop.
        num_steps: row-steps that were counted.
    """

    gains: Sequence[float]
    widths: Sequence[int]
    rest: CostTable
    num_steps: int


@dataclass
class Calibration:
    """The costs of a model's steps on one machine, in one setting.

    Attributes:
        setting: of the measurement.
        steps: the time of the target's forward.
        drafters: profiles by name.
        metadata: further JSON values: the model, the command, versions.
    """

    setting: Setting
    steps: CostTable
    drafters: dict[str, DrafterProfile] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def step_us(self, drafter: str | None = None) -> Callable[[int, int, int], float]:
        """Return ``(num_nodes, batch_size, context_len) → microseconds`` of a step, drafting included if it is known.

        Args:
            drafter: whose drafting counts; one without a profile costs nothing.
        """
        profile = self.drafters.get(drafter or "")
        steps = self.steps.time_us
        if profile is None:
            return steps
        return lambda nodes, rows, context: steps(nodes, rows, context) + profile.rest.time_us(nodes, rows, context)

    def budget(self, drafter: str) -> LearningBudget:
        """Return the budget of a drafter that was measured, for ``decode(budget=...)``; it learns as it goes.

        Raises:
            ValueError: there is no profile of that name; the message lists those there are.
        """
        if drafter not in self.drafters:
            raise ValueError(
                f"Calibration: no drafter {drafter!r} was measured; there are {sorted(self.drafters)}; "
                f"`specdec-kernels calibrate --keep-steps --drafter {drafter}` adds it"
            )
        profile = self.drafters[drafter]
        return LearningBudget(NodeBudget(profile.gains, self.step_us(drafter), widths=profile.widths))

    def save(self, path: str | Path) -> Path:
        """Write into a file, or into a folder's file for this device; what it has of other settings is kept.

        Returns:
            The file.
        """
        path = file_of(path, self.setting.device)
        entries = [entry for entry in _entries(path) if entry["setting"] != vars(self.setting)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text([*entries, self._to_json()]), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path, setting: Setting) -> "Calibration":
        """Read what was measured in a setting.

        Args:
            path: the file, or the folder that holds ``calibration.<device>.json``.
            setting: all of it must agree.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not such a file, or nothing was measured in this setting; the message lists what was.
        """
        path = file_of(path, setting.device)
        if not path.exists():
            raise FileNotFoundError(f"Calibration: there is no {path}; run `specdec-kernels calibrate`")
        entries = _entries(path)
        for entry in entries:
            if entry["setting"] == vars(setting):
                return cls._from_json(entry)
        known = "; ".join(str(Setting(**entry["setting"])) for entry in entries)
        raise ValueError(
            f"Calibration: {path} has nothing for {setting}; it has {known}; `specdec-kernels calibrate` adds to it"
        )

    def _to_json(self) -> dict[str, Any]:
        drafters = {
            name: {
                "gains": [round(gain, 5) for gain in profile.gains],
                "widths": list(profile.widths),
                "num_steps": profile.num_steps,
                "rest": _rounded(profile.rest),
            }
            for name, profile in self.drafters.items()
        }
        return {
            "setting": vars(self.setting),
            **self.metadata,
            "columns": list(CostPoint._fields),
            "steps": _rounded(self.steps),
            "drafters": drafters,
        }

    @classmethod
    def _from_json(cls, entry: dict[str, Any]) -> "Calibration":
        own = ("setting", "columns", "steps", "drafters")
        drafters = {
            name: DrafterProfile(**{**profile, "rest": CostTable(profile["rest"])})
            for name, profile in entry["drafters"].items()
        }
        metadata = {key: value for key, value in entry.items() if key not in own}
        return cls(Setting(**entry["setting"]), CostTable(entry["steps"]), drafters, metadata)


def calibrations(path: str | Path) -> list[Calibration]:
    """Return what a file has, of every setting."""
    return [Calibration._from_json(entry) for entry in _entries(Path(path))]


def file_of(path: str | Path, device: str) -> Path:
    """Return the file of a device in a folder; a file is returned as it is."""
    path = Path(path)
    return path if path.suffix == ".json" else path / f"calibration.{slug(device)}.json"


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        entries = list(json.loads(path.read_text(encoding="utf-8"))["calibrations"])
        for entry in entries:
            Calibration._from_json(entry)
        return entries
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a calibration file: {error!r}") from error


def _rounded(table: CostTable) -> list[list[float]]:
    return [[*point[:3], round(point.time_us, 1)] for point in table.points]


def _text(entries: list[dict[str, Any]]) -> str:
    """Return JSON with a line for each value, and for each row of a table."""

    def value_text(value: Any, indent: str) -> str:
        if isinstance(value, list) and value and isinstance(value[0], list):
            rows = ",\n".join(f"{indent}  {json.dumps(row)}" for row in value)
            return f"[\n{rows}\n{indent}]"
        if isinstance(value, dict) and any(isinstance(inner, (dict, list)) for inner in value.values()):
            items = ",\n".join(f"{indent}  {json.dumps(k)}: {value_text(v, indent + '  ')}" for k, v in value.items())
            return f"{{\n{items}\n{indent}}}"
        return json.dumps(value)

    items = ",\n".join("    " + value_text(entry, "    ") for entry in entries)
    return f'{{\n  "calibrations": [\n{items}\n  ]\n}}\n'
