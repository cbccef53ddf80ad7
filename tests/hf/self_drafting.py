"""What the tests of the self-speculative drafters share."""

import torch

from specdec_kernels.decoding import DecodeStats, RejectionAcceptance, decode
from specdec_kernels.decoding.randomness import row_seeds
from specdec_kernels.hf import HFTarget, speculative_generate
from specdec_kernels.hf.families import FAMILIES
from tests.decoding.toy import chi_square_excess
from tests.hf.tiny import VOCAB, tiny_model

LENGTHS = [9, 3, 12, 1]  # some below a window of 6, some past it
NEW_TOKENS = 14
# Every family in a ragged batch; one of them alone, too.
BATCHES = [*((name, LENGTHS) for name in sorted(FAMILIES)), ("llama", [9])]
LAW_VOCAB, LAW_ROWS, LAW_PROMPT = 5, 8000, (1, 4, 2)


def prompts(lengths):
    """Left-padded, as `generate` wants them; a length has always the same prompt."""
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(length)
        ids[row, width - length :] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generated(model, drafter=None, lengths=LENGTHS, **options):
    """Return what `generate` gives, and the statistics of the drafter's run."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    stats = DecodeStats()
    if drafter is not None:
        options |= {"custom_generate": speculative_generate, "drafter": drafter, "stats": stats}
    return model.generate(**prompts(lengths), **options), stats


def law_model():
    """A model so small that thousands of rows decode at once, with a vocabulary to enumerate."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model(
        vocab_size=LAW_VOCAB, num_hidden_layers=4, initializer_range=0.4, eos_token_id=None, bos_token_id=None,
        pad_token_id=None, max_position_embeddings=32, **sizes,
    )  # fmt: skip


@torch.no_grad()
def law_of(model, temperature, prompt=LAW_PROMPT):
    """Return the probability of each of the ``V³`` continuations of the prompt, ``(V, V, V)``, by enumeration."""
    every = torch.cartesian_prod(*[torch.arange(LAW_VOCAB)] * 2)
    ids = torch.cat([torch.tensor(prompt).expand(len(every), -1), every], dim=1)
    probs = (model(ids).logits[:, -3:] / temperature).double().softmax(-1).view(LAW_VOCAB, LAW_VOCAB, 3, LAW_VOCAB)
    return probs[0, 0, 0][:, None, None] * probs[:, 0, 1][:, :, None] * probs[:, :, 2]


def excess(model, drafter, temperature, prompt=LAW_PROMPT):
    """Decode the prompt in many rows, and return the excess of the chi-square statistic of the first three tokens."""
    target = HFTarget(model, LAW_ROWS, len(prompt) + 3 + drafter.max_nodes)
    ids = torch.tensor(prompt).repeat(LAW_ROWS, 1)
    lengths = torch.full((LAW_ROWS,), len(prompt), dtype=torch.int32)
    rows = [[] for _ in range(LAW_ROWS)]
    options = {"temperature": temperature, "seeds": row_seeds(3, LAW_ROWS), "acceptance": RejectionAcceptance()}
    for step in decode(target, drafter, ids, lengths, max_new_tokens=3, **options):
        for row, tokens in zip(rows, step.tokens, strict=True):
            row += tokens
    counts = torch.zeros(LAW_VOCAB, LAW_VOCAB, LAW_VOCAB)
    counts.index_put_(tuple(torch.tensor(rows).T), torch.tensor(1.0), accumulate=True)
    return chi_square_excess(counts, law_of(model, temperature, prompt))
