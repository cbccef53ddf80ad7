"""Calls of the Triton launchers that `inspect` and the tests compile: one for each kernel that differs."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ..kernels._aot import Compiled

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
DTYPES |= {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# (D, Dv), one for each entry of the launch parameters; --all adds the dims that share an entry.
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
MORE_DIMS = [(80, 80), (96, 96), (112, 112), (192, 192)]


class KernelCase(Protocol):
    """A call with a readable name, as small as it can be without changing what is compiled."""

    def launch(self) -> None:
        """Call the launcher."""


@dataclass(frozen=True)
class VerifyCase:
    """One call of a verification op; the vocabulary is that of Llama 3."""

    op: str
    dtype: str  # of all logits
    drawn: bool = False  # with draft logits
    block: bool = False
    with_replacement: bool = False
    mapped: bool = False  # a draft vocabulary of its own

    def __str__(self) -> str:
        flags = (name for name in ("drawn", "block", "with_replacement", "mapped") if getattr(self, name))
        return "-".join([self.op.removeprefix("verify_"), self.dtype, *flags])

    def launch(self) -> None:
        """Call the launcher."""
        from ..kernels import verify as kernels

        batch, num_nodes, vocab = 2, 16, 128_256
        ids = torch.empty(batch, num_nodes, dtype=torch.int64)
        parents, lengths = (torch.empty(shape, dtype=torch.int32) for shape in ((1, num_nodes), (batch,)))
        logits, draft, columns = torch.empty(batch, num_nodes, vocab, dtype=DTYPES[self.dtype]), None, None
        if self.drawn:
            draft = torch.empty(batch, num_nodes, 32_000 if self.mapped else vocab, dtype=DTYPES[self.dtype])
            columns = torch.zeros(32_000, dtype=torch.int64) if self.mapped else None
        chance = torch.empty(batch), torch.empty(batch, num_nodes), lengths
        launcher = getattr(kernels, f"{self.op}_triton")
        if self.op == "verify_chain":
            law = None if draft is None else draft[:, :-1]
            launcher(ids[:, 1:], logits, law, *chance, block=self.block, draft_vocab_map=columns)
        elif self.op == "verify_tree":
            options = {"with_replacement": self.with_replacement, "draft_vocab_map": columns}
            launcher(ids, parents, logits, draft, *chance, **options)
        elif self.op == "verify_tree_greedy":
            launcher(ids, parents, logits, lengths)
        else:
            launcher(ids, parents, logits, *chance, epsilon=0.09, delta=0.3)


@dataclass(frozen=True)
class PhiloxCase:
    """A call of `philox_uniforms`."""

    op: str = "philox_uniforms"

    def __str__(self) -> str:
        return self.op

    def launch(self) -> None:
        """Call the launcher."""
        from ..kernels.philox import philox_uniforms_triton

        seed = torch.empty(2, dtype=torch.int64)
        philox_uniforms_triton(seed, seed, 40)


@dataclass(frozen=True)
class Case:
    """One call of tree attention."""

    dtype: str  # of q
    cache: str  # dtype of the cache
    dims: tuple[int, int]
    rows: int  # packed rows T · Hq / Hk, which choose the tile
    page: int = 0  # 0: contiguous
    with_options: bool = True  # window, softcap, sinks: the fullest kernel
    aligned: bool = True  # strides are multiples of 16

    def __str__(self) -> str:
        dims = f"D{self.dims[0]}" + (f"/{self.dims[1]}" if self.dims[0] != self.dims[1] else "")
        cache = self.dtype if self.cache == self.dtype else f"{self.dtype}/{self.cache}"
        page = f"-page{self.page}" if self.page else ""
        flags = "-options" * self.with_options + "-unaligned" * (not self.aligned)
        return f"{cache}-{dims}-rows{self.rows}{page}{flags}"

    def launch(self, only: str | None = None) -> None:
        """Call the launcher; with ``only`` one of the options."""
        with tf32_allowed(self.dtype == "tf32"):
            launch_tree_attention(self, only)

    def faults(self, architecture: str, kernel: "Compiled") -> list[str]:
        """Return what is wrong with one of the case's kernels: of the attention itself, its instructions too."""
        from ..kernels import _aot, tree_attention

        found = kernel.faults()
        if kernel.name != "_tree_attention_kernel":
            return found
        device, dtypes = _aot.ARCHITECTURES[architecture].device, (DTYPES[self.dtype], DTYPES[self.cache])
        precision = "tf32" if self.dtype == "tf32" else "ieee"
        plan = tree_attention.choose_plan(device, *dtypes, *self.dims, self.rows, precision, self.aligned)
        assert plan is not None
        if self.dtype != "fp32" or architecture.startswith("gfx"):  # NVIDIA's matrix units know no IEEE products
            found += kernel.matrix_faults(plan.block_m)
        if self.aligned:
            found += kernel.load_faults(self.page > 0, self.cache in ("fp8", "int8"), self.with_options)
        return found


@contextmanager
def tf32_allowed(flag: bool) -> Iterator[None]:
    """Tell torch whether fp32 products may be made in tf32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if flag else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def launch_tree_attention(case: Case, only: str | None) -> None:
    from ..kernels.tree_attention import paged_tree_attention_triton, tree_attention_triton

    group_size, num_kv_heads, capacity = 4, 2, 4096
    num_nodes = case.rows // group_size
    q = torch.empty(1, num_nodes, num_kv_heads * group_size, case.dims[0], dtype=DTYPES[case.dtype])
    gap = 0 if case.aligned else 1
    k, v = (torch.empty(1, capacity, num_kv_heads, dim + gap, dtype=DTYPES[case.cache])[..., :dim] for dim in case.dims)
    mask = torch.empty(1, num_nodes, (num_nodes + 63) // 64, dtype=torch.int64)
    prefix_len = torch.empty(1, dtype=torch.int32)
    options = dict.fromkeys(("scale", "softcap", "window", "sinks", "k_scale", "v_scale"))
    if case.with_options:
        full = {"softcap": 30.0, "window": 1024, "sinks": torch.empty(q.shape[2], dtype=q.dtype)}
        options |= {name: value for name, value in full.items() if only in (None, name)}
    if case.cache != case.dtype:
        options |= {"k_scale": torch.empty(num_kv_heads), "v_scale": torch.empty(num_kv_heads)}
    if case.page:
        k, v = (x[0].unflatten(0, (-1, case.page)) for x in (k, v))
        table = torch.empty(1, capacity // case.page, dtype=torch.int32)
        paged_tree_attention_triton(q, k, v, table, mask, prefix_len, **options)
    else:
        tree_attention_triton(q, k, v, mask, prefix_len, **options)


@dataclass(frozen=True)
class HeadsCase:
    """One call of `medusa_project_topk`, or with ``k = 0`` of `medusa_project`, with four heads."""

    dtype: str
    rows: int  # B · M of a shared projection, B of own ones: they choose the tile
    k: int
    own: bool = False
    hidden: int = 512

    def __str__(self) -> str:
        return f"{self.dtype}-rows{self.rows}-k{self.k}{'-own' if self.own else ''}-C{self.hidden}"

    def launch(self) -> None:
        """Call the launcher."""
        from ..kernels.medusa_project import medusa_project_topk_triton, medusa_project_triton

        num_heads, dtype = 4, DTYPES[self.dtype]
        batch = self.rows if self.own else self.rows // num_heads
        w_res = torch.empty(num_heads, 1, self.hidden, self.hidden, dtype=dtype)
        w_out = torch.empty(*(num_heads,) * self.own, 2048, self.hidden, dtype=dtype)
        b_res = torch.empty(num_heads, 1, self.hidden, dtype=dtype)
        args = (torch.empty(batch, self.hidden, dtype=dtype), w_res, b_res, w_out)
        if self.k:
            medusa_project_topk_triton(*args, self.k, vocab_map=None)
        else:
            medusa_project_triton(*args)


def tree_attention_cases(everything: bool = False) -> Iterator[Case]:
    """Yield cases for each entry of the launch parameters: with every option on (the fullest kernel), and with none.

    ``everything`` adds head dims that share an entry, fp16, and pages smaller and larger than a tile.
    """
    fp16 = [("fp16", "fp16"), ("fp16", "fp8"), ("fp16", "int8")] if everything else []
    for dtype, cache in [("bf16", "bf16"), ("bf16", "fp8"), ("bf16", "int8"), *fp16]:
        for dims in DIMS + (MORE_DIMS if everything else []):
            for rows in (16, 64, 512)[: 2 if max(dims) > 128 else 3]:
                for page in (0, 16, 256) if everything else (0,):
                    yield from (Case(dtype, cache, dims, rows, page, flag) for flag in (True, False))
    for dtype, dims in itertools.product(("fp32", "tf32"), DIMS + (MORE_DIMS if everything else [])):
        if dtype == "tf32" and max(dims) > 128:  # takes the kernel of fp32
            continue
        yield from (Case(dtype, dtype, dims, 16, 0, flag) for flag in (True, False))
    for (dtype, cache), dim in itertools.product([("bf16", "bf16"), ("bf16", "fp8"), ("fp32", "fp32")], (64, 128, 256)):
        yield Case(dtype, cache, (dim, dim), 16, aligned=False)


def medusa_project_cases(everything: bool = False) -> Iterator[HeadsCase]:
    """Yield a case for each entry of the launch parameters; with ``everything`` for each kernel that differs."""
    for dtype in ("bf16", "fp32", "fp16") if everything else ("bf16", "fp32"):
        for rows in (16, 64, 256):
            for k in (0, 1, 10, 64) if everything else (0, 10, 64):
                for own in (False, True) if everything else (False,):
                    for hidden in (512, 528) if everything else (512,):
                        yield HeadsCase(dtype, rows, k, own, hidden)


def verify_cases(everything: bool = False) -> Iterator[VerifyCase]:
    """Yield a case for each rule; with ``everything`` for each kernel that differs."""
    for dtype in ("bf16", "fp16", "fp32") if everything else ("bf16",):
        for drawn in (False, True):
            yield VerifyCase("verify_chain", dtype, drawn)
            yield VerifyCase("verify_chain", dtype, drawn, block=True)
            yield VerifyCase("verify_tree", dtype, drawn)
        if everything:
            yield VerifyCase("verify_tree", dtype, True, with_replacement=True)
            yield VerifyCase("verify_chain", dtype, True, mapped=True)
            yield VerifyCase("verify_chain", dtype, True, block=True, mapped=True)
        yield VerifyCase("verify_tree", dtype, True, mapped=True)
        yield VerifyCase("verify_tree_greedy", dtype)
        yield VerifyCase("verify_tree_typical", dtype)
