import pytest
import torch
import torch.nn.functional as F

from specdec_kernels.training import losses
from specdec_kernels.training.losses import head_weights, linear_cross_entropy, medusa_loss


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(losses.CHUNK_ROWS, "cpu", 5)  # 13 rows: two whole chunks and a ragged one


def inputs(rows=13, size=8, vocab=11, dtype=torch.float64):
    x = torch.randn(rows, size, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, size, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (rows,))
    labels[[0, 6, 12]] = -100
    return x, weight, labels


@pytest.mark.parametrize("frozen", [False, True])
def test_linear_cross_entropy_is_cross_entropy(frozen):
    x, weight, labels = inputs()
    weight.requires_grad_(not frozen)
    loss = 3 * linear_cross_entropy(x, weight, labels)
    expected = 3 * F.cross_entropy(x @ weight.T, labels)
    wanted = [x] if frozen else [x, weight]
    # The softmax is computed in fp32.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    for got, want in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_teacher_gives_the_cross_entropy_to_its_distribution(frozen):
    x, weight, labels = inputs()
    weight.requires_grad_(not frozen)
    teacher, teacher_weight = torch.randn(13, 8).double(), torch.randn(11, 8).double()
    loss = 3 * linear_cross_entropy(x, weight, labels, teacher, teacher_weight)
    valid = labels != -100
    expected = 3 * F.cross_entropy((x @ weight.T)[valid], (teacher @ teacher_weight.T).softmax(-1)[valid])
    wanted = [x] if frozen else [x, weight]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    for got, want in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_linear_cross_entropy_without_labels_is_zero():
    x, weight, labels = inputs()
    loss = linear_cross_entropy(x, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


def test_linear_cross_entropy_in_bf16_is_near():
    x, weight, labels = inputs(dtype=torch.float32)
    got = linear_cross_entropy(x.detach().bfloat16(), weight.detach().bfloat16(), labels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, F.cross_entropy(x @ weight.T, labels), rtol=2e-2, atol=2e-2)


def test_head_weights_are_powers_from_one():
    assert head_weights(3, 0.8) == pytest.approx([0.8, 0.64, 0.512])


def test_each_head_has_its_own_teacher():
    states, teacher = torch.randn(9, 3, 8), torch.randn(9, 3, 8)
    weight, labels = torch.randn(11, 8), torch.zeros(9, 3, dtype=torch.int64)
    _, parts = medusa_loss(states, weight, labels, 0.8, teacher, weight)
    plain = [F.cross_entropy(states[:, k] @ weight.T, (teacher[:, k] @ weight.T).softmax(-1)) for k in range(3)]
    torch.testing.assert_close(parts, torch.stack(plain))


@pytest.mark.parametrize("own", [False, True])
def test_medusa_loss_is_the_plain_formula(own):
    states = torch.randn(9, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(*((3, 11, 8) if own else (11, 8)), dtype=torch.float64, requires_grad=own)
    labels = torch.randint(11, (9, 3))
    labels[7:, 2] = labels[8:, 1] = -100
    loss, parts = medusa_loss(states, weight, labels, decay=0.7)
    plain = [F.cross_entropy(states[:, k] @ (weight[k] if own else weight).T, labels[:, k]) for k in range(3)]
    torch.testing.assert_close(parts.double(), torch.stack(plain).detach(), rtol=1e-6, atol=1e-6)
    expected = 0.7 * plain[0] + 0.49 * plain[1] + 0.343 * plain[2]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    wanted = [states, weight] if own else [states]
    for got, want in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
