"""Read and write the public checkpoint formats of Medusa heads.

    FasterDecoding, TGI   {head}.{layer}.linear.weight|bias   {head}.{num_layers}.weight   (own projection, or absent)
    vLLM                  blocks.{head}.layers.{layer}.weight|bias   lm_heads.{head}.weight   token_map

with or without a ``medusa_head.`` / ``medusa_heads.`` prefix. vLLM's ``original_lm_head`` stores one projection for
all heads as ``lm_head.weight`` or ``lm_heads.0.weight``. What is in the file decides; ``config.json`` only adds the
vocabulary size and is cross-checked, because published configs are wrong about the number of heads.
"""

import json
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

WEIGHT_FILES = ("medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt")
FORMATS = ("medusa", "vllm")

# Kind of a tensor -> its key in each format. Keys are parsed to (kind, head, layer), whichever format they come from.
_PATTERNS = (
    (re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.linear\.(?P<kind>weight|bias)"), None),
    (re.compile(r"blocks\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.(?P<kind>weight|bias)"), None),
    (re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.weight"), "out"),
    (re.compile(r"lm_heads\.(?P<head>\d+)\.weight"), "out"),
    (re.compile(r"lm_head\.weight"), "shared_out"),
    (re.compile(r"token_map"), "token_map"),
)
_PREFIX = re.compile(r"medusa_heads?\.")


@dataclass(frozen=True)
class MedusaState:
    """The tensors of a checkpoint, stacked as `MedusaHeads` holds them."""

    w_res: Tensor
    b_res: Tensor | None
    w_out: Tensor | None
    vocab_map: Tensor | None
    vocab_size: int | None
    metadata: dict = field(default_factory=dict)


def read_checkpoint(path: Path) -> MedusaState:
    """Read a folder or file; see `MedusaHeads.from_pretrained`."""
    file = _find_file(path)
    config_file = file.parent / "config.json"
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    tensors = _parse_keys(_load_tensors(file), file)
    num_heads, num_layers = _count(tensors)
    if config.get("original_lm_head") and num_heads > 1 and ("out", 1, 0) not in tensors and ("out", 0, 0) in tensors:
        tensors["shared_out", 0, 0] = tensors.pop(("out", 0, 0))
    _check_keys(tensors, num_heads, num_layers, config, file)
    state = _stack(tensors, num_heads, num_layers, config, file)
    _compare_config(config, state, file)
    return state


def _find_file(path: Path) -> Path:
    if path.is_dir():
        for name in WEIGHT_FILES:
            if (path / name).exists():
                return path / name
        raise FileNotFoundError(f"MedusaHeads: none of {', '.join(WEIGHT_FILES)} is in {path}")
    if not path.exists():
        raise FileNotFoundError(f"MedusaHeads: no such file or folder: {path}")
    return path


def _load_tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(f"MedusaHeads: {file} must hold a dict of tensors, got {type(state).__name__}")
    return state


def _parse_keys(tensors: dict[str, Tensor], file: Path) -> dict[tuple, Tensor]:
    """Key the tensors by (kind, head, layer); an own projection is layer 0 whatever its place in the file."""
    parsed: dict[tuple, Tensor] = {}
    projection_layers: dict[int, int] = {}
    unexpected = []
    for key, tensor in tensors.items():
        name = _PREFIX.sub("", key, count=1) if _PREFIX.match(key) else key
        matches = ((pattern.fullmatch(name), kind) for pattern, kind in _PATTERNS)
        match, kind = next(((m, k) for m, k in matches if m), (None, None))
        if match is None:
            unexpected.append(key)
            continue
        groups = match.groupdict()
        head, layer = int(groups.get("head") or 0), int(groups.get("layer") or 0)
        if kind == "out" and "layer" in groups:
            projection_layers[head], layer = layer, 0
        identity = (kind or groups["kind"], head, layer)
        if identity in parsed:
            unexpected.append(key)
        parsed[identity] = tensor
    _, num_layers = _count(parsed)
    unexpected += [f"{head}.{layer}.weight" for head, layer in projection_layers.items() if layer != num_layers]
    if unexpected:
        raise ValueError(f"MedusaHeads: {file} has unexpected keys: {', '.join(sorted(unexpected))}")
    return parsed


def _count(tensors: dict[tuple, Tensor]) -> tuple[int, int]:
    """Return the number of heads and of residual layers that the keys speak of."""
    heads = [head for kind, head, _ in tensors if kind in ("weight", "bias", "out")]
    layers = [layer for kind, _, layer in tensors if kind in ("weight", "bias")]
    return max(heads, default=-1) + 1, max(layers, default=-1) + 1


def _check_keys(tensors: dict, num_heads: int, num_layers: int, config: dict, file: Path) -> None:
    kinds = {kind for kind, _, _ in tensors}
    wanted = {
        (kind, h, r) for kind in kinds & {"bias"} | {"weight"} for h in range(num_heads) for r in range(num_layers)
    }
    if "out" in kinds:
        wanted |= {("out", h, 0) for h in range(num_heads)}
    vocab_size = config.get("vocab_size")
    if (config.get("truncated_vocab_size") or vocab_size) != vocab_size:
        wanted.add(("token_map", 0, 0))
    missing = sorted(wanted - tensors.keys())
    if num_heads == 0 or missing:
        names = [_key(*identity, num_layers) for identity in missing] or ["0.0.linear.weight"]
        raise ValueError(f"MedusaHeads: {file} misses keys: {', '.join(names)}")
    if "out" in kinds and "shared_out" in kinds:
        raise ValueError(f"MedusaHeads: {file} has both one projection for all heads and one for each")


def _key(kind: str, head: int, layer: int, num_layers: int, format: str = "medusa") -> str:
    if kind in ("weight", "bias"):
        return f"{head}.{layer}.linear.{kind}" if format == "medusa" else f"blocks.{head}.layers.{layer}.{kind}"
    if kind == "out":
        return f"{head}.{num_layers}.weight" if format == "medusa" else f"lm_heads.{head}.weight"
    return {"shared_out": "lm_head.weight", "token_map": "token_map"}[kind]


def _stack(tensors: dict, num_heads: int, num_layers: int, config: dict, file: Path) -> MedusaState:
    projection = tensors.get(("shared_out", 0, 0), tensors.get(("out", 0, 0)))
    hidden_size = (projection if num_layers == 0 else tensors["weight", 0, 0]).shape[-1]
    shapes = {"weight": (hidden_size, hidden_size), "bias": (hidden_size,)}
    if projection is not None:
        shapes["out"] = shapes["shared_out"] = (projection.shape[0], hidden_size)
    for (kind, head, layer), tensor in tensors.items():
        if tuple(tensor.shape) != shapes.get(kind, tuple(tensor.shape)):
            key = _key(kind, head, layer, num_layers)
            raise ValueError(f"MedusaHeads: {file}: {key} must have shape {shapes[kind]}, got {tuple(tensor.shape)}")

    def stack(kind: str) -> Tensor:
        return torch.stack([torch.stack([tensors[kind, h, r] for r in range(num_layers)]) for h in range(num_heads)])

    if num_layers:
        w_res, b_res = stack("weight"), stack("bias") if ("bias", 0, 0) in tensors else None
    else:
        w_res, b_res = projection.new_zeros(num_heads, 0, hidden_size, hidden_size), None
    w_out = tensors.get(("shared_out", 0, 0))
    if ("out", 0, 0) in tensors:
        w_out = torch.stack([tensors["out", head, 0] for head in range(num_heads)])
    vocab_map = tensors.get(("token_map", 0, 0))
    vocab_size = config.get("vocab_size")
    if vocab_map is not None:
        vocab_map = _check_vocab_map(vocab_map, vocab_size, file)
        if w_out is not None and w_out.shape[-2] > len(vocab_map):
            w_out = w_out.index_select(-2, vocab_map)
        if w_out is not None and w_out.shape[-2] != len(vocab_map):
            raise ValueError(
                f"MedusaHeads: {file}: token_map must have {w_out.shape[-2]} entries, one for each row of the "
                f"projection, got {len(vocab_map)}"
            )
    elif w_out is not None:
        vocab_size = w_out.shape[-2]
    return MedusaState(w_res, b_res, w_out, vocab_map, vocab_size, _metadata(config))


def _check_vocab_map(vocab_map: Tensor, vocab_size: int | None, file: Path) -> Tensor:
    if vocab_map.dim() != 1 or vocab_map.is_floating_point():
        raise ValueError(
            f"MedusaHeads: {file}: token_map must be a vector of ids, got {vocab_map.dtype} {vocab_map.shape}"
        )
    vocab_map = vocab_map.long()
    limit = vocab_size if vocab_size is not None else int(vocab_map.max()) + 1
    if bool(((vocab_map < 0) | (vocab_map >= limit)).any()):
        raise ValueError(f"MedusaHeads: {file}: token_map must hold ids in [0, {limit - 1}]")
    return vocab_map


# Entries of config.json that the tensors decide; everything else is metadata, kept as it is.
_OWN_ENTRIES = {
    *("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size", "truncated_vocab_size"),
    *("num_heads", "num_hidden_layers", "medusa_fc_bias", "original_lm_head", "model_type", "architectures"),
}


def _metadata(config: dict) -> dict:
    return {name: value for name, value in config.items() if name not in _OWN_ENTRIES}


def _compare_config(config: dict, state: MedusaState, file: Path) -> None:
    num_heads, num_layers, hidden_size = state.w_res.shape[:3]
    found = {
        **{"medusa_num_heads": num_heads, "num_heads": num_heads, "hidden_size": hidden_size},
        **{"medusa_num_layers": num_layers, "num_hidden_layers": num_layers, "vocab_size": state.vocab_size},
    }
    if state.vocab_map is not None:
        found["truncated_vocab_size"] = len(state.vocab_map)
    for name, value in found.items():
        if value is not None and config.get(name, value) != value:
            warnings.warn(
                f"{file.parent / 'config.json'} says {name} = {config[name]}, {file.name} holds {value}: using {value}",
                stacklevel=4,
            )


def write_checkpoint(heads, folder: Path, format: str, lm_head_weight: Tensor | None) -> None:
    """Write a folder; see `MedusaHeads.save_pretrained`."""
    from safetensors.torch import save_file

    if format not in FORMATS:
        raise ValueError(f"MedusaHeads: format must be {' or '.join(FORMATS)}, got {format}")
    num_heads, num_layers = heads.num_heads, heads.num_layers
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[_key("weight", head, layer, num_layers, format)] = heads.w_res[head, layer]
            if heads.b_res is not None:
                tensors[_key("bias", head, layer, num_layers, format)] = heads.b_res[head, layer]
    w_out = heads.w_out
    if format == "vllm" and w_out is None:
        if lm_head_weight is None:
            raise ValueError("MedusaHeads: format vllm stores the shared lm_head too: give lm_head_weight")
        w_out = heads.select_rows(lm_head_weight)
    if w_out is not None and w_out.dim() == 3:
        tensors |= {_key("out", head, 0, num_layers, format): w_out[head] for head in range(num_heads)}
    elif w_out is not None:
        tensors["lm_heads.0.weight" if format == "vllm" else "lm_head.weight"] = w_out
    if heads.vocab_map is not None:
        tensors["token_map"] = heads.vocab_map
    folder.mkdir(parents=True, exist_ok=True)
    # safetensors refuses views that share memory, so each tensor gets its own.
    tensors = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
    save_file(tensors, folder / (WEIGHT_FILES[0] if format == "medusa" else WEIGHT_FILES[1]), {"format": "pt"})
    config = heads.metadata | _config(heads, format, shared=w_out is not None and w_out.dim() == 2)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config(heads, format: str, shared: bool) -> dict:
    names = ("medusa_num_heads", "medusa_num_layers") if format == "medusa" else ("num_heads", "num_hidden_layers")
    config = {names[0]: heads.num_heads, names[1]: heads.num_layers, "hidden_size": heads.hidden_size}
    if heads.vocab_size is not None:
        config["vocab_size"] = heads.vocab_size
    if heads.vocab_map is not None:
        config["truncated_vocab_size"] = len(heads.vocab_map)
    if format == "vllm":
        config |= {"model_type": "medusa", "architectures": ["MedusaModel"]}
        config |= {"medusa_fc_bias": heads.b_res is not None, "original_lm_head": shared}
    return config
