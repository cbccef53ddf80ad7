"""What differs between versions of transformers is found by looking, not by version numbers."""

import ast
from pathlib import Path

import pytest
import torch

import specdec_kernels.hf
from specdec_kernels.hf import _compat
from tests.hf.tiny import tiny_model


class Renamed(torch.nn.Module):
    def forward(self, input_ids, cache=None, **kwargs): ...


class Old(torch.nn.Module):
    def forward(self, input_ids, past_key_values=None, **kwargs): ...


class Both(torch.nn.Module):
    def forward(self, input_ids, past_key_values=None, cache=None): ...


class Neither(torch.nn.Module):
    def forward(self, input_ids, **kwargs): ...


@pytest.mark.parametrize(("module", "name"), [(Renamed, "cache"), (Old, "past_key_values"), (Both, "cache")])
def test_cache_argument(module, name):
    assert _compat.cache_argument(module()) == name


def test_a_forward_without_cache_is_refused():
    with pytest.raises(NotImplementedError, match=r"Neither.forward takes no cache"):
        _compat.cache_argument(Neither())


def test_the_installed_version_has_one():
    assert _compat.cache_argument(tiny_model()) in ("cache", "past_key_values")


def test_attention_implementation_is_restored_after_an_error():
    model = tiny_model(attn_implementation="sdpa")
    configs = _compat.attention_configs(model)
    seen = []

    def fail_inside():
        with _compat.attention_implementation(configs, "eager"):
            seen.append(model.config._attn_implementation)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert [*seen, model.config._attn_implementation] == ["eager", "sdpa"]


def test_no_private_imports():
    """Case 87: names with an underscore, and submodules of models, may go with any release."""
    for path in Path(specdec_kernels.hf.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("transformers"):
                assert "models" not in node.module.split("."), f"{path.name}: {node.module}"
                assert not [a.name for a in node.names if a.name.startswith("_")], path.name
