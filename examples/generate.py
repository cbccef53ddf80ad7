"""Speculative decoding of a Hugging Face Llama in two lines: load heads, pass them to ``generate``."""

from pathlib import Path

from transformers import TextStreamer

from specdec_kernels.decoding.drafters import MedusaDrafter
from specdec_kernels.hf.generate import generate
from specdec_kernels.hf.load import load_model, load_tokenizer

HEADS = Path(__file__).parent / "heads" / "smollm2-135m-instruct-medusa"

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
drafter = MedusaDrafter.from_pretrained(HEADS, model)
messages = [{"role": "user", "content": "Give three reasons to walk to work."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
generate(model, **inputs, drafter=drafter, streamer=TextStreamer(tokenizer, skip_prompt=True), max_new_tokens=96)
