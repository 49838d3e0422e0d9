"""The fused output layer and loss against torch's, in both precisions and in parts of every size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from asr_am.egs.loader import IGNORE
from asr_am.models.blstm import Blstm, BlstmOptions
from asr_am.train import frame_loss as module
from asr_am.train.frame_loss import batch_loss, frame_loss


def example(pdfs: int, frames: int = 40, inputs: int = 6) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    targets_BT = torch.randint(pdfs, (2, frames))
    targets_BT[1, 3:] = IGNORE
    return torch.randn(2, frames, inputs, requires_grad=True), nn.Linear(inputs, pdfs), targets_BT


def reference(h_BTH: Tensor, output: nn.Linear, targets_BT: Tensor, smoothing: float) -> tuple[Tensor, int]:
    logits_NP, y_N = output(h_BTH).flatten(0, 1).float(), targets_BT.flatten()
    loss = cross_entropy(logits_NP, y_N, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    return loss, int((logits_NP.argmax(1) == y_N).sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("part", "cached"), [(1, 1), (7 * 50, 2 * 50), (2**24, 2**19), (2**24, 3 * 50)])
def test_loss_and_gradients_are_those_of_torch(
    part: int, cached: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 50 pdfs, in parts of 1, 7 and all frames, each in blocks of 1, 2, 3 and all frames."""
    monkeypatch.setattr(module, "CPU_PART", part)
    monkeypatch.setattr(module, "CACHED", cached)
    h_BTH, output, targets_BT = example(50)
    whole, right = reference(h_BTH, output, targets_BT, smoothing)
    loss, correct = frame_loss(h_BTH, output, targets_BT, smoothing)
    assert int(correct) == right
    torch.testing.assert_close(loss, whole)
    expected, computed = (torch.autograd.grad(x / 3, (h_BTH, output.weight, output.bias)) for x in (whole, loss))
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_what_is_compiled_for_a_gpu_is_the_same(smoothing: float, needs_gradient: bool) -> None:
    torch.manual_seed(0)
    z_NP, y_N = 5 * torch.randn(9, 50), torch.randint(50, (9,))
    z_NP[2], y_N[4] = z_NP[2].argmax().eq(torch.arange(50)) * 3.0, IGNORE
    y_N[2] = int(z_NP[2].argmax())
    given = y_N, y_N != IGNORE, smoothing, needs_gradient
    own_NP, expected_NP = z_NP.clone(), z_NP.clone()
    found, expected = module._softmax_in_one(own_NP, *given), module._softmax(expected_NP, *given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own_NP, expected_NP)
    assert int(found[1]) == int(expected[1]) > 0 and torch.equal(own_NP, z_NP) is not needs_gradient


def test_a_torch_that_cannot_compile_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise torch._dynamo.exc.TorchDynamoException("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    z_NP, y_N = torch.randn(3, 5), torch.tensor([0, 4, 2])
    given = y_N, y_N >= 0, 0.0, True
    expected_NP = z_NP.clone()
    expected, softmax = module._softmax(expected_NP, *given), module._CompiledSoftmax()
    for _ in range(2):
        own_NP = z_NP.clone()
        assert softmax(own_NP, *given) == expected
        assert torch.equal(own_NP, expected_NP)
    assert [record.message for record in caplog.records] == [
        "torch.compile fails (no compiler): output layer and loss take twice as long on this GPU"
    ]


def test_a_hopeless_target_has_a_finite_loss() -> None:
    """Its probability is 0 in float32."""
    h_BTH, output, _ = example(3, frames=1)
    with torch.no_grad():
        output.weight.zero_()
        output.bias.copy_(torch.tensor([0.0, 200.0, 199.0]))
    loss, correct = frame_loss(h_BTH, output, torch.tensor([[0], [1]]))
    torch.testing.assert_close(loss.item(), 200.0 + 2 * torch.tensor(-1.0).exp().log1p().item())
    assert int(correct) == 1


def test_bfloat16_products_and_a_float32_softmax() -> None:
    h_BTH, output, targets_BT = example(2000)
    half = h_BTH.detach().bfloat16().requires_grad_()
    loss, correct = frame_loss(half, output, targets_BT)
    rounded = nn.Linear(6, 2000)
    rounded.load_state_dict({name: w.bfloat16().float() for name, w in output.state_dict().items()})
    exact, _ = reference(half.float(), rounded, targets_BT, 0.0)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=1e-3)
    loss.backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    assert output.weight.grad is not None and output.weight.grad.dtype == torch.float32
    expected = torch.autograd.grad(reference(h_BTH, output, targets_BT, 0.0)[0], (h_BTH, output.weight))
    for computed, exact_gradient in zip((half.grad, output.weight.grad), expected, strict=True):
        assert float((computed.float() - exact_gradient).norm() / exact_gradient.norm()) < 0.01
    assert 0 <= int(correct) <= 43


def test_a_scale_of_the_loss_is_not_rounded_to_bfloat16() -> None:
    """The output layer, whose gradients are float32, would else have another scale than the layers below."""
    h_BTH, output, targets_BT = example(2000)
    norms = []
    for frames in (1024, 1327):  # bfloat16 has 1/1024, and would round 1/1327 by 0.2 percent
        half = h_BTH.detach().bfloat16().requires_grad_()
        (frame_loss(half, output, targets_BT)[0] / frames).backward()
        assert half.grad is not None
        norms.append(float(half.grad.float().norm()) * frames)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_has_the_loss_of_its_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Blstm(BlstmOptions(2, 8, 6), 5, 30)
    x_BTF, targets_BT, lengths_B = torch.randn(2, 9, 5), torch.randint(30, (2, 9)), torch.tensor([9, 4])
    targets_BT[1, 4:] = IGNORE
    loss, correct = batch_loss(model, x_BTF, lengths_B, targets_BT, dtype)
    logits_NP, y_N = model(x_BTF, lengths_B).flatten(0, 1), targets_BT.flatten()
    exact = cross_entropy(logits_NP, y_N, ignore_index=IGNORE, reduction="sum")
    assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-5 if dtype == torch.float32 else 1e-2)
    if dtype == torch.float32:
        assert int(correct) == int((logits_NP.argmax(1) == y_N).sum())


def test_nothing_is_kept_without_gradients() -> None:
    h_BTH, output, targets_BT = example(50)
    with torch.no_grad():
        loss, _ = frame_loss(h_BTH, output, targets_BT)
    assert not loss.requires_grad and float(loss) == pytest.approx(
        float(reference(h_BTH, output, targets_BT, 0.0)[0].detach())
    )
