"""Rank accuracies of any heads on any prompts: how often the model's own greedy answers are among their candidates."""

from collections.abc import Sequence

from ..modules.medusa import MedusaHeads
from .backbone import Backbone
from .calibrate import RankCounter
from .data import prompt_jobs, template_of
from .generate import BatchedWriter, Limits
from .medusa_live import measure_live


def measure_on_prompts(
    model, tokenizer, heads: MedusaHeads, prompts: Sequence[list[dict]], *, answer_len: int = 128, num_slots: int = 8
) -> RankCounter:
    """Let a model answer prompts greedily, and count at which rank its heads have the tokens.

    Args:
        model: a causal LM in eval mode.
        tokenizer: of the model.
        heads: in the model's dtype, on its device.
        prompts: as `data.read_prompts` gives them.
        answer_len: longest answer.
        num_slots: prompts that are answered together.

    Raises:
        NotImplementedError: the model is not supported; says why.
    """
    make_job = prompt_jobs(tokenizer, list(prompts))
    jobs = [job for index in range(len(prompts)) if (job := make_job(index)) is not None]
    writer = BatchedWriter(
        model,
        template_of(tokenizer),
        num_slots=min(num_slots, len(jobs)),
        limits=Limits(answer_len=answer_len),
        max_start=max(len(job.start) for job in jobs),
    )
    counter, _ = measure_live(heads, Backbone(model), list(writer.write(jobs)))
    return counter
