"""Shapes of real models, by name. The numbers are those of the published ``config.json`` of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """What an op needs to know of a model, on one device.

    Attributes:
        intermediate_size: of the MLP.
        source: repository whose ``config.json`` has the numbers.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int
    source: str


MODELS = {
    model.name: model
    for model in (
        Model("smollm2_135m", 30, 576, 9, 3, 64, 49152, 1536, "HuggingFaceTB/SmolLM2-135M-Instruct"),
        Model("llama3_8b", 32, 4096, 32, 8, 128, 128256, 14336, "meta-llama/Meta-Llama-3-8B"),
        Model("qwen3_8b", 36, 4096, 32, 8, 128, 151936, 12288, "Qwen/Qwen3-8B"),
        # One of eight tensor-parallel ranks: 64 / 8 query heads, 8 / 8 KV heads, 28672 / 8 of the MLP; the rest whole.
        Model("llama3_70b_tp8", 80, 8192, 8, 1, 128, 128256, 3584, "meta-llama/Meta-Llama-3-70B"),
    )
}
