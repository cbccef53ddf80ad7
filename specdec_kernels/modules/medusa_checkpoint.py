"""Read and write the public checkpoint formats of Medusa heads.

    medusa (FasterDecoding, TGI)   {head}.{layer}.linear.weight|bias, and {head}.{num_layers}.weight: own projection
    vllm                           blocks.{head}.layers.{layer}.weight|bias, lm_heads.{head}.weight, token_map

The first has no projection when the heads share the base model's ``lm_head``; the second then stores that one
(``original_lm_head``). Root-conditioned heads add ``root.linear.weight|bias`` to the first. Any mixture is read,
with or without a ``medusa_head.`` or ``medusa_heads.`` prefix.
What is in the file decides: ``config.json`` adds the vocabulary size and is otherwise only compared, because published
configs are wrong about the number of heads.
"""

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

WEIGHT_FILES = {"medusa": "medusa_lm_head.safetensors", "vllm": "model.safetensors", "pickle": "medusa_lm_head.pt"}

_ROOT_KEYS = {"root_weight": "root.linear.weight", "root_bias": "root.linear.bias"}
_KEYS = {
    "medusa": {
        "weight": "{head}.{layer}.linear.weight",
        "bias": "{head}.{layer}.linear.bias",
        "out": "{head}.{num_layers}.weight",
        "shared_out": "lm_head.weight",
        "token_map": "token_map",
        **_ROOT_KEYS,
    },
    "vllm": {
        "weight": "blocks.{head}.layers.{layer}.weight",
        "bias": "blocks.{head}.layers.{layer}.bias",
        "out": "lm_heads.{head}.weight",
        "shared_out": "lm_heads.0.weight",
        "token_map": "token_map",
        **_ROOT_KEYS,
    },
}
_PREFIX = re.compile(r"^medusa_heads?\.")
_PATTERNS = (
    (re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.linear\.(?P<kind>weight|bias)"), None),
    (re.compile(r"blocks\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.(?P<kind>weight|bias)"), None),
    (re.compile(r"(?P<head>\d+)\.(?P<end>\d+)\.weight"), "out"),
    (re.compile(r"lm_heads\.(?P<head>\d+)\.weight"), "out"),
    (re.compile(r"lm_head\.weight"), "shared_out"),
    (re.compile(r"token_map"), "token_map"),
    (re.compile(r"root\.linear\.weight"), "root_weight"),
    (re.compile(r"root\.linear\.bias"), "root_bias"),
)

# Entries of config.json that the tensors decide. All others are metadata, carried along as they are.
_DECIDED = {
    *("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size", "truncated_vocab_size"),
    *("num_heads", "num_hidden_layers", "medusa_fc_bias", "original_lm_head", "model_type", "architectures"),
    "medusa_root_conditioned",
}


@dataclass(frozen=True)
class MedusaState:
    """The contents of a checkpoint, stacked as `MedusaHeads` holds them."""

    w_res: Tensor
    b_res: Tensor | None
    w_out: Tensor | None
    w_root: Tensor | None
    b_root: Tensor | None
    vocab_map: Tensor | None
    vocab_size: int | None
    metadata: dict


def read_checkpoint(path: Path) -> MedusaState:
    """Read a folder or file; the contract is `MedusaHeads.from_pretrained`'s."""
    file = _find_file(path)
    config_file = file.parent / "config.json"
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    tensors = _parse(_load_tensors(file), config, str(file))
    state = _stack(tensors, config, str(file))
    _compare_config(config, state, file.name)
    return state


def _find_file(path: Path) -> Path:
    if path.is_dir():
        for name in WEIGHT_FILES.values():
            if (path / name).exists():
                return path / name
        raise FileNotFoundError(f"MedusaHeads: none of {', '.join(WEIGHT_FILES.values())} is in {path}")
    if not path.exists():
        raise FileNotFoundError(f"MedusaHeads: no such file or folder: {path}")
    return path


def _load_tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"MedusaHeads: {file} must hold a dict of tensors, got {type(state).__name__}")
    return state


def _parse(tensors: dict[str, Tensor], config: dict, file: str) -> dict[tuple[str, int, int], Tensor]:
    """Return the tensors by (kind, head, layer), after checking that none is missing and none is left over."""
    parsed: dict[tuple[str, int, int], Tensor] = {}
    unexpected, ends = [], {}
    for key, tensor in tensors.items():
        matches = ((pattern.fullmatch(_PREFIX.sub("", key)), kind) for pattern, kind in _PATTERNS)
        match, kind = next((found for found in matches if found[0]), (None, None))
        if match is None:
            unexpected.append(key)
            continue
        groups = match.groupdict()
        identity = (kind or groups["kind"], int(groups.get("head") or 0), int(groups.get("layer") or 0))
        if "end" in groups:
            ends[key] = int(groups["end"])
        if identity in parsed:
            unexpected.append(key)
        parsed[identity] = tensor

    num_heads, num_layers = _count(parsed)
    if config.get("original_lm_head") and num_heads > 1 and ("out", 1, 0) not in parsed and ("out", 0, 0) in parsed:
        parsed["shared_out", 0, 0] = parsed.pop(("out", 0, 0))
    unexpected += [key for key, end in ends.items() if end != num_layers]
    if unexpected:
        raise ValueError(f"MedusaHeads: {file} has unexpected keys: {', '.join(sorted(unexpected))}")
    missing = sorted(_wanted(parsed, config) - parsed.keys())
    if missing or num_heads == 0:
        format = "vllm" if any(_PREFIX.sub("", key).startswith(("blocks", "lm_heads")) for key in tensors) else "medusa"
        names = [_KEYS[format][k].format(head=h, layer=r, num_layers=num_layers) for k, h, r in missing]
        raise ValueError(f"MedusaHeads: {file} has missing keys: {', '.join(names) or 'those of head 0'}")
    return parsed


def _count(parsed: dict) -> tuple[int, int]:
    """Return the number of heads and of residual layers that the keys speak of."""
    heads = [head for kind, head, _ in parsed if kind in ("weight", "bias", "out")]
    layers = [layer for kind, _, layer in parsed if kind in ("weight", "bias")]
    return max(heads, default=-1) + 1, max(layers, default=-1) + 1


def _wanted(parsed: dict, config: dict) -> set[tuple[str, int, int]]:
    num_heads, num_layers = _count(parsed)
    kinds = {kind for kind, _, _ in parsed}
    wanted = {("weight", head, layer) for head in range(num_heads) for layer in range(num_layers)}
    if "bias" in kinds:
        wanted |= {("bias", head, layer) for _, head, layer in wanted}
    if "out" in kinds:
        wanted |= {("out", head, 0) for head in range(num_heads)}
    if config.get("medusa_root_conditioned") or kinds & {"root_weight", "root_bias"}:
        wanted |= {("root_weight", 0, 0), ("root_bias", 0, 0)}
    if config.get("truncated_vocab_size") not in (None, config.get("vocab_size")):
        wanted.add(("token_map", 0, 0))
    return wanted


def _stack(tensors: dict[tuple[str, int, int], Tensor], config: dict, file: str) -> MedusaState:
    num_heads, num_layers = _count(tensors)
    first_out = tensors.get(("shared_out", 0, 0), tensors.get(("out", 0, 0)))
    num_rows = None if first_out is None else first_out.shape[0]
    first = tensors[("weight" if num_layers else "out"), 0, 0]
    hidden_size = first.shape[-1]
    _check_shapes(tensors, hidden_size, num_rows, file)

    def stack(kind: str) -> Tensor:
        return torch.stack([torch.stack([tensors[kind, h, r] for r in range(num_layers)]) for h in range(num_heads)])

    w_res = stack("weight") if num_layers else first.new_zeros(num_heads, 0, hidden_size, hidden_size)
    b_res = stack("bias") if ("bias", 0, 0) in tensors else None
    w_out = tensors.get(("shared_out", 0, 0))
    if ("out", 0, 0) in tensors:
        w_out = torch.stack([tensors["out", head, 0] for head in range(num_heads)])

    vocab_size, vocab_map = config.get("vocab_size"), tensors.get(("token_map", 0, 0))
    if vocab_map is not None:
        vocab_map = _check_vocab_map(vocab_map, vocab_size, num_rows, file)
        if w_out is not None and w_out.shape[-2] > len(vocab_map):
            w_out = w_out.index_select(-2, vocab_map)
    elif w_out is not None:
        vocab_size = num_rows
    metadata = {name: value for name, value in config.items() if name not in _DECIDED}
    w_root, b_root = (tensors.get((kind, 0, 0)) for kind in ("root_weight", "root_bias"))
    return MedusaState(w_res, b_res, w_out, w_root, b_root, vocab_map, vocab_size, metadata)


def _check_shapes(tensors: dict, hidden_size: int, num_rows: int | None, file: str) -> None:
    square, rows = (hidden_size, hidden_size), (num_rows, hidden_size)
    shapes = {"weight": square, "bias": (hidden_size,), "out": rows, "shared_out": rows}
    shapes |= {"root_weight": (hidden_size, 2 * hidden_size), "root_bias": (hidden_size,)}
    for (kind, head, layer), tensor in tensors.items():
        if kind in shapes and tuple(tensor.shape) != shapes[kind]:
            raise ValueError(
                f"MedusaHeads: {file}: {kind} of head {head}, layer {layer} must have shape {shapes[kind]}, "
                f"got {tuple(tensor.shape)}"
            )
    if {"out", "shared_out"} <= {kind for kind, _, _ in tensors}:
        raise ValueError(f"MedusaHeads: {file} has both a projection for each head and one for all")


def _check_vocab_map(vocab_map: Tensor, vocab_size: int | None, num_rows: int | None, file: str) -> Tensor:
    if vocab_map.dim() != 1 or vocab_map.is_floating_point() or len(vocab_map) == 0:
        raise ValueError(f"MedusaHeads: {file}: token_map must be a vector of ids, got {tuple(vocab_map.shape)}")
    smallest, largest = (int(x) for x in torch.aminmax(vocab_map))
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        bad = smallest if smallest < 0 else largest
        raise ValueError(f"MedusaHeads: {file}: token_map must hold ids of a vocabulary of {vocab_size}, got {bad}")
    # A projection over the whole vocabulary is cut to the rows of the map; a shorter one has no row for some ids.
    num_ids = len(vocab_map)
    if num_rows is not None and (num_rows < num_ids or (num_rows > num_ids and largest >= num_rows)):
        raise ValueError(f"MedusaHeads: {file}: token_map has {num_ids} ids up to {largest} for {num_rows} rows")
    return vocab_map.long()


def _compare_config(config: dict, state: MedusaState, file_name: str) -> None:
    num_heads, num_layers, hidden_size = state.w_res.shape[:3]
    found: dict[str, int | None] = {"num_heads": num_heads, "num_hidden_layers": num_layers, "hidden_size": hidden_size}
    found |= {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "vocab_size": state.vocab_size}
    found["medusa_root_conditioned"] = state.w_root is not None
    if state.vocab_map is not None:
        found["truncated_vocab_size"] = len(state.vocab_map)
    for name, value in found.items():
        if config.get(name, value) != value:
            message = f"config.json says {name} = {config[name]}, but {file_name} holds {value}, which is used"
            warnings.warn(f"MedusaHeads: {message}", stacklevel=4)


def write_checkpoint(heads, folder: Path, format: str, lm_head_weight: Tensor | None) -> None:
    """Write ``heads`` (a `MedusaHeads`); the contract is `MedusaHeads.save_pretrained`'s."""
    from safetensors.torch import save_file

    if format not in _KEYS:
        raise ValueError(f"MedusaHeads: format must be one of {', '.join(_KEYS)}, got {format}")
    if format == "vllm" and heads.root_conditioned:
        raise ValueError("MedusaHeads: format vllm has no place for root-conditioned heads")
    w_out = heads.w_out
    if format == "vllm" and w_out is None:
        if lm_head_weight is None:
            raise ValueError("MedusaHeads: format vllm stores the shared projection too; lm_head_weight is missing")
        w_out = heads.select_rows(lm_head_weight)
    shared = w_out is not None and w_out.dim() == 2

    parts = {("weight", h, r): heads.w_res[h, r] for h in range(heads.num_heads) for r in range(heads.num_layers)}
    if heads.b_res is not None:
        parts |= {("bias", head, layer): heads.b_res[head, layer] for _, head, layer in list(parts)}
    if w_out is not None:
        parts |= {("shared_out", 0, 0): w_out} if shared else {("out", h, 0): w for h, w in enumerate(w_out)}
    if heads.vocab_map is not None:
        parts["token_map", 0, 0] = heads.vocab_map
    if heads.root_conditioned:
        parts |= {("root_weight", 0, 0): heads.w_root, ("root_bias", 0, 0): heads.b_root}
    tensors = {
        # safetensors refuses views that share memory: each tensor gets its own.
        _KEYS[format][kind].format(head=head, layer=layer, num_layers=heads.num_layers): tensor.detach()
        .to("cpu", copy=True)
        .contiguous()
        for (kind, head, layer), tensor in parts.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHT_FILES[format], {"format": "pt"})
    config = heads.metadata | _config(heads, format, shared)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config(heads, format: str, shared: bool) -> dict:
    names = ("medusa_num_heads", "medusa_num_layers") if format == "medusa" else ("num_heads", "num_hidden_layers")
    config = {names[0]: heads.num_heads, names[1]: heads.num_layers, "hidden_size": heads.hidden_size}
    if heads.vocab_size is not None:
        config["vocab_size"] = heads.vocab_size
    if heads.vocab_map is not None:
        config["truncated_vocab_size"] = len(heads.vocab_map)
    if heads.root_conditioned:
        config["medusa_root_conditioned"] = True
    if format == "vllm":
        config |= {"model_type": "medusa", "architectures": ["MedusaModel"]}
        config |= {"medusa_fc_bias": heads.b_res is not None, "original_lm_head": shared}
    return config
