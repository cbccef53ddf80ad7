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


def lengthened(questions: list[dict], others: list[dict], tokenizer, num_tokens: int) -> list[dict]:
    """Put first turns of other questions before each question until its prompt has about so many tokens.

    The others begin behind the question itself, so that prompts differ; the last of them that fits is cut. A question
    that is longer stays as it is.
    """
    names = [other["question_id"] for other in others]
    longer = []
    for question in questions:
        at = names.index(question["question_id"]) + 1
        turn = question["turns"][0]
        before = "\n\n".join(other["turns"][0] for other in [*others[at:], *others[: at - 1]]) + "\n\n"
        ids = tokenizer(before, add_special_tokens=False)["input_ids"]
        room = num_tokens - len(encode(tokenizer, ["\n\n" + turn])[0])
        text = f"{tokenizer.decode(ids[:room])}\n\n{turn}" if room > 0 else turn
        longer.append({**question, "turns": [text]})
    return longer
