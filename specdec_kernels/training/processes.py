"""The processes that `accelerate launch` started, as one training run; a process that was started alone is a run too.

Every process holds all weights and takes its share of the rows of each step. Gradients are averaged, so after each step
the weights are the same everywhere; the first process writes.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# A process may wait for another one that generates texts or prepares hidden states.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Attributes:
        index: its number, from 0.
        count: how many there are.
    """

    index: int = 0
    count: int = 1

    @classmethod
    def current(cls, device: str = "cpu") -> "Processes":
        """Join the run that this process belongs to.

        That is the default group of `torch.distributed` where there is one (a program may have made it, through
        ``accelerate.Accelerator`` or by itself); otherwise one is made from what a launcher left in the environment.

        Args:
            device: of the training; the processes talk through NCCL on ``"cuda"``, through gloo on ``"cpu"``.

        Raises:
            ImportError: started by a launcher, and ``accelerate`` is not installed.
        """
        if not dist.is_available():
            return cls()
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            try:
                from accelerate import PartialState
            except ImportError as error:
                raise ImportError("training in several processes needs accelerate: pip install accelerate") from error
            PartialState(cpu=device == "cpu", timeout=_PATIENCE)
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.index == 0

    def announcement(self, module: torch.nn.Module, num_texts: int) -> str:
        """Say what is going to be trained, on how much, and by how many: a launcher may have started fewer."""
        together = f", in {self.count} processes" if self.count > 1 else ""
        return f"training {sum(p.numel() for p in module.parameters()):,} parameters on {num_texts:,} texts{together}"

    def share(self, rows: Tensor) -> Tensor:
        """Return this process's rows of a step."""
        return rows[self.index :: self.count]

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self.count > 1:
            dist.barrier()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a floating-point tensor over the processes; the tensor itself in a lone one."""
        if self.count == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.count

    @torch.no_grad()
    def start_alike(self, parameters: Iterable[Tensor]) -> None:
        """Give the first process's values to all."""
        if self.count > 1:
            for parameter in parameters:
                dist.broadcast(parameter.data, 0)

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its mean over the processes; one that is missing counts as zero."""
        if self.count == 1:
            return
        parameters = list(parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        # One message is faster than hundreds of small ones.
        whole = self.mean(torch.cat([gradient.float().flatten() for gradient in gradients]))
        parts = whole.split([gradient.numel() for gradient in gradients])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
