"""Training text: prompts from a file or from the model itself, conversations on disk, and their split.

A run's folder holds one ``conversations-<worker>.jsonl`` for each generating process. Lines are appended as
conversations finish, so an interrupted run goes on where it stopped.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ..hf.load import load_model, load_tokenizer
from ..hf.prepare import prepare
from ._differences import differences
from .generate import BatchedWriter, Conversation, Job, Limits, Template
from .processes import Processes

# The model writes the user's turn itself after the template's user header (Magpie). Every second turn starts from
# nothing; the others start with one of these words, so that rarer kinds of tasks come up too.
OPENERS = (
    "Write", "Write a short story about", "Write a Python function that", "Explain", "Explain the difference between",
    "Summarize the following text:", "Summarize this article in three sentences:", "Translate to French:",
    "Translate the following German sentence to English:", "Translate the following sentence into Spanish:",
    "Question:", "Context:", "Based on the following passage, answer the question.", "What is", "Who", "When", "Where",
    "Why", "How", "How many", "How do I", "Calculate", "Solve the following math problem:", "If", "A farmer has",
    "There are", "Give me", "List", "Describe", "Compare", "Rewrite the following paragraph:", "Extract", "Classify",
    "Imagine you are", "Act as", "Compose", "Draft an email", "Fix the following code:", "Suggest", "Tell me about",
)  # fmt: skip
HELD_OUT_EVERY = 20  # one conversation in twenty is never trained on


@dataclass(frozen=True)
class GenerationOptions:
    """What decides the text of a run; stored beside it, and checked when the run is continued.

    Attributes:
        model: name as `load_model` takes it.
        data: prompts file, or None when the model writes the user turns too.
        dtype: name of the model's dtype.
        seed: of all draws.
        limits: lengths and temperatures.
    """

    model: str
    data: str | None
    dtype: str
    seed: int
    limits: Limits


def template_of(tokenizer) -> Template:
    """Cut the tokenizer's chat template around one user turn.

    Without one (a model that only continues texts), texts begin with the id that begins or ends all texts, and the
    “answer” is how the model goes on.

    Raises:
        ValueError: the chat template does not keep the user's text, or there is neither one nor such an id.
    """
    if not tokenizer.chat_template:
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if first is None:
            raise ValueError("self-generated data needs a tokenizer with a chat template, or with a bos or eos token")
        return Template((first,), (), frozenset({tokenizer.eos_token_id} - {None}))
    mark = "MARKED USER TEXT"
    parts = _render(tokenizer, [{"role": "user", "content": mark}]).split(mark)
    if len(parts) != 2:
        raise ValueError(f"the chat template must hold the user's text once, found it {len(parts) - 1} times")
    before, after = (tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in parts)
    stop = {tokenizer.eos_token_id, after[0]} if after else {tokenizer.eos_token_id}
    return Template(before, after, frozenset(stop - {None}))


def _render(tokenizer, messages: list[dict]) -> str:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def _prompt_ids(tokenizer, messages: list[dict]) -> tuple[int, ...]:
    """Return what the model is given for a conversation that ends with the user's turn."""
    if tokenizer.chat_template:
        return tuple(tokenizer(_render(tokenizer, messages), add_special_tokens=False).input_ids)
    return tuple(tokenizer("\n".join(message["content"] for message in messages)).input_ids)


def read_prompts(path: str | Path) -> list[list[dict]]:
    """Read a prompts file: JSON lines with ``"turns"`` (Spec-Bench), ``"prompt"`` or ``"messages"``.

    Returns:
        For each line the messages up to and including a user turn; of ``turns`` the first one, since the later ones
        refer to answers that are not there.

    Raises:
        ValueError: a line has none of the keys, or is not JSON; the message names the line.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        prompts.append(_messages_of(entry, f"{path}:{number}"))
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


def _messages_of(entry: object, where: str) -> list[dict]:
    if isinstance(entry, dict) and entry.get("turns"):
        return [{"role": "user", "content": entry["turns"][0]}]
    if isinstance(entry, dict) and entry.get("prompt"):
        return [{"role": "user", "content": entry["prompt"]}]
    if isinstance(entry, dict) and entry.get("messages"):
        messages = list(entry["messages"])
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if messages:
            return messages
    raise ValueError(f'{where}: needs "turns", "prompt" or "messages" with a user turn')


def prompt_jobs(tokenizer, prompts: list[list[dict]]) -> Callable[[int], Job | None]:
    """Return the job of each index: every prompt answered greedily, then every prompt answered by sampling."""

    def job(index: int) -> Job | None:
        if index >= 2 * len(prompts):
            return None
        start = _prompt_ids(tokenizer, prompts[index % len(prompts)])
        return Job(index, start, writes_user_turn=False, greedy=index < len(prompts))

    return job


def self_jobs(tokenizer, template: Template) -> Callable[[int], Job | None]:
    """Return the job of each index when the model writes the user's turn too; every second answer is greedy."""
    openers = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in OPENERS]

    def job(index: int) -> Job | None:
        opener = () if index // 2 % 2 == 0 else openers[index // 4 % len(openers)]
        return Job(index, template.before_user + opener, writes_user_turn=True, greedy=index % 2 == 0)

    return job


def read_conversations(folder: str | Path) -> list[Conversation]:
    """Read what a folder holds, in order of index, each text once; a line cut off by an interruption is skipped."""
    found: dict[int, Conversation] = {}
    for path in sorted(Path(folder).glob("conversations-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[entry["index"]] = Conversation(
                entry["index"], tuple(entry["prompt"]), tuple(entry["answer"]), entry["greedy"]
            )
    texts, unique = set(), []
    for index in sorted(found):
        text = found[index].prompt + found[index].answer
        if text not in texts:
            texts.add(text)
            unique.append(found[index])
    return unique


def is_held_out(conversation: Conversation) -> bool:
    """Say whether a conversation belongs to the held-out part.

    Decided by the prompt's ids alone, so that the two answers to one prompt always fall on the same side.
    """
    value = 0
    for token in conversation.prompt:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value % HELD_OUT_EVERY == 0


def check_split(conversations: Sequence[Conversation]) -> None:
    """Raise ValueError unless there are conversations to train on and held-out ones."""
    for is_wanted, name in ((False, "training"), (True, "held-out")):
        if not any(is_held_out(c) == is_wanted for c in conversations):
            raise ValueError(
                f"no {name} conversations among {len(conversations)}; ask for more tokens, or give more prompts"
            )


def generate_conversations(
    folder: str | Path, options: GenerationOptions, *, num_tokens: int, num_slots: int = 32, num_workers: int = 1,
    device: str = "cpu",
) -> list[Conversation]:  # fmt: skip
    """Generate until the folder holds ``num_tokens`` answer tokens (or the prompts end), and return what it holds.

    Each of several processes of a run (see `Processes`) writes its share.

    Args:
        folder: of the run; a run stopped half-way goes on, with the same draws for the conversations that are missing.
        options: what decides the text.
        num_tokens: answer tokens to have in the end, those already there included.
        num_slots: conversations decoded together by each worker.
        num_workers: processes to start; on a CPU each uses one thread.
        device: of the model.

    Raises:
        ValueError: the folder holds a run with other options.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    processes = Processes.current(device)
    if processes.is_first:
        _check_same_options(folder / "generation.json", options)
    missing = num_tokens - sum(len(c.answer) for c in read_conversations(folder))
    processes.wait()  # until all have read
    if missing > 0:
        num_parts = processes.count if processes.count > 1 else num_workers
        arguments = (num_parts, str(folder), options, -(-missing // num_parts), num_slots, device)
        if processes.count > 1 or num_workers == 1:
            _generate_share(processes.index, *arguments)
        else:
            torch.multiprocessing.spawn(_generate_share, arguments, nprocs=num_workers)
    processes.wait()
    return read_conversations(folder)


def _check_same_options(path: Path, options: GenerationOptions) -> None:
    wanted = asdict(options)
    # A command that wrote nothing, for a name that was wrong, binds nobody.
    found = json.loads(path.read_text()) if path.exists() and read_conversations(path.parent) else wanted
    if different := differences(found, wanted):
        raise ValueError(f"{path.parent} holds a run with another {different}; use another --work folder")
    path.write_text(json.dumps(wanted, indent=1) + "\n")


def _generate_share(
    worker: int, num_workers: int, folder: str, options: GenerationOptions, share: int, num_slots: int, device: str
) -> None:
    if num_workers > 1 and device == "cpu":
        torch.set_num_threads(1)
    tokenizer = load_tokenizer(options.model)
    template = template_of(tokenizer)
    if options.data:
        prompts = read_prompts(options.data)
        make_job, num_starts = prompt_jobs(tokenizer, prompts), len(prompts)
    else:
        make_job, num_starts = self_jobs(tokenizer, template), 4 * len(OPENERS)
    max_start = max(len(job.start) for job in map(make_job, range(num_starts)) if job)
    model = _faster(load_model(options.model, getattr(torch, options.dtype), device))
    writer = BatchedWriter(
        model, template, num_slots=num_slots, limits=options.limits, max_start=max_start, seed=options.seed
    )
    done = {c.index for c in read_conversations(folder)}
    progress = tqdm(total=share, unit="tok", desc=f"generating {worker + 1}/{num_workers}", position=worker)

    def jobs() -> Iterator[Job]:
        # No new conversation starts once there is enough; those in progress are finished, the long ones too.
        index = worker
        while progress.n < share and (job := make_job(index)) is not None:
            if index not in done:
                yield job
            index += num_workers

    with open(Path(folder) / f"conversations-{worker}.jsonl", "a", encoding="utf-8") as file:
        if file.tell():
            file.write("\n")  # ends a line that an interruption may have cut off
        for conversation in writer.write(jobs()):
            file.write(json.dumps(asdict(conversation), separators=(",", ":")) + "\n")
            file.flush()
            progress.update(len(conversation.answer))
    progress.close()


def _faster(model):
    """Prepare the model where this machine and its family allow it."""
    if model.device.type == "cpu" and model.dtype == torch.bfloat16:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            return prepare(model)
    return model
