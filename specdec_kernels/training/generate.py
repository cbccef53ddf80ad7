"""Let a model write its own training data: many conversations at once, on a few cores.

A fixed number of slots decode together, one token a step. A slot whose conversation ends takes the next job at once,
so no step is spent on finished rows. A slot holds forced tokens (the template between the turns) or samples freely.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from ..hf._compat import attention_configs, attention_implementation, cache_argument

ATTENTION_NAME = "specdec_row_decode"
SAMPLING_TOP_K = 50  # what `generate(do_sample=True)` keeps when nothing is said


@dataclass(frozen=True)
class Template:
    """The fixed token ids of a chat template around one user turn.

    Attributes:
        before_user: everything up to where the user's text starts.
        after_user: from the end of the user's text to where the answer starts; nothing for a model without turns.
        stop: ids that end a turn.
    """

    before_user: tuple[int, ...]
    after_user: tuple[int, ...]
    stop: frozenset[int]


@dataclass(frozen=True)
class Job:
    """One conversation to generate.

    Attributes:
        index: its number; with the seed it fixes the random draws.
        start: ids to begin with.
        writes_user_turn: whether ``start`` ends inside a user turn, which the model finishes itself.
        greedy: whether the answer is greedy.
    """

    index: int
    start: tuple[int, ...]
    writes_user_turn: bool
    greedy: bool


@dataclass(frozen=True)
class Conversation:
    """A finished conversation: the ids before the answer and the answer's own, its stop id included."""

    index: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    greedy: bool


@dataclass(frozen=True)
class Limits:
    """Lengths and temperatures of the generated turns."""

    user_len: int = 128
    answer_len: int = 256
    user_temperature: float = 1.0
    answer_temperature: float = 0.7


def row_decode_attention(module, query, key, value, attention_mask, *, scaling, dropout=0.0, **options):
    """Attend with one query token for each row, its heads folded into query rows so that K and V are never repeated.

    Several query tokens (a prompt alone in the cache) take the causal path.

    Raises:
        NotImplementedError: the model asks for a soft cap, sinks, or a window shorter than the texts.
    """
    window = options.get("sliding_window")
    if options.get("softcap") or options.get("s_aux") is not None or (window and window < key.shape[2]):
        raise NotImplementedError(
            "generating training data supports plain full attention (Llama, Mistral, Qwen, …), not soft caps, "
            "attention sinks, or texts longer than the sliding window"
        )
    batch, num_heads, num_tokens, head_dim = query.shape
    if num_tokens > 1 or attention_mask is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=num_tokens > 1, scale=scaling, enable_gqa=num_heads != key.shape[1]
        )
        return out.transpose(1, 2), None
    folded = query.reshape(batch, key.shape[1], -1, head_dim)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, num_heads, head_dim), None


class _SlotLayer(CacheLayerMixin):
    """Preallocated rows of one layer; ``slots`` says which rows a call writes, and where."""

    keys: Tensor
    values: Tensor

    def __init__(self, slots: "_SlotCache"):
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self.slots.num_slots, key_states.shape[1], self.slots.capacity, key_states.shape[3])
        self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, positions, width = self.slots.rows, self.slots.positions, self.slots.width
        # An advanced index on both sides of a slice puts the indexed dimensions first: (rows, tokens, heads, dim).
        self.keys[rows[:, None], :, positions] = key_states.transpose(1, 2)
        self.values[rows[:, None], :, positions] = value_states.transpose(1, 2)
        first, last = int(rows[0]), int(rows[-1]) + 1
        return self.keys[first:last, :, :width], self.values[first:last, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.width, 0

    def get_seq_length(self) -> int:
        return self.slots.width

    def get_max_length(self) -> int:
        return self.slots.capacity

    # The name before 5.20.
    get_max_cache_shape = get_max_length


class _SlotCache(Cache):
    """A KV cache whose rows have their own lengths and are refilled one at a time."""

    def __init__(self, num_layers: int, num_slots: int, capacity: int):
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])
        self.num_slots, self.capacity = num_slots, capacity
        self.rows = self.positions = torch.zeros(0, dtype=torch.int64)
        self.width = 0

    def point_at(self, rows: Tensor, positions: Tensor) -> None:
        """Choose the consecutive ``rows (n,)`` and the ``positions (n, T)`` the next forward writes."""
        self.rows, self.positions, self.width = rows, positions, int(positions.max()) + 1


class _Slot:
    """One row's conversation in progress."""

    def __init__(self, job: Job, seed: int):
        self.job = job
        self.ids = list(job.start)
        self.in_user_turn = job.writes_user_turn
        self.turn_start = len(self.ids)
        self.forced: deque[int] = deque()
        self.generator = torch.Generator().manual_seed((seed * 1_000_003 + job.index) % 2**63)

    def temperature(self, limits: Limits) -> float:
        if self.in_user_turn:
            return limits.user_temperature
        return 0.0 if self.job.greedy else limits.answer_temperature

    def take(self, token: int, template: Template, limits: Limits) -> bool:
        """Append the next token (a forced one if there is one); return whether the conversation is complete."""
        if self.forced:
            self.ids.append(self.forced.popleft())
            if not self.forced:
                self.turn_start = len(self.ids)
            return False
        turn_len = len(self.ids) - self.turn_start
        if self.in_user_turn:
            if token in template.stop or turn_len >= limits.user_len:
                self.in_user_turn = False
                self.forced.extend(template.after_user)
                if self.forced:
                    return self.take(token, template, limits)
                # Nothing stands between the turns: this place is drawn again, as the answer's first.
                self.turn_start = len(self.ids)
                return False
            self.ids.append(token)
            return False
        self.ids.append(token)
        return token in template.stop or turn_len + 1 >= limits.answer_len

    def finish(self) -> Conversation:
        prompt, answer = self.ids[: self.turn_start], self.ids[self.turn_start :]
        return Conversation(self.job.index, tuple(prompt), tuple(answer), self.job.greedy)


def sample_rows(logits: Tensor, temperatures: list[float], uniforms: Tensor) -> list[int]:
    """Draw one id for each row of ``logits (B, V)``: the argmax at temperature 0, else from the scaled top 50.

    ``uniforms (B,)`` in [0, 1) decides row by row, so a row's draw does not depend on the other rows.
    """
    values, ids = logits.float().topk(min(SAMPLING_TOP_K, logits.shape[-1]), dim=-1)
    scale = torch.tensor(temperatures, device=logits.device)
    probs = (values / scale.clamp_min(1e-6)[:, None]).softmax(-1)
    picks = (probs.cumsum(-1) <= uniforms.to(logits.device)[:, None]).sum(-1).clamp_max(ids.shape[1] - 1)
    picks = torch.where(scale > 0, picks, 0)
    return ids.gather(1, picks[:, None])[:, 0].tolist()


class BatchedWriter:
    """Decode many conversations at once with a causal LM.

    Args:
        model: a causal LM of transformers in eval mode; its attention function is replaced while this runs.
        template: ids around the user turn.
        num_slots: conversations decoded together.
        limits: lengths and temperatures.
        max_start: longest ``Job.start`` that will come (the cache is allocated once).
        seed: of all draws.
    """

    def __init__(self, model, template: Template, *, num_slots: int, limits: Limits, max_start: int, seed: int = 0):
        self.model, self.template, self.limits, self.seed = model, template, limits, seed
        self.device = model.get_input_embeddings().weight.device
        capacity = max_start + limits.user_len + len(template.after_user) + limits.answer_len + 1
        self.cache = _SlotCache(model.config.num_hidden_layers, num_slots, capacity)
        self.slots: list[_Slot | None] = [None] * num_slots
        self.cache_name = cache_argument(model.base_model)

    @torch.inference_mode()
    def write(self, jobs: Iterable[Job]) -> Iterator[Conversation]:
        """Yield the conversations as they finish (not in job order)."""
        AttentionInterface.register(ATTENTION_NAME, row_decode_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
        pending = iter(jobs)
        with attention_implementation(attention_configs(self.model), ATTENTION_NAME):
            for row in range(len(self.slots)):
                self._refill(row, pending)
            while any(self.slots):
                for row, token in enumerate(self._sample(self._decode())):
                    slot = self.slots[row]
                    if slot is not None and slot.take(token, self.template, self.limits):
                        yield slot.finish()
                        self._refill(row, pending)

    def _refill(self, row: int, pending: Iterator[Job]) -> None:
        """Put the next job into a slot and run all but the last id of its start; that one goes with the next step."""
        job = next(pending, None)
        self.slots[row] = None if job is None else _Slot(job, self.seed)
        if job is not None and len(job.start) > 1:
            positions = torch.arange(len(job.start) - 1, device=self.device)[None]
            self._forward(torch.tensor([job.start[:-1]], device=self.device), torch.tensor([row]), positions, None)

    def _forward(self, ids: Tensor, rows: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        self.cache.point_at(rows.to(self.device), positions)
        options = {self.cache_name: self.cache, "attention_mask": mask, "position_ids": positions, "use_cache": True}
        return self.model.base_model(input_ids=ids, **options).last_hidden_state

    def _decode(self) -> Tensor:
        """Run the last token of every slot (empty slots run a harmless one); return logits ``(B, V)``."""
        ids = torch.tensor([[s.ids[-1] if s else 0] for s in self.slots], device=self.device)
        positions = torch.tensor([[len(s.ids) - 1 if s else 0] for s in self.slots], device=self.device)
        columns = torch.arange(int(positions.max()) + 1, device=self.device)
        mask = (columns <= positions)[:, None, None]
        hidden = self._forward(ids, torch.arange(len(self.slots)), positions, mask)
        return self.model.get_output_embeddings()(hidden[:, -1])

    def _sample(self, logits: Tensor) -> list[int]:
        temperatures = [s.temperature(self.limits) if s else 0.0 for s in self.slots]
        uniforms = torch.tensor([float(torch.rand((), generator=s.generator)) if s else 0.0 for s in self.slots])
        return sample_rows(logits, temperatures, uniforms)
