"""One training loop for all draft heads: AdamW, warm-up and cosine, checkpoints that resume to the same loss."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ._differences import differences
from .curve import NAME as CURVE
from .curve import append_entry, draw_curve, read_entries
from .processes import Processes


@dataclass(frozen=True)
class TrainerOptions:
    """How to optimise.

    Attributes:
        epochs: passes over the rows; fractions are allowed.
        batch_size: rows of one step.
        lr: the highest learning rate, after warm-up.
        final_lr: fraction of ``lr`` at the end of the cosine.
        warmup: fraction of the steps that the learning rate rises.
        weight_decay: of AdamW.
        max_grad_norm: gradients are scaled down to it.
        seed: of the row order.
        log_every: steps averaged in one line of the curve.
        save_every: steps between checkpoints; evaluations happen there too.
    """

    epochs: float = 4.0
    batch_size: int = 512
    lr: float = 1e-3
    final_lr: float = 0.02
    warmup: float = 0.03
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0
    log_every: int = 50
    save_every: int = 500


def learning_rate(step: int, num_steps: int, options: TrainerOptions) -> float:
    """Return the rate of a step (from 0): linear warm-up to ``lr``, then half a cosine down to ``final_lr · lr``."""
    warmup_steps = max(1, round(options.warmup * num_steps))
    if step < warmup_steps:
        return options.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    floor = options.final_lr
    return options.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class RowOrder:
    """Which rows a step sees: every epoch a new permutation, decided by seed and epoch alone (so a run can resume)."""

    def __init__(self, rows: Tensor, batch_size: int, seed: int):
        self.rows, self.batch_size, self.seed = rows, min(batch_size, len(rows)), seed
        self.steps_per_epoch = max(1, len(rows) // self.batch_size)
        self.epoch, self.order = -1, rows

    def __getitem__(self, step: int) -> Tensor:
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.epoch, self.order = epoch, self.rows[torch.randperm(len(self.rows), generator=generator)]
        return self.order[position * self.batch_size : (position + 1) * self.batch_size]


class Trainer:
    """Train the parameters of a module on cached rows.

    Args:
        module: whose parameters with ``requires_grad`` are trained.
        loss_of: given row numbers ``(n,)`` returns the loss and further numbers ``(…,)`` for the curve. In one of
            several processes it gets that process's share of the step's rows, and the mean over the processes counts.
        rows: row numbers to train on.
        options: how to optimise.
        folder: gets ``checkpoint.pt``, ``training_curve.jsonl`` and its picture, ``training_curve.svg``; a checkpoint
            that is there is continued.
        evaluate: called at every checkpoint, by the first process; what it returns goes to the curve.
        task: what else decides the result (numbers and texts); a checkpoint of another task is not continued.
        parts: names of the further numbers, for the picture; by default ``head 1``, ``head 2``, ….
        rate_of: by what a parameter's learning rate is multiplied, given its name; 1 for all by default.

    Raises:
        ValueError: there are more processes than rows in a step.
    """

    def __init__(
        self, module: nn.Module, loss_of: Callable[[Tensor], tuple[Tensor, Tensor]], rows: Tensor,
        options: TrainerOptions, folder: str | Path, *, evaluate: Callable[[], dict] | None = None,
        task: dict | None = None, parts: Sequence[str] = (), rate_of: Callable[[str], float] | None = None,
    ):  # fmt: skip
        self.module, self.loss_of, self.options = module, loss_of, options
        self.evaluate, self.parts = evaluate, parts
        self.processes = Processes.current()
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.order = RowOrder(rows, options.batch_size, options.seed)
        if self.order.batch_size < self.processes.count:
            raise ValueError(f"{self.order.batch_size} rows in a step are too few for {self.processes.count} processes")
        self.num_steps = max(1, round(options.epochs * self.order.steps_per_epoch))
        self.identity = {"options": asdict(options), "num_rows": len(rows), "task": task or {}}
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        by_scale: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.named.items():
            by_scale.setdefault(rate_of(name) if rate_of else 1.0, []).append(parameter)
        groups = [{"params": parameters, "scale": scale} for scale, parameters in by_scale.items()]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, weight_decay=options.weight_decay)
        self.step = 0
        self.seconds = 0.0
        self.window: list[list[float]] = []
        self.curve = self.folder / f"{CURVE}.jsonl"
        self.checkpoint = self.folder / "checkpoint.pt"

    def run(self, stop_after: int | None = None) -> None:
        """Train to the end, or for ``stop_after`` more steps; go on from the checkpoint in the folder, if any.

        Raises:
            ValueError: the checkpoint was made with other options, rows or for another task.
        """
        self._resume()
        last = self.num_steps if stop_after is None else min(self.num_steps, self.step + stop_after)
        hidden = not self.processes.is_first
        with tqdm(total=self.num_steps, initial=self.step, unit="step", desc="training", disable=hidden) as bar:
            while self.step < last:
                started = time.perf_counter()
                numbers = self._one_step()
                self.seconds += time.perf_counter() - started
                self.window.append(numbers)
                self.step += 1
                bar.update(1)
                if self.step % self.options.log_every == 0 or self.step == self.num_steps:
                    bar.set_postfix(loss=f"{self._log():.3f}")
                if self.step % self.options.save_every == 0 or self.step == self.num_steps:
                    self._save()

    def _one_step(self) -> list[float]:
        rate = learning_rate(self.step, self.num_steps, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        loss, numbers = self.loss_of(self.processes.share(self.order[self.step]))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.processes.average_gradients(self.named.values())
        nn.utils.clip_grad_norm_(self.named.values(), self.options.max_grad_norm)
        self.optimizer.step()
        return self.processes.mean(torch.cat([loss.detach().float()[None], numbers.float()])).tolist()

    def _log(self) -> float:
        loss, *numbers = (sum(column) / len(column) for column in zip(*self.window, strict=True))
        rate = learning_rate(self.step - 1, self.num_steps, self.options)
        if self.processes.is_first:
            entry = {"step": self.step, "loss": loss, "head_losses": numbers, "lr": rate, "seconds": self.seconds}
            append_entry(self.curve, entry)
        self.window = []
        return loss

    def _save(self) -> None:
        if self.processes.is_first:
            if self.evaluate is not None:
                append_entry(self.curve, {"step": self.step, **self.evaluate()})
            state = {
                "step": self.step, "seconds": self.seconds, "window": self.window, "identity": self.identity,
                "module": {name: p.detach() for name, p in self.named.items()},
                "optimizer": self.optimizer.state_dict(),
            }  # fmt: skip
            temporary = self.checkpoint.with_suffix(".tmp")
            torch.save(state, temporary)
            os.replace(temporary, self.checkpoint)
            draw_curve(self.curve, self.parts)
        self.processes.wait()

    def _resume(self) -> None:
        if not self.step and self.checkpoint.exists():
            self._load()
        elif not self.step:
            self.processes.start_alike(self.named.values())
            if self.processes.is_first:
                self.curve.unlink(missing_ok=True)
        # Nobody writes a checkpoint while another process is still looking for one.
        self.processes.wait()

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=next(iter(self.named.values())).device, weights_only=True)
        different = differences(state["identity"], self.identity)
        if different:
            raise ValueError(f"{self.checkpoint} was made with another {different}; remove it to start over")
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(state["module"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.window = state["step"], state["seconds"], state["window"]
        if self.processes.is_first:
            kept = [entry for entry in read_entries(self.curve) if entry["step"] <= self.step]
            self.curve.write_text("".join(json.dumps(entry) + "\n" for entry in kept))

    def copy_curve(self, folder: Path, name: str = CURVE) -> None:
        """Put the curve and its picture into a folder."""
        draw_curve(Path(shutil.copy(self.curve, folder / f"{name}.jsonl")), self.parts)
