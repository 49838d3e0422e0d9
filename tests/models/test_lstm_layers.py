from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from asr_am.models.lstm import Lstm, LstmOptions
from asr_am.models.lstm_layers import BiLSTM, cudnn_lstm

FRAMES, BATCH, INPUTS, CELLS = 6, 5, 4, 3
LENGTHS = [torch.tensor([6, 2, 4, 1, 6]), torch.tensor([3, 3, 2, 1, 1]), torch.full((BATCH,), FRAMES), None]


def torch_lstm(layer: BiLSTM, x_TBI: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Returns the output of `nn.LSTM` for packed sequences, with zeros for padding."""
    if lengths_B is None:
        return nn.LSTM.forward(layer, x_TBI)[0]
    packed = pack_padded_sequence(x_TBI, lengths_B, enforce_sorted=False)
    return pad_packed_sequence(nn.LSTM.forward(layer, packed)[0], total_length=FRAMES)[0]


def without_padding(y_TBK: Tensor, lengths_B: Tensor | None) -> Tensor:
    if lengths_B is None:
        return y_TBK
    return y_TBK * (torch.arange(FRAMES)[:, None] < lengths_B)[..., None]


def gpu_lstm(layer: BiLSTM, x_TBI: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Returns what a GPU would compute, on a CPU."""
    return cudnn_lstm(x_TBI, layer.all_weights, x_TBI.dtype, layer.training, lengths_B)


@pytest.mark.parametrize("implementation", [BiLSTM.__call__, gpu_lstm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize("lengths_B", LENGTHS)
def test_values_and_gradients_are_those_of_torch(
    lengths_B: Tensor | None, dtype: torch.dtype, tolerance: float, implementation: Callable[..., Tensor]
) -> None:
    """Compares all implementations: on a CPU float64 uses the one written out, float32 that of oneDNN."""
    torch.manual_seed(0)
    layer = BiLSTM(INPUTS, CELLS).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x_TBI = torch.randn(FRAMES, BATCH, INPUTS, dtype=dtype, requires_grad=True)
    weight = torch.randn(FRAMES, BATCH, 2 * CELLS, dtype=dtype)
    results = []
    for function in (implementation, torch_lstm):
        y_TBK = without_padding(function(layer, x_TBI, lengths_B), lengths_B)
        gradients = torch.autograd.grad((y_TBK * weight).sum(), [x_TBI, *layer.parameters()])
        results.append([y_TBK, *gradients])
    for own, reference in zip(*results, strict=True):
        torch.testing.assert_close(own, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths_B", [LENGTHS[0], None])
def test_gradients_are_those_of_finite_differences(lengths_B: Tensor | None) -> None:
    torch.manual_seed(1)
    layer = BiLSTM(INPUTS, CELLS).double()
    x_TBI = torch.randn(FRAMES, BATCH, INPUTS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: without_padding(layer(x, lengths_B), lengths_B), (x_TBI,))


def test_padding_has_no_influence() -> None:
    torch.manual_seed(2)
    layer = BiLSTM(INPUTS, CELLS)
    lengths_B = LENGTHS[0]
    x_TBI = torch.randn(FRAMES, BATCH, INPUTS)
    other = x_TBI.clone()
    other[torch.arange(FRAMES)[:, None] >= lengths_B] = 7.0
    first, second = (without_padding(layer(x, lengths_B), lengths_B) for x in (x_TBI, other))
    assert torch.equal(first, second)
    alone = layer(x_TBI[:2, 1:2])
    torch.testing.assert_close(first[:2, 1:2], alone)


def test_bfloat16_is_close_and_leaves_gradients_in_float32() -> None:
    torch.manual_seed(3)
    layer = BiLSTM(16, 32)
    x_TBI = torch.randn(21, 8, 16)
    exact = layer(x_TBI)
    rough = layer(x_TBI, dtype=torch.bfloat16)
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().max() < 0.02
    rough.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


class LstmCalls(TorchFunctionMode):
    """Records the dtypes of what reaches torch's LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.lstm:
            x, states, weights, *_ = args
            self.dtypes |= {t.dtype for t in (x, *states, *weights)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths_B", LENGTHS[:1] + LENGTHS[2:])
def test_bfloat16_reaches_the_kernel_of_a_gpu(lengths_B: Tensor | None) -> None:
    """Autocast would make it float16."""
    torch.manual_seed(3)
    layer = BiLSTM(INPUTS, CELLS)
    with LstmCalls() as calls:
        x_TBI = torch.randn(FRAMES, BATCH, INPUTS)
        y_TBK = cudnn_lstm(x_TBI, layer.all_weights, torch.bfloat16, True, lengths_B)
    assert calls.dtypes == {torch.bfloat16}
    y_TBK.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_one_direction_of_a_gpu_is_torchs() -> None:
    torch.manual_seed(3)
    layer = nn.LSTM(INPUTS, CELLS)
    x_TBI = torch.randn(FRAMES, BATCH, INPUTS)
    torch.testing.assert_close(cudnn_lstm(x_TBI, layer.all_weights, torch.float32, True), layer(x_TBI)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_lookahead_model_hands_its_kernel_the_dtype_of_the_options(dtype: torch.dtype) -> None:
    model = Lstm(LstmOptions(2, CELLS, 1), INPUTS, 7)
    with LstmCalls() as calls:
        model.hidden(torch.randn(2, FRAMES, INPUTS), torch.tensor([FRAMES, 3]), dtype)
    assert calls.dtypes == {dtype}


def test_the_forget_gate_starts_open() -> None:
    layer = BiLSTM(INPUTS, CELLS)
    bias = layer.bias_ih_l0 + layer.bias_hh_l0
    assert bias.tolist() == [0.0] * CELLS + [1.0] * CELLS + [0.0] * 2 * CELLS
    recurrent = layer.weight_hh_l0_reverse[:CELLS]
    torch.testing.assert_close(recurrent @ recurrent.T, torch.eye(CELLS), atol=1e-5, rtol=0)
