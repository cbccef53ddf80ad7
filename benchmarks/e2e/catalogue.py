"""Who takes part in `benchmarks.e2e.compare`, by name: where each runs, what loads it, whose text it should give."""

from typing import NamedTuple

from specdec_kernels.cli import _drafters


class Entry(NamedTuple):
    """One provider.

    Attributes:
        loader: a function of `module`.
        module: `providers` or `peers`.
        packages: imported before the model is loaded, so that they do not count as its memory.
        peer: the environment it needs, None for this interpreter.
        standard: the provider of the same project without speculation, whose text it should give.
        max_batch: the most rows it decodes at once.
    """

    loader: str
    module: str = "peers"
    packages: tuple[str, ...] = ("torch", "transformers.models.llama.modeling_llama")
    peer: str | None = None
    standard: str = "generate"
    max_batch: int = 1


def _hugging_face(loader: str = "hugging_face", max_batch: int = 1) -> Entry:
    return Entry(loader, "providers", max_batch=max_batch)


def _economize(standard: str = "economize-plain") -> Entry:
    packages = ("economize", "transformers.models.llama.modeling_llama")
    return Entry("economize", packages=packages, peer="economize", standard=standard)


MANY = 1 << 16
# Behind the name of a drafter: with drafts sized by the calibration that lies beside the heads.
BUDGET = ":budget"
OURS = {
    name: Entry("ours", "providers", standard="plain", max_batch=MANY)
    for name in (*_drafters.NAMES, *(drafter + BUDGET for drafter in ("medusa", "medusa+ngram")))
}
THEIRS = {
    "generate": _hugging_face(max_batch=MANY),
    "hf-compiled": _hugging_face("hugging_face_compiled", MANY),
    "hf-lookup": _hugging_face(),
    "hf-early-exit": _hugging_face(),
    "economize-plain": _economize("generate"),
    "economize-lookup": _economize(),
    "economize-early-exit": _economize(),
    "economize-layer-skip": _economize(),
    "economize-medusa": _economize(),
    "flashspec-lookup": Entry("flashspec", packages=("flashspec.engine",), peer="flashspec"),
    "vllm": Entry("vllm", packages=("vllm.v1.engine.llm_engine",), peer="vllm"),
    "vllm-ngram": Entry("vllm", packages=("vllm.v1.engine.llm_engine",), peer="vllm", standard="vllm"),
    "llama.cpp": Entry("llama_cpp", packages=("llama_cpp",), peer="llama.cpp"),
    "llama.cpp-lookup": Entry("llama_cpp", packages=("llama_cpp",), peer="llama.cpp", standard="llama.cpp"),
}
PROVIDERS = {**THEIRS, **OURS}
PEERS = tuple(dict.fromkeys(entry.peer for entry in PROVIDERS.values() if entry.peer))


def drafter_of(name: str) -> str:
    """Return the name of the drafter of one of `OURS`."""
    return name.removesuffix(BUDGET)
