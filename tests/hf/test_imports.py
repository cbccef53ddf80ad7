"""The names of the package, and what importing it costs."""

import subprocess
import sys

import pytest

from specdec_kernels import hf


def test_every_name_resolves():
    assert sorted(hf._MODULES) == hf.__all__
    for name in hf.__all__:
        assert getattr(hf, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'HFTraget'"):
        _ = hf.HFTraget


def test_load_does_not_import_transformers():
    code = "import sys, specdec_kernels.hf.load; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
