"""Kangaroo's adapter as a module: what turns a shallow layer's hidden states into drafts."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.decoder import rms_norm, rotary_cache_write_
from ..ops.linear import gated_linear, linear
from .kangaroo_checkpoint import read_adapter, write_adapter


class Rope(NamedTuple):
    """Rotary positions, as the base model has them.

    Attributes:
        inv_freq: ``(R,) fp32``, radians for each position; ``2R ≤ D`` dimensions of a head turn.
        scale: of cosine and sine.
    """

    inv_freq: Tensor
    scale: float = 1.0


def rope_of(model: Any) -> Rope:
    """Return the rotary positions of a causal LM of transformers, whatever its scaling.

    Of a model whose layers have several kinds, those of its full-attention layers.

    Raises:
        NotImplementedError: the model keeps none in ``base_model.rotary_emb``.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    for prefix in ("", "full_attention_"):
        inv_freq = getattr(rotary, f"{prefix}inv_freq", None)
        if inv_freq is not None:
            return Rope(inv_freq.float(), float(getattr(rotary, f"{prefix}attention_scaling", 1.0)))
    raise NotImplementedError(f"KangarooAdapter: {type(model).__name__} keeps no rotary frequencies in rotary_emb")


class KangarooAdapter(nn.Module):
    """Predict the next token from the hidden states of an early layer (Liu et al. 2024, arXiv 2404.18911).

    ::

        x = hidden + W_o · attention(norm_in(hidden))          both kinds
        x = x + W_down (SiLU(W_gate y) · W_up y),  y = norm_mid(x)      only with ``intermediate_size``
        logits = lm_head(norm_out(x))                          the base model's own projection

    The paper's adapter is the attention alone; a whole decoder layer costs little more and agrees more often.

    Args:
        hidden_size: ``C``.
        num_heads, num_kv_heads: ``Hq``, ``Hk``.
        exit_layer: how many of the base model's layers run before; the adapter sees what the last of them gives.
        rope: of the base model, see `rope_of`.
        head_dim: ``D``; ``C / Hq`` when None.
        intermediate_size: of the MLP; None for an adapter of attention alone.
        vocab_size: ``V``, kept for the file.
        vocab_map: ``(V',) int64``, the ids that are drafted at all; None for all.
        eps: of the norms.
        dtype, device: of the parameters.

    Attributes:
        metadata: further entries of ``config.json``, kept by `save_pretrained` (``base_model_name_or_path``, …).
    """

    vocab_map: Tensor | None
    inv_freq: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        exit_layer: int,
        rope: Rope,
        *,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        vocab_size: int | None = None,
        vocab_map: Tensor | None = None,
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.exit_layer, self.intermediate_size, self.vocab_size, self.eps = (
            exit_layer, intermediate_size, vocab_size, eps,
        )  # fmt: skip
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.metadata: dict[str, Any] = {}
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.input_layernorm = nn.RMSNorm(hidden_size, eps, **options)
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False, **options)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False, **options)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False, **options)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False, **options)
        if intermediate_size is not None:
            self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps, **options)
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
            self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
            self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **options)
        self.norm = nn.RMSNorm(hidden_size, eps, **options)
        self.rope_scale = rope.scale
        self.register_buffer("inv_freq", rope.inv_freq.to(device, torch.float32), persistent=False)
        self.register_buffer("vocab_map", None if vocab_map is None else vocab_map.to(device))

    def start_from(self, layer: nn.Module, norm: nn.Module) -> None:
        """Begin with a decoder layer's weights and the model's last norm, as far as names and shapes agree.

        What there is no counterpart for keeps its random weights.
        """
        own = dict(self.named_parameters())
        given = {name.rpartition(".")[0].rpartition(".")[2]: value for name, value in layer.named_parameters()}
        given["norm"] = next(norm.parameters())
        with torch.no_grad():
            for name, parameter in own.items():
                value = given.get(name.rpartition(".")[0])
                if value is not None and value.shape == parameter.shape:
                    parameter.copy_(value)

    def attention_inputs(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of tokens, turned to their positions. Differentiable.

        Args:
            hidden: ``(B, n, C)`` of the exit layer.
            positions: ``(B or 1, n)``, absolute.

        Returns:
            ``(B, n, Hq, D)``, ``(B, n, Hk, D)``, ``(B, n, Hk, D)``.
        """
        normed = self.input_layernorm(hidden)
        heads = [
            projection(normed).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        cos, sin = (part.unsqueeze(-2) for part in self._angles(positions, hidden.dtype))
        return _turned(heads[0], cos, sin), _turned(heads[1], cos, sin), heads[2]

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine ``(B or 1, n, R)`` of the positions."""
        angles = positions[..., None].float() * self.inv_freq
        return (angles.cos() * self.rope_scale).to(dtype), (angles.sin() * self.rope_scale).to(dtype)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the states ``(B, n, C)`` that the projection sees, from ``attended (B, n, Hq, D)``. Differentiable."""
        x = hidden + self.o_proj(attended.flatten(-2))
        if self.intermediate_size is not None:
            y = self.post_attention_layernorm(x)
            x = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return self.norm(x)

    def cache_nodes(
        self, hidden: Tensor, positions: Tensor, keys: Tensor, values: Tensor, prefix_len: Tensor
    ) -> Tensor:
        """Write the keys and values of nodes behind each row's prefix, and return their queries. For inference.

        Args:
            hidden: ``(B, n, C)`` of the exit layer.
            positions: ``(B or 1, n)``, absolute.
            keys, values: ``(B, S, Hk, D)``; in another dtype than the hidden states they are rounded to it.
            prefix_len: ``(B,) int32``; node *i* goes to row ``prefix_len + i``.

        Returns:
            ``(B, n, Hq, D)``, turned to their positions.

        Raises:
            RuntimeError: the parameters require grad while grad is on.
        """
        if keys.dtype != hidden.dtype:
            queries, *states = self.attention_inputs(hidden, positions)
            rows = prefix_len[:, None].long() + torch.arange(hidden.shape[1], device=hidden.device)
            batch = torch.arange(len(hidden), device=hidden.device)[:, None]
            keys[batch, rows], values[batch, rows] = (part.to(keys.dtype) for part in states)
            return queries
        normed = rms_norm(hidden, self.input_layernorm.weight, self.eps)
        qkv = linear(normed, [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        cos, sin = (torch.cat([part, part], dim=-1) for part in self._angles(positions, hidden.dtype))
        rotary_cache_write_(qkv, cos, sin, keys, values, prefix_len)
        return qkv[:, :, : self.num_heads]

    def states(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return what `finish` returns, with the bits of a row its own. For inference.

        Raises:
            RuntimeError: the parameters require grad while grad is on.
        """
        x = linear(attended.flatten(-2), [self.o_proj.weight], residual=hidden)
        if self.intermediate_size is not None:
            y = rms_norm(x, self.post_attention_layernorm.weight, self.eps)
            y = gated_linear(y, self.gate_proj.weight, self.up_proj.weight)
            x = linear(y, [self.down_proj.weight], residual=x)
        return rms_norm(x, self.norm.weight, self.eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the states that the projection sees for whole sequences ``(B, n, C)``, which start at position 0.

        Row *t* sees the tokens up to *t* and predicts token *t + 1*. Differentiable.
        """
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        q, k, v = (heads.transpose(1, 2) for heads in self.attention_inputs(hidden, positions))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads)
        return self.finish(hidden, out.transpose(1, 2))

    def select_rows(self, lm_head_weight: Tensor) -> Tensor:
        """Return the rows of the base model's ``lm_head`` weight that are drafted from; do it once."""
        return lm_head_weight if self.vocab_map is None else lm_head_weight[self.vocab_map]

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        rope: Rope,
        *,
        exit_layer: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "KangarooAdapter":
        """Load an adapter of either kind.

        Args:
            path: a folder with ``config.json`` (a Llama configuration: heads, norm epsilon) and ``model.safetensors``
                or ``pytorch_model.bin``, as the paper's code publishes them.
            rope: of the base model: the public files say nothing of it.
            exit_layer: needed when ``config.json`` has none, as in the public files.
            dtype: convert to it; default: as stored.
            device: put it there; default: CPU.

        Raises:
            FileNotFoundError: no such files.
            ValueError: keys are missing or unexpected (all are listed), shapes disagree with the config, several
                layers, or the exit layer is not known.
        """
        state = read_adapter(Path(path))
        exit_layer = state.config.get("exit_layer") if exit_layer is None else exit_layer
        if exit_layer is None:
            raise ValueError(f"KangarooAdapter: {path}/config.json names no exit_layer; it must be given")
        adapter = cls(
            state.hidden_size,
            state.num_heads,
            state.num_kv_heads,
            exit_layer,
            rope,
            head_dim=state.head_dim,
            intermediate_size=state.intermediate_size,
            vocab_size=state.config.get("vocab_size"),
            vocab_map=state.vocab_map,
            eps=state.config.get("rms_norm_eps", 1e-6),
            dtype=dtype or next(iter(state.weights.values())).dtype,
            device=device,
        )
        adapter.load_state_dict(state.weights, strict=False)
        adapter.metadata = state.metadata
        return adapter

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``model.safetensors``, with the public keys, and ``config.json`` into a folder, which is made."""
        write_adapter(self, Path(folder))


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2R dimensions of ``heads (B, n, H, D)``: dimension *i* together with *i + R*."""
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
