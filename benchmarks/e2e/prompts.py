"""The prompts of `benchmarks.e2e.compare`."""

import json
from collections import defaultdict
from itertools import chain, zip_longest
from pathlib import Path

OWN_PROMPTS = Path(__file__).parent / "prompts.jsonl"


def read_prompts(path: Path, limit: int | None) -> list[dict]:
    """Return the questions of a file, or ``limit`` of them, taken in turn from each kind of task."""
    with path.open() as file:
        questions = [json.loads(line) for line in file if line.strip()]
    if limit is None:
        return questions
    tasks = defaultdict(list)
    for question in questions:
        tasks[question["task"]].append(question)
    in_turn = chain.from_iterable(zip_longest(*tasks.values()))
    return [question for question in in_turn if question is not None][:limit]


def encode(tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the ids of chat prompts."""
    chats = [[{"role": "user", "content": text}] for text in texts]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return [list(ids) for ids in encoded["input_ids"]]
