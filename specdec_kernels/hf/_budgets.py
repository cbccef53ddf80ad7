"""``budget="auto"``: the calibration of this machine that lies beside a drafter's heads, adapter or skip sets."""

import warnings
from pathlib import Path

from transformers import PreTrainedModel

from ..decoding.budget import Budget
from ..decoding.calibration import Calibration, Setting
from ..decoding.drafters import (
    DraftModelDrafter,
    KangarooDrafter,
    LayerSkipDrafter,
    MedusaDrafter,
    MergedDrafter,
    NGramDrafter,
)
from ..decoding.protocols import Drafter
from .prepare import is_prepared

# As `specdec-kernels calibrate` names them.
_NAMES: dict[type, str] = {
    DraftModelDrafter: "draft-model",
    KangarooDrafter: "kangaroo",
    LayerSkipDrafter: "layer-skip",
    MedusaDrafter: "medusa",
    NGramDrafter: "ngram",
}


def budget_of(budget: Budget | str | None, model: PreTrainedModel, drafter: Drafter) -> Budget | None:
    """Return what ``"auto"`` stands for, with a warning where nothing was measured; everything else as it is.

    Raises:
        ValueError: another string.
    """
    if not isinstance(budget, str):
        return budget
    if budget != "auto":
        raise ValueError(f"speculative_generate: budget must be 'auto', a Budget or None, got {budget!r}")
    parts = drafter.drafters if isinstance(drafter, MergedDrafter) else (drafter,)
    folders = [folder for part in parts if (folder := getattr(part, "folder", None)) is not None]
    name = "+".join(map(_name, parts))
    try:
        return _calibrated(folders, model, name)
    except (OSError, ValueError) as error:
        warnings.warn(f"speculative_generate: budget='auto' leaves drafts whole: {error}", stacklevel=3)
        return None


def _name(drafter: Drafter) -> str:
    name = _NAMES.get(type(drafter), type(drafter).__name__)
    return f"{name}-tree" if isinstance(drafter, KangarooDrafter) and drafter.tree is not None else name


def _calibrated(folders: list[Path], model: PreTrainedModel, name: str) -> Budget:
    if not folders:
        raise ValueError(f"nothing of {name} was loaded from a folder that may hold a calibration")
    setting = Setting.here(model.device, model.dtype, prepared=is_prepared(model))
    return Calibration.load(folders[0], setting).budget(name)
