"""Training that begins with what an earlier one came to."""

import pytest
import torch

from specdec_kernels.modules.medusa import MedusaHeads
from specdec_kernels.training.generate import Conversation
from specdec_kernels.training.head_loss import HeadOptions
from specdec_kernels.training.medusa import fresh_heads

TEXTS = [Conversation(0, (1,), (5, 6, 5, 6, 9), True)]


@pytest.fixture
def lm_head():
    return torch.randn(12, 8, dtype=torch.bfloat16)


def trained_heads(folder, **options):
    options = {"vocab_map": torch.tensor([2, 5, 9, 10]), "root_conditioned": True} | options
    heads = MedusaHeads(2, 1, 8, 12, dtype=torch.bfloat16, **options)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    heads.save_pretrained(folder)
    return heads


def test_heads_go_on_with_any_vocabulary(tmp_path, lm_head):
    trained = trained_heads(tmp_path)
    heads = fresh_heads(HeadOptions(2, 1, draft_vocab=3, init=str(tmp_path)), TEXTS, lm_head)
    assert heads.vocab_map.tolist() == [5, 6, 9]
    for name, parameter in heads.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, trained.get_parameter(name).float()), name
    assert fresh_heads(HeadOptions(2, 1, init=str(tmp_path)), TEXTS, lm_head).vocab_map is None


@pytest.mark.parametrize("draft_vocab", [3, 0])
def test_projections_of_their_own_are_taken_over_token_by_token(tmp_path, lm_head, draft_vocab):
    trained = trained_heads(tmp_path, own_projection=True)
    options = HeadOptions(2, 1, own_projection=True, draft_vocab=draft_vocab, init=str(tmp_path))
    heads = fresh_heads(options, TEXTS, lm_head)
    tokens = [5, 6, 9] if draft_vocab else range(12)
    assert heads.w_out.shape == (2, len(tokens), 8)
    for row, token in enumerate(tokens):
        old = (trained.vocab_map == token).nonzero()[:, 0].tolist()
        expected = trained.w_out[:, old[0]] if old else lm_head[token].expand(2, -1)
        assert torch.equal(heads.w_out[:, row], expected.float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (HeadOptions(3, 1), r"w_res \(2, 1, 8, 8\), wanted \(3, 1, 8, 8\); b_res"),
        (HeadOptions(2, 1, root_conditioned=False), r"w_root \(8, 16\), wanted \(none\); b_root"),
        (HeadOptions(2, 1, own_projection=True), r"shapes: w_out \(none\), wanted \(2, 12, 8\)$"),
    ],
    ids=["heads", "root", "projection"],
)
def test_heads_of_another_shape_are_refused(tmp_path, lm_head, options, message):
    trained_heads(tmp_path)
    with pytest.raises(ValueError, match=message):
        fresh_heads(HeadOptions(**{**vars(options), "init": str(tmp_path)}), TEXTS, lm_head)


def test_heads_of_another_model_are_refused(tmp_path, lm_head):
    trained_heads(tmp_path, own_projection=True)
    options = HeadOptions(2, 1, own_projection=True, init=str(tmp_path))
    with pytest.raises(ValueError, match="for 12 tokens, the model has 11"):
        fresh_heads(options, TEXTS, lm_head[:11])
    with pytest.raises(ValueError, match=r"w_res \(2, 1, 8, 8\), wanted \(2, 1, 6, 6\)"):
        fresh_heads(options, TEXTS, lm_head[:, :6])
    with pytest.raises(FileNotFoundError):
        fresh_heads(HeadOptions(2, 1, init=str(tmp_path / "nowhere")), TEXTS, lm_head)
