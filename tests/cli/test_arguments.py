"""What the arguments mean that several commands take."""

from argparse import ArgumentParser, Namespace

import pytest

from specdec_kernels.cli import _arguments
from specdec_kernels.cli._arguments import add_prepare_argument, prepares


def parsed(*words, dtype="bfloat16", device="cpu"):
    parser = ArgumentParser()
    add_prepare_argument(parser, "prepare")
    return parser.parse_args(words, Namespace(dtype=dtype, device=device))


@pytest.mark.parametrize("is_native", [True, False])
def test_bf16_on_the_cpu_is_prepared_by_itself(is_native, monkeypatch):
    monkeypatch.setitem(_arguments.load_errors, "_C", None if is_native else "not built")
    assert prepares(parsed()) == is_native
    assert not prepares(parsed(dtype="float32"))
    assert not prepares(parsed(device="cuda:0"))
    assert not prepares(parsed("--no-prepare"))
    # Without the kernels `prepare` says what is missing.
    assert prepares(parsed("--prepare"))


@pytest.mark.parametrize("setting", [{"dtype": "float16"}, {"device": "cuda"}])
def test_asking_for_it_in_vain_is_refused(setting):
    with pytest.raises(ValueError, match="--prepare needs --dtype bfloat16 and --device cpu"):
        prepares(parsed("--prepare", **setting))
