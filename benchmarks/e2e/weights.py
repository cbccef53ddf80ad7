"""Write the weights of a run for other projects: a folder in its dtype, and a GGUF file with the same numbers.

    python -m benchmarks.e2e.weights --out FOLDER --dtype bfloat16

A GGUF model is unpacked tensor by tensor, so its layout and its metadata stay as llama.cpp wants them. llama.cpp needs
its norms in fp32; they are rounded to the dtype of the run first.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from specdec_kernels.hf.load import PACKAGED_MODEL, load_model, load_tokenizer, packaged_model_file

MODEL_FOLDER, GGUF_FILE = "model", "model.gguf"
# What a GGUF writer sets by itself, or what described the packed file.
OWN_KEYS = ("general.architecture", "general.file_type", "general.quantization_version")


def write_folder(name: str, dtype: torch.dtype, folder: Path) -> Path:
    """Write a model and its tokenizer as transformers reads them."""
    path = folder / MODEL_FOLDER
    load_model(name, dtype=dtype).save_pretrained(path)
    load_tokenizer(name).save_pretrained(path)
    return path


def write_gguf(name: str, dtype: torch.dtype, folder: Path) -> Path:
    """Write the GGUF model ``name`` with its matrices in ``dtype``.

    Raises:
        RuntimeError: ``name`` is no GGUF file, nor the packaged model.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, quants

    source = packaged_model_file() if name == PACKAGED_MODEL else name
    if not source.endswith(".gguf"):
        raise RuntimeError(f"{name} is no GGUF file; give llama.cpp one of the same weights with --gguf FILE")
    reader, path = GGUFReader(source), folder / GGUF_FILE
    writer = GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    kinds = {torch.bfloat16: ("BF16", "MOSTLY_BF16"), torch.float32: ("F32", "ALL_F32")}
    kind, file_type = kinds[dtype]
    writer.add_file_type(LlamaFileType[file_type])
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in OWN_KEYS:
            _copy_field(writer, field)
    for tensor in reader.tensors:
        weights = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy()).to(dtype)
        if weights.dim() > 1 and dtype == torch.bfloat16:
            raw = weights.view(torch.uint8).numpy()
            writer.add_tensor(tensor.name, raw, raw_dtype=GGMLQuantizationType[kind])
        else:
            writer.add_tensor(tensor.name, weights.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def memory_sizes(folder: Path, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of a folder's weights, and of the keys and values of a token."""
    config = AutoConfig.from_pretrained(folder)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"weight_bytes": weights, "cache_bytes_per_token": values * dtype.itemsize}


def _copy_field(writer: Any, field: Any) -> None:
    kind, *item = field.types
    writer.add_key_value(field.name, field.contents(), kind, item[0] if item else None)


def main() -> None:
    """Write what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PACKAGED_MODEL)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, args.dtype)
    print(write_folder(args.model, dtype, args.out))
    print(write_gguf(args.model, dtype, args.out))


if __name__ == "__main__":
    main()
