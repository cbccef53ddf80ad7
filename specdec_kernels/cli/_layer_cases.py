"""Calls of the launchers of a decoder layer's parts, as `_kernel_cases` has those of the others."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ._kernel_cases import DTYPES, KernelCase, tf32_allowed


@dataclass(frozen=True)
class LinearCase:
    """One call of `linear` with two matrices and a residual, or of `gated_linear`."""

    dtype: str
    rows: int
    columns: int  # of the output; they choose the tile together with the rows
    gated: bool = False
    plain: bool = False  # a single matrix, without biases and residual
    width: int = 512

    def __str__(self) -> str:
        name = "gated_linear" if self.gated else "linear"
        return f"{name}-{self.dtype}-rows{self.rows}-N{self.columns}-C{self.width}{'-plain' if self.plain else ''}"

    def launch(self) -> None:
        """Call the launcher."""
        from ..kernels.linear import gated_linear_triton, linear_triton

        x, *others = (torch.empty(n, self.width, dtype=DTYPES[self.dtype]) for n in (self.rows, *self.counts))
        biases = [] if self.plain else [torch.empty(n, dtype=x.dtype) for n in self.counts]
        with tf32_allowed(self.dtype == "tf32"):
            if self.gated:
                gated_linear_triton(x, *others, *(biases or (None, None)))
            else:
                residual = None if self.plain else torch.empty(self.rows, self.columns, dtype=x.dtype)
                linear_triton(x, others, biases, residual)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the rows of each matrix."""
        if self.gated:
            return self.columns, self.columns
        return (self.columns,) if self.plain else (self.columns - 64, 64)


def linear_cases(everything: bool = False) -> Iterator[LinearCase]:
    """Yield cases for each entry of the launch parameters; with ``everything`` for each kernel that differs."""
    for dtype in ("bf16", "fp32", "tf32", "fp16") if everything else ("bf16", "fp32"):
        for rows, columns in itertools.product((16, 64, 256)[dtype == "bf16" :], (2048, 65536)):
            for plain, width in itertools.product((False, True), (512, 528)) if everything else ((False, 512),):
                yield LinearCase(dtype, rows, columns, False, plain, width)
                if columns == 2048:
                    yield LinearCase(dtype, rows, columns, True, plain, width)


@dataclass(frozen=True)
class NormCase:
    """One call of `rms_norm`."""

    dtype: str
    width: int
    rows: int = 16

    def __str__(self) -> str:
        return f"rms_norm-{self.dtype}-C{self.width}"

    def launch(self) -> None:
        """Call the launcher."""
        from ..kernels.decoder import rms_norm_triton

        dtype = DTYPES[self.dtype]
        rms_norm_triton(torch.empty(self.rows, self.width, dtype=dtype), torch.empty(self.width, dtype=dtype), 1e-5)


@dataclass(frozen=True)
class RotationCase:
    """One call of `rotary_cache_write_` with 32 heads of q and 8 of k and v."""

    dtype: str
    dims: tuple[int, int]  # of a head, and how many of them are rotated
    normed: bool = False
    slots: bool = False
    nodes: int = 16

    def __str__(self) -> str:
        flags = (name for name in ("normed", "slots") if getattr(self, name))
        return "-".join([f"rotary-{self.dtype}-D{self.dims[0]}-R{self.dims[1]}", *flags])

    def launch(self) -> None:
        """Call the launcher."""
        from ..kernels.decoder import rotary_cache_write_triton

        (dim, turned), dtype, batch = self.dims, DTYPES[self.dtype], 2
        qkv = torch.empty(batch, self.nodes, 48, dim, dtype=dtype)
        angles = torch.empty(1, self.nodes, turned, dtype=dtype) if turned else None
        k, v = (torch.empty(batch, 8, 256, dim, dtype=dtype).transpose(1, 2) for _ in range(2))
        lengths = torch.empty(batch, dtype=torch.int32)
        norms = [torch.empty(dim, dtype=dtype) if self.normed else None for _ in range(2)]
        options = {"slots": lengths if self.slots else None, "q_norm": norms[0], "k_norm": norms[1]}
        rotary_cache_write_triton(qkv, angles, angles, k, v, lengths, first_node=0, eps=1e-5, **options)


def decoder_cases(everything: bool = False) -> Iterator[KernelCase]:
    """Yield cases of common widths; with ``everything`` of more, and every option."""
    for dtype in ("bf16", "fp32", "fp16") if everything else ("bf16", "fp32"):
        for width in (64, 128, 576, 2048, 4096, 8192, 16384) if everything else (128, 4096, 16384):
            yield NormCase(dtype, width)
        for dims in ((64, 64), (128, 128), (256, 256), (128, 64), (128, 0)) if everything else ((128, 128), (128, 64)):
            for normed in (False, True):
                yield from (RotationCase(dtype, dims, normed, slots) for slots in (False, True)[: 1 + everything])
