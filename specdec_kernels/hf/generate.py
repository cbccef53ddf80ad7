"""Speculative decoding behind ``model.generate``."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..decoding.acceptance import Acceptance, GreedyAcceptance, RejectionAcceptance, TypicalAcceptance
from ..decoding.budget import Budget
from ..decoding.drafters import DraftModelDrafter, PlainDrafter
from ..decoding.loop import decode
from ..decoding.protocols import Drafter
from ..decoding.randomness import row_seeds
from ..decoding.stats import DecodeStats
from ._budgets import budget_of
from ._logits import NodeLogits
from ._options import check_options, right_padded
from ._transcript import Transcript
from .graphs import StepGraphs
from .target import HFTarget


def speculative_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter | PreTrainedModel | None,
    acceptance: str | Acceptance = "auto",
    seed: int | Sequence[int | None] | Tensor | None = None,
    token_streamer: Any = None,
    stats: DecodeStats | None = None,
    budget: Budget | str | None = None,
    graphs: StepGraphs | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode speculatively: what to give to ``model.generate(..., custom_generate=speculative_generate, drafter=...)``.

    ``generate`` prepares prompts, processors and criteria as ever; only the decoding is ours. Greedy output is what
    ``generate`` gives, sampled output has the same distribution. `docs/generation.md` lists every option.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: come from ``generate``.
        drafter: proposes the draft trees, for example `MedusaDrafter.from_pretrained(path, model)`. A smaller model
            of the same vocabulary drafts through `DraftModelDrafter`. None decodes plainly through the same loop.
        acceptance: ``"auto"`` is exact: greedy without ``do_sample``, rejection with it. ``"greedy"``, ``"rejection"``,
            ``"typical"`` (Medusa's rule, not exact) name one; an `Acceptance` is taken as it is.
        seed: of the sampling. A number seeds all rows, each differently; a sequence has one for each row of the batch
            (after ``num_return_sequences``), and a row with the same seed and prompt gives the same tokens in any
            batch; None, for all or for a row, draws from torch's default generator.
        token_streamer: gets the tokens as ``streamer`` does. ``generate`` keeps ``streamer`` for itself when there is
            a ``custom_generate``, so it has another name here; `generate` of this module takes it as ``streamer``.
        stats: is filled in place.
        budget: limits the drafts by the rows that go on, for example ``Calibration.load(folder).budget("medusa")``.
            ``"auto"`` loads the calibration of this machine, dtype and number of threads that lies beside the drafter's
            heads; where there is none a warning says so, and drafts are whole, as with None.
        graphs: records the steps of this model and replays them in later steps and calls, on a GPU; a prepared model
            there has its own.

    Returns:
        What ``generate`` returns: ids ``(B, P + new)``, or a `GenerateDecoderOnlyOutput`.

    Raises:
        NotImplementedError: an option or a model that is not supported; the message names it.
        ValueError: an attention mask that is not left-padded, an unknown ``acceptance`` or ``budget``, seeds of
            another number than rows.
        RuntimeError: the logits of a row are NaN, or the model is in training mode.

    Example:
        >>> model.generate(**inputs, custom_generate=speculative_generate, drafter=drafter, max_new_tokens=64)
    """
    check_options(generation_config, logits_processor, model_kwargs)
    drafter = _drafter(drafter)
    sampled = bool(generation_config.do_sample)
    rule = _acceptance(acceptance, sampled)
    prompt_ids, prompt_len = right_padded(
        input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    )
    max_length = stopping_criteria.max_length
    limit = max(1, (generation_config.max_length if max_length is None else max_length) - input_ids.shape[1])
    capacity = prompt_ids.shape[1] + limit - 1 + drafter.max_nodes
    target = HFTarget(model, len(input_ids), capacity, graphs=graphs)
    keeps = bool(generation_config.return_dict_in_generate)
    pad_id = _pad_id(generation_config)
    transcript = Transcript(
        input_ids,
        stopping_criteria,
        pad_id,
        streamer=token_streamer,
        keep_scores=keeps and bool(generation_config.output_scores),
        keep_logits=keeps and bool(generation_config.output_logits),
    )
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    steps = decode(
        target,
        drafter,
        prompt_ids.to(model.device),
        prompt_len.to(model.device),
        acceptance=rule,
        max_new_tokens=limit,
        eos_ids=_eos_ids(stopping_criteria),
        temperature=1.0 if sampled else 0.0,
        seeds=_seeds(seed if sampled else 0, len(input_ids)).to(model.device),
        process_logits=NodeLogits(logits_processor, input_ids, pad_id) if logits_processor else None,
        stop=transcript,
        stats=stats,
        budget=budget_of(budget, model, drafter),
    )
    try:
        for step in steps:
            if any(step.failed):
                raise RuntimeError(f"speculative_generate: the logits of row {step.failed.index(True)} are NaN")
    finally:
        target.release()
    if token_streamer is not None:
        token_streamer.end()
    if not keeps:
        return transcript.sequences
    parts: dict[str, Any] = {name: getattr(transcript, name) for name in ("sequences", "scores", "logits")}
    return GenerateDecoderOnlyOutput(**parts)


def generate(
    model: GenerationMixin,
    inputs: Tensor | None = None,
    *,
    drafter: Drafter | PreTrainedModel | None,
    streamer: Any = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Call ``model.generate`` speculatively, with ``streamer`` and ``stop_strings`` under their usual names.

    Args:
        model, inputs: as for ``model.generate``.
        drafter: as for `speculative_generate`.
        streamer: as for ``model.generate``.
        tokenizer: needed for ``stop_strings``.
        kwargs: everything else that ``model.generate`` takes, and ``acceptance``, ``seed``, ``stats``, ``budget``,
            ``graphs`` of `speculative_generate`.

    Returns:
        What ``model.generate`` returns.

    Raises:
        NotImplementedError: ``assistant_model`` or ``assistant_tokenizer`` is given: the drafter takes their place.
        Otherwise as `speculative_generate`.

    Example:
        >>> generate(model, **inputs, drafter=drafter, streamer=TextStreamer(tokenizer), max_new_tokens=64)
    """
    for name in ("assistant_model", "assistant_tokenizer"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"speculative decoding does not support {name}; the drafter takes its place")
    stop_strings = _stop_strings(model, kwargs)
    if stop_strings and tokenizer is not None:
        criteria = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stop_strings)]
        kwargs |= {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}
    return model.generate(
        inputs, custom_generate=speculative_generate, drafter=drafter, token_streamer=streamer, **kwargs
    )


def _stop_strings(model: GenerationMixin, kwargs: dict[str, Any]) -> str | list[str] | None:
    """Return the stop strings in force, by the precedence of ``generate``."""
    if kwargs.get("stop_strings") is not None:
        return kwargs["stop_strings"]
    given = getattr(kwargs.get("generation_config"), "stop_strings", None)
    return model.generation_config.stop_strings if given is None else given


def _drafter(drafter: Drafter | PreTrainedModel | None) -> Drafter:
    if drafter is None:
        return PlainDrafter()
    return DraftModelDrafter(partial(HFTarget, drafter)) if isinstance(drafter, PreTrainedModel) else drafter


def _acceptance(acceptance: str | Acceptance, sampled: bool) -> Acceptance:
    rules = {"greedy": GreedyAcceptance, "rejection": RejectionAcceptance, "typical": TypicalAcceptance}
    if not isinstance(acceptance, str):
        return acceptance
    if acceptance == "greedy" and sampled:
        raise ValueError("speculative_generate: acceptance='greedy' ignores do_sample=True; leave one of them out")
    if acceptance == "auto":
        acceptance = "rejection" if sampled else "greedy"
    if acceptance not in rules:
        raise ValueError(
            f"speculative_generate: acceptance must be 'auto', {', '.join(map(repr, rules))} or an "
            f"Acceptance, got {acceptance!r}"
        )
    return rules[acceptance]()


def _seeds(seed: int | Sequence[int | None] | Tensor | None, num_rows: int) -> Tensor:
    """Return a seed for each row, ``(B,) int64``."""
    if isinstance(seed, int):
        return row_seeds(seed, num_rows)
    seeds: list[int | None] = [None] * num_rows if seed is None else [*map(_as_int, seed)]
    if len(seeds) != num_rows:
        raise ValueError(
            f"speculative_generate: seed must be one number or {num_rows}, one for each row, got {len(seeds)}"
        )
    drawn = row_seeds(int(torch.randint(2**63 - 1, ())), num_rows).tolist() if None in seeds else seeds
    return torch.tensor([seed if seed is not None else drawn[row] for row, seed in enumerate(seeds)], dtype=torch.int64)


def _as_int(value: int | Tensor | None) -> int | None:
    return None if value is None else int(value)


def _eos_ids(criteria: StoppingCriteriaList) -> list[int]:
    return [i for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.flatten().tolist()]


def _pad_id(config: GenerationConfig) -> int:
    """Return what ended rows are filled with: as in ``generate`` the first EOS id where there is no padding."""
    eos = config.eos_token_id
    first_eos = eos[0] if isinstance(eos, (list, tuple)) else eos
    pad = config.pad_token_id if config.pad_token_id is not None else first_eos
    return 0 if pad is None else int(pad)
