"""The files of a Kangaroo adapter: the public keys on disk, the module's names in memory."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_ATTENTION = {
    "layers.0.input_layernorm.weight": "input_layernorm.weight",
    **{f"layers.0.self_attn.{x}_proj.weight": f"{x}_proj.weight" for x in "qkvo"},
    "norm.weight": "norm.weight",
}
_MLP = {
    "layers.0.post_attention_layernorm.weight": "post_attention_layernorm.weight",
    **{f"layers.0.mlp.{x}_proj.weight": f"{x}_proj.weight" for x in ("gate", "up", "down")},
}
_VOCAB_MAP = "token_map"
# Entries of config.json that the adapter itself decides.
_DECIDED = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
    "rms_norm_eps", "exit_layer", "adapter", "num_hidden_layers",
)  # fmt: skip


class AdapterState(NamedTuple):
    """What the files hold; ``weights`` under the module's names."""

    weights: dict[str, Tensor]
    vocab_map: Tensor | None
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int | None
    config: dict[str, Any]
    metadata: dict[str, Any]


def read_adapter(folder: Path) -> AdapterState:
    """Read a folder; the contract is `KangarooAdapter.from_pretrained`'s."""
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if file is None or not (folder / "config.json").exists():
        raise FileNotFoundError(f"KangarooAdapter: {folder} must hold config.json and {' or '.join(WEIGHT_FILES)}")
    config = json.loads((folder / "config.json").read_text())
    tensors = _load(file)
    vocab_map = tensors.pop(_VOCAB_MAP, None)
    # Old files carry a buffer that is computed from the config.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    has_mlp = any(name in tensors for name in _MLP)
    names = _ATTENTION | (_MLP if has_mlp else {})
    missing, unexpected = sorted(names.keys() - tensors.keys()), sorted(tensors.keys() - names.keys())
    if missing or unexpected:
        raise ValueError(f"KangarooAdapter: {file}: missing keys {missing}, unexpected keys {unexpected}")
    hidden_size, num_heads = tensors["norm.weight"].shape[0], config["num_attention_heads"]
    head_dim = tensors["layers.0.self_attn.q_proj.weight"].shape[0] // num_heads
    num_kv_heads = tensors["layers.0.self_attn.k_proj.weight"].shape[0] // head_dim
    intermediate_size = tensors["layers.0.mlp.up_proj.weight"].shape[0] if has_mlp else None
    found = {"hidden_size": hidden_size, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    _check(file, config, found)
    _check_shapes(file, tensors, hidden_size, num_heads * head_dim, num_kv_heads * head_dim, intermediate_size)
    return AdapterState(
        {names[name]: tensor for name, tensor in tensors.items()},
        vocab_map,
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        intermediate_size,
        config,
        {name: value for name, value in config.items() if name not in _DECIDED},
    )


def _load(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return dict(torch.load(file, map_location="cpu", weights_only=True))


def _check(file: Path, config: dict[str, Any], found: dict[str, int]) -> None:
    for name, value in found.items():
        if config.get(name) not in (None, value):
            raise ValueError(f"KangarooAdapter: config.json says {name} = {config[name]}, but {file} holds {value}")


def _check_shapes(
    file: Path, tensors: dict[str, Tensor], hidden: int, query: int, key: int, intermediate: int | None
) -> None:
    rows = {"q": query, "k": key, "v": key, "gate": intermediate, "up": intermediate}
    for name, tensor in tensors.items():
        kind = name.removesuffix("_proj.weight").rpartition(".")[2]
        columns = {"o": query, "down": intermediate}.get(kind, hidden)
        expected = (rows.get(kind, hidden), columns) if name.endswith("_proj.weight") else (hidden,)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"KangarooAdapter: {file}: {name} must have shape {expected}, got {tuple(tensor.shape)}")


def write_adapter(adapter: Any, folder: Path) -> None:
    """Write ``adapter`` (a `KangarooAdapter`); the contract is `KangarooAdapter.save_pretrained`'s."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    own = adapter.state_dict()
    names = {public: name for public, name in (_ATTENTION | _MLP).items() if name in own}
    tensors = {public: own[name].to("cpu", copy=True).contiguous() for public, name in names.items()}
    if adapter.vocab_map is not None:
        tensors[_VOCAB_MAP] = adapter.vocab_map.to("cpu", copy=True)
    save_file(tensors, folder / WEIGHT_FILES[0], {"format": "pt"})
    config = {
        "adapter": "attention" if adapter.intermediate_size is None else "layer",
        "exit_layer": adapter.exit_layer,
        "hidden_size": adapter.hidden_size,
        "num_attention_heads": adapter.num_heads,
        "num_key_value_heads": adapter.num_kv_heads,
        "head_dim": adapter.head_dim,
        "intermediate_size": adapter.intermediate_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": adapter.eps,
        "vocab_size": adapter.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(adapter.metadata | config, indent=2) + "\n")
