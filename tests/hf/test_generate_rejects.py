"""What `speculative_generate` refuses, and with which words."""

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from specdec_kernels.decoding.drafters import MedusaDrafter
from specdec_kernels.hf._compat import cache_argument
from specdec_kernels.hf.generate import generate, speculative_generate
from specdec_kernels.modules import MedusaHeads
from specdec_kernels.tree import DraftTree

from .tiny import VOCAB, tiny_model

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def drafter(model):
    heads = MedusaHeads(2, 1, model.config.hidden_size, VOCAB)
    return MedusaDrafter(heads, DraftTree.chain(2), model.get_output_embeddings().weight)


def run(model, drafter, **options):
    inputs = {"inputs": IDS, "max_new_tokens": 4} | options
    return model.generate(**inputs, custom_generate=speculative_generate, drafter=drafter)


def filled_cache(model):
    cache = DynamicCache(config=model.config)
    model(IDS, **{cache_argument(model): cache})
    return cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"num_beams": 2, "do_sample": True}, "beam sample"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group beam search"),
        ({"num_beams": 2, "force_words_ids": [[5]]}, "constrained beam search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"dola_layers": "low"}, "dola generation"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ({"inputs": None, "inputs_embeds": torch.zeros(2, 3, 64)}, "the model input 'inputs_embeds'"),
        ({"position_ids": torch.tensor([[3, 4, 5]] * 2)}, "position_ids other than 0, 1, 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_what_it_cannot_do_as_generate_does(model, drafter, options, message):
    with pytest.raises(NotImplementedError, match=f"does not support {message}"):
        run(model, drafter, **options)


def test_refuses_a_processor_with_a_state_that_the_caller_brings(model, drafter):
    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)
    with pytest.raises(NotImplementedError, match="does not support guidance_scale"):
        run(model, drafter, logits_processor=LogitsProcessorList([processor]))


def test_refuses_a_cache_with_content(model, drafter):
    cache = filled_cache(model)
    with pytest.raises(NotImplementedError, match="a cache of the caller's"):
        run(model, drafter, inputs=torch.cat([IDS, IDS[:, :1]], dim=1), **{cache_argument(model): cache})


def test_refuses_an_empty_cache_where_transformers_says_whose_it_is(model, drafter):
    cache = DynamicCache(config=model.config)
    model.generate(IDS, max_new_tokens=1, **{cache_argument(model): cache})
    if not hasattr(cache, "_is_user_defined"):
        pytest.skip("this version of transformers does not mark the caller's cache")
    with pytest.raises(NotImplementedError, match="a cache of the caller's"):
        run(model, drafter, **{cache_argument(model): DynamicCache(config=model.config)})


@pytest.mark.parametrize(
    "mask",
    [[[1, 1, 0], [1, 1, 1]], [[1, 0, 1], [1, 1, 1]], [[0, 0, 0], [1, 1, 1]]],
    ids=["right-padded", "a hole", "an empty row"],
)
def test_refuses_masks_that_are_not_left_padded(model, drafter, mask):
    with pytest.raises(ValueError, match="attention_mask must be left-padded"):
        run(model, drafter, attention_mask=torch.tensor(mask))


def test_refuses_models_that_are_not_supported(drafter):
    from transformers import T5Config, T5ForConditionalGeneration

    settings = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
    model = T5ForConditionalGeneration(T5Config(**settings, decoder_start_token_id=0)).eval()
    with pytest.raises(NotImplementedError, match="encoder"):
        run(model, drafter)


def test_the_wrapper_refuses_an_assistant(model, drafter):
    with pytest.raises(NotImplementedError, match="does not support assistant_model; the drafter takes its place"):
        generate(model, IDS, drafter=drafter, assistant_model=model)


def test_a_drafter_must_be_given(model):
    with pytest.raises(TypeError, match="drafter"):
        model.generate(IDS, custom_generate=speculative_generate, max_new_tokens=4)


def test_nan_logits_are_an_error(model, drafter):
    class Broken:
        def __call__(self, input_ids, scores):
            scores[1] = torch.nan
            return scores

    with pytest.raises(RuntimeError, match="logits of row 1 are NaN"):
        run(model, drafter, logits_processor=LogitsProcessorList([Broken()]))


def test_training_mode_is_an_error(drafter):
    with pytest.raises(RuntimeError, match="training mode"):
        run(tiny_model("llama", num_hidden_layers=1).train(), drafter)
