"""`MedusaHeads` on disk: each public format read and written, and every way a file can be wrong."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specdec_kernels.modules import MedusaHeads

M, R, C, V = 3, 2, 8, 20


class OriginalBlock(nn.Module):
    """A residual block as the original heads name it: ``linear`` inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(C, C)


def original_state(own: bool, layers: int = R, repeat_one: bool = False) -> dict:
    """Return the state dict of a ModuleList of Sequentials; ``repeat_one`` repeats one block instance."""
    heads = nn.ModuleList()
    for _ in range(M):
        blocks = [OriginalBlock()] * layers if repeat_one else [OriginalBlock() for _ in range(layers)]
        heads.append(nn.Sequential(*blocks, *([nn.Linear(C, V, bias=False)] if own else [])))
    return heads.state_dict()


def vllm_state(layers: int = R, bias: bool = True, rows: int = V) -> dict:
    state = {f"lm_heads.{h}.weight": torch.randn(rows, C) for h in range(M)}
    for h in range(M):
        for r in range(layers):
            state[f"blocks.{h}.layers.{r}.weight"] = torch.randn(C, C)
            if bias:
                state[f"blocks.{h}.layers.{r}.bias"] = torch.randn(C)
    return state


def write(folder, state: dict, name: str, config: dict | None = None) -> None:
    if name.endswith(".pt"):
        torch.save(state, folder / name)
    else:
        save_file({key: tensor.clone() for key, tensor in state.items()}, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def load_quietly(path, **options) -> MedusaHeads:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return MedusaHeads.from_pretrained(path, **options)


ORIGINAL_CONFIG = {"medusa_num_heads": M, "medusa_num_layers": R, "base_model_name_or_path": "some/model"}
PREFIXES = pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."], ids=["plain", "head", "heads"])


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@PREFIXES
def test_original_format(prefix, own, name, tmp_path) -> None:
    state = original_state(own)
    write(tmp_path, {prefix + key: tensor for key, tensor in state.items()}, name, ORIGINAL_CONFIG)
    heads = load_quietly(tmp_path)
    assert (heads.num_heads, heads.num_layers, heads.hidden_size) == (M, R, C)
    assert heads.metadata == {"base_model_name_or_path": "some/model"}
    assert heads.vocab_size == (V if own else None)
    for h in range(M):
        for r in range(R):
            assert torch.equal(heads.w_res[h, r], state[f"{h}.{r}.linear.weight"])
            assert torch.equal(heads.b_res[h, r], state[f"{h}.{r}.linear.bias"])
        if own:
            assert torch.equal(heads.w_out[h], state[f"{h}.{R}.weight"])
    assert own or heads.w_out is None
    assert all(parameter.requires_grad for parameter in heads.parameters())


def test_one_block_repeated_loads_as_layers(tmp_path) -> None:
    """The original code repeats one instance; its state dict lists the weights once for each layer."""
    write(tmp_path, original_state(True, repeat_one=True), "medusa_lm_head.pt", ORIGINAL_CONFIG)
    heads = load_quietly(tmp_path)
    assert heads.num_layers == R
    assert torch.equal(heads.w_res[:, 0], heads.w_res[:, 1])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@PREFIXES
def test_vllm_format(prefix, bias, tmp_path) -> None:
    state = vllm_state(bias=bias)
    config = {"num_heads": M, "num_hidden_layers": R, "vocab_size": V, "hidden_size": C, "medusa_fc_bias": bias}
    write(tmp_path, {prefix + key: tensor for key, tensor in state.items()}, "model.safetensors", config)
    heads = load_quietly(tmp_path)
    assert torch.equal(heads.w_res[2, 1], state["blocks.2.layers.1.weight"])
    assert torch.equal(heads.w_out[1], state["lm_heads.1.weight"])
    assert (heads.b_res is not None) == bias
    assert heads.metadata == {}


@pytest.mark.parametrize("rows", [4, V], ids=["cut", "whole"])
def test_vllm_token_map(rows, tmp_path) -> None:
    """``token_map`` becomes vocab_map; a projection that still has all rows is cut to it."""
    token_map = torch.tensor([7, 0, 19, 3], dtype=torch.int32)
    state = vllm_state(rows=rows) | {"token_map": token_map}
    write(tmp_path, state, "model.safetensors", {"vocab_size": V, "truncated_vocab_size": 4})
    heads = load_quietly(tmp_path)
    assert heads.vocab_map.dtype == torch.int64
    assert heads.vocab_map.tolist() == token_map.tolist()
    assert (heads.vocab_size, heads.num_rows) == (V, 4)
    expected = state["lm_heads.1.weight"]
    assert torch.equal(heads.w_out[1], expected if rows == 4 else expected[token_map])


@pytest.mark.parametrize("key", ["lm_head.weight", "lm_heads.0.weight"])
def test_vllm_original_lm_head(key, tmp_path) -> None:
    """One projection for all heads, stored with them."""
    state = {name: tensor for name, tensor in vllm_state().items() if name.startswith("blocks")}
    state[key] = torch.randn(V, C)
    write(tmp_path, state, "model.safetensors", {"original_lm_head": True})
    heads, hidden = load_quietly(tmp_path), torch.randn(4, C)
    torch.testing.assert_close(heads(hidden), heads.hidden_states(hidden) @ state[key].T)
    assert heads.topk(hidden, 3)[1].shape == (4, M, 3)


def make_heads(own: bool, vocab_map, bias: bool = True, layers: int = R) -> MedusaHeads:
    heads = MedusaHeads(M, layers, C, V, own_projection=own, vocab_map=vocab_map, bias=bias)
    nn.init.normal_(heads.w_res)
    if bias:
        nn.init.normal_(heads.b_res)
    heads.metadata = {"base_model_name_or_path": "some/model", "note": [1, 2]}
    return heads


@pytest.mark.parametrize("format", ["medusa", "vllm"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("vocab_map", [None, torch.tensor([5, 19, 0])], ids=["whole", "reduced"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_round_trip(bias, vocab_map, own, format, tmp_path) -> None:
    heads, lm_head = make_heads(own, vocab_map, bias), torch.randn(V, C)
    heads.save_pretrained(tmp_path / "new" / "folder", format=format, lm_head_weight=None if own else lm_head)
    again, hidden = load_quietly(tmp_path / "new" / "folder"), torch.randn(5, C)
    assert again.metadata == heads.metadata
    assert (again.vocab_size, again.num_rows) == (heads.vocab_size, heads.num_rows)
    stored = own or format == "vllm"
    assert (again.w_out is not None) == stored
    rows = heads.select_rows(lm_head)
    expected = heads.topk(hidden, 3, None if own else rows)
    torch.testing.assert_close(again.topk(hidden, 3, None if stored else rows), expected)


def test_root_conditioned_round_trip(tmp_path) -> None:
    heads = MedusaHeads(M, R, C, V, root_conditioned=True, dtype=torch.bfloat16)
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    heads.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["medusa_root_conditioned"] is True
    assert load_file(tmp_path / "medusa_lm_head.safetensors").keys() == original_state(False).keys() | {
        "root.linear.weight", "root.linear.bias"
    }  # fmt: skip
    again = load_quietly(tmp_path)
    assert again.root_conditioned
    assert again.metadata == {}
    assert again.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in heads.state_dict().items())


def test_heads_without_layers(tmp_path) -> None:
    heads = make_heads(True, None, bias=False, layers=0)
    heads.save_pretrained(tmp_path)
    again = load_quietly(tmp_path)
    assert (again.num_heads, again.num_layers) == (M, 0)
    assert torch.equal(again.w_out, heads.w_out)


def test_written_keys_are_the_public_ones(tmp_path) -> None:
    heads = make_heads(True, None)
    heads.save_pretrained(tmp_path)
    assert load_file(tmp_path / "medusa_lm_head.safetensors").keys() == original_state(True).keys()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["medusa_num_heads"] == M
    assert config["medusa_num_layers"] == R
    heads.save_pretrained(tmp_path / "vllm", format="vllm")
    assert load_file(tmp_path / "vllm" / "model.safetensors").keys() == vllm_state().keys()
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    expected = {"num_heads": M, "num_hidden_layers": R, "vocab_size": V, "hidden_size": C, "model_type": "medusa"}
    assert expected | {"medusa_fc_bias": True, "original_lm_head": False} | heads.metadata == {
        key: value for key, value in config.items() if key != "architectures"
    }


def test_dtype_and_file_path(tmp_path) -> None:
    write(tmp_path, original_state(True), "medusa_lm_head.pt")
    assert load_quietly(tmp_path / "medusa_lm_head.pt").w_res.dtype == torch.float32
    heads = load_quietly(str(tmp_path / "medusa_lm_head.pt"), dtype=torch.bfloat16)
    assert {p.dtype for p in heads.parameters()} == {torch.bfloat16}


def test_a_wrong_config_only_warns(tmp_path) -> None:
    """Published configs say 2 heads where the file has 5: the file is right."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "vocab_size": 99}
    write(tmp_path, original_state(True), "medusa_lm_head.pt", config)
    with pytest.warns(UserWarning, match="^MedusaHeads: config.json says") as caught:
        heads = MedusaHeads.from_pretrained(tmp_path)
    assert (heads.num_heads, heads.num_layers, heads.vocab_size) == (M, R, V)
    messages = " ".join(str(w.message) for w in caught)
    assert "medusa_num_heads = 2, but medusa_lm_head.pt holds 3" in messages
    assert "medusa_num_layers = 1, but medusa_lm_head.pt holds 2" in messages
    assert "vocab_size = 99, but medusa_lm_head.pt holds 20" in messages
    assert {w.filename for w in caught} == {__file__}


def changed(state: dict, drop: tuple = (), **add) -> dict:
    state = {key: tensor for key, tensor in state.items() if key not in drop} | add
    return {key: tensor for key, tensor in state.items() if tensor is not None}


ROOT = {"root.linear.weight": torch.zeros(C, 2 * C), "root.linear.bias": torch.zeros(C)}
BROKEN = {
    "missing root bias": (
        changed(original_state(False), **ROOT | {"root.linear.bias": None}),
        {},
        "missing keys: root.linear.bias$",
    ),
    "missing root": (
        changed(vllm_state()),
        {"medusa_root_conditioned": True},
        "missing keys: root.linear.bias, root.linear.weight$",
    ),
    "root shape": (
        changed(original_state(False), **ROOT | {"root.linear.weight": torch.zeros(C, C)}),
        {},
        r"root_weight of head 0, layer 0 must have shape \(8, 16\), got \(8, 8\)",
    ),
    "missing block": (changed(original_state(True), ("1.0.linear.weight",)), {}, "missing keys: 1.0.linear.weight$"),
    "missing bias": (changed(original_state(True), ("2.1.linear.bias",)), {}, "missing keys: 2.1.linear.bias$"),
    "missing head": (
        {key: tensor for key, tensor in original_state(False).items() if not key.startswith("1.")},
        {},
        r"missing keys: 1\.0\.linear\.bias, 1\.1\.linear\.bias, 1\.0\.linear\.weight, 1\.1\.linear\.weight$",
    ),
    "missing projection": (changed(original_state(True), ("0.2.weight",)), {}, "missing keys: 0.2.weight$"),
    "missing in vllm": (changed(vllm_state(), ("lm_heads.2.weight",)), {}, r"missing keys: lm_heads\.2\.weight$"),
    "missing token_map": (vllm_state(), {"vocab_size": 50, "truncated_vocab_size": V}, "missing keys: token_map$"),
    "empty": ({}, {}, "missing keys: those of head 0"),
    "unexpected": (
        changed(original_state(True), fc=torch.zeros(1), **{"0.norm.weight": torch.zeros(1)}),
        {},
        r"unexpected keys: 0\.norm\.weight, fc$",
    ),
    "projection not last": (
        changed(original_state(False), **{"0.7.weight": torch.zeros(V, C)}),
        {},
        "unexpected keys: 0.7.weight$",
    ),
    "twice": (
        changed(original_state(True), **{"medusa_head.0.0.linear.bias": torch.zeros(C)}),
        {},
        "unexpected keys: medusa_head.0.0.linear.bias$",
    ),
    "block shape": (
        changed(original_state(True), **{"1.1.linear.weight": torch.zeros(C, 9)}),
        {},
        r"weight of head 1, layer 1 must have shape \(8, 8\), got \(8, 9\)",
    ),
    "projection shape": (
        changed(original_state(True), **{"2.2.weight": torch.zeros(V + 1, C)}),
        {},
        r"out of head 2, layer 0 must have shape \(20, 8\), got \(21, 8\)",
    ),
    "two projections": (
        changed(vllm_state(), **{"lm_head.weight": torch.zeros(V, C)}),
        {},
        "both a projection for each head and one for all",
    ),
    "map too long": (vllm_state() | {"token_map": torch.arange(V + 1)}, {}, "has 21 ids up to 20 for 20 rows"),
    "map beyond": (vllm_state() | {"token_map": torch.tensor([V])}, {"vocab_size": V}, "a vocabulary of 20, got 20"),
    "map negative": (vllm_state() | {"token_map": torch.tensor([3, -1])}, {}, "got -1"),
    "map of floats": (vllm_state() | {"token_map": torch.zeros(V)}, {}, "token_map must be a vector of ids"),
}


@pytest.mark.parametrize(("state", "config", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files(state, config, message, tmp_path) -> None:
    write(tmp_path, state, "medusa_lm_head.pt", config)
    with pytest.raises(ValueError, match=f"MedusaHeads: .*{message}"):
        MedusaHeads.from_pretrained(tmp_path)


def test_not_a_state_dict(tmp_path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="must hold a dict of tensors, got list"):
        MedusaHeads.from_pretrained(tmp_path)


def test_pickles_run_no_code(tmp_path) -> None:
    torch.save({"0.0.linear.weight": nn.Linear(2, 2)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        MedusaHeads.from_pretrained(tmp_path)


def test_no_file(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none of medusa_lm_head\.safetensors, .* is in"):
        MedusaHeads.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        MedusaHeads.from_pretrained(tmp_path / "nothing.pt")


def test_save_rejects(tmp_path) -> None:
    heads = make_heads(False, None)
    with pytest.raises(ValueError, match="format must be one of medusa, vllm, got tgi"):
        heads.save_pretrained(tmp_path, format="tgi")
    with pytest.raises(ValueError, match="lm_head_weight is missing"):
        heads.save_pretrained(tmp_path, format="vllm")
    conditioned = MedusaHeads(M, R, C, V, root_conditioned=True)
    with pytest.raises(ValueError, match="vllm has no place for root-conditioned heads"):
        conditioned.save_pretrained(tmp_path, format="vllm", lm_head_weight=torch.zeros(V, C))
