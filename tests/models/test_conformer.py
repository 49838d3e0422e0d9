"""The Conformer beside torchaudio's."""

from __future__ import annotations

import torch
import torchaudio
from torch import Tensor, nn

from asr_am.models.conformer import Conformer, ConformerOptions, Convolution

OPTIONS = ConformerOptions(layers=2, width=8, heads=2, feed_forward=12, kernel=5)


class TransposedNorm(nn.Module):
    """Our normalisation in the place of torchaudio's, which has frames last."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x_BDT: Tensor) -> Tensor:
        return self.norm(x_BDT.mT).mT


def torchaudios(model: Conformer) -> nn.Module:
    """Returns torchaudio's encoder with our weights."""
    o = model.options
    encoder = torchaudio.models.Conformer(o.width, o.heads, o.feed_forward, o.layers, o.kernel)
    for layer, theirs in zip(model.layers, encoder.conformer_layers, strict=True):
        convolution, attention = theirs.conv_module, theirs.self_attn
        convolution.sequential = nn.Sequential(
            nn.Conv1d(o.width, 2 * o.width, 1), nn.GLU(dim=1), layer.convolution.depthwise,
            TransposedNorm(layer.convolution.inner_norm), nn.SiLU(), nn.Conv1d(o.width, o.width, 1),
        )  # fmt: skip
        pairs = [
            (convolution.sequential[0].weight, layer.convolution.gates.weight[..., None]),
            (convolution.sequential[0].bias, layer.convolution.gates.bias),
            (convolution.sequential[5].weight, layer.convolution.output.weight[..., None]),
            (convolution.sequential[5].bias, layer.convolution.output.bias),
            (attention.in_proj_weight, layer.attention.queries_keys_values.weight),
            (attention.in_proj_bias, layer.attention.queries_keys_values.bias),
        ]
        for target, weight in pairs:
            target.data.copy_(weight)
        convolution.layer_norm.load_state_dict(layer.convolution.norm.state_dict())
        attention.out_proj.load_state_dict(layer.attention.output.state_dict())
        theirs.self_attn_layer_norm.load_state_dict(layer.attention.norm.state_dict())
        theirs.final_layer_norm.load_state_dict(layer.norm.state_dict())
        for part, own in ((theirs.ffn1, layer.feed_forward), (theirs.ffn2, layer.feed_forward2)):
            part.sequential.load_state_dict(own.state_dict())
    return encoder.eval()


def make(options: ConformerOptions = OPTIONS) -> Conformer:
    torch.manual_seed(0)
    model = Conformer(options, inputs=6, outputs=11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def test_layers_are_torchaudios() -> None:
    """Without padding, which torchaudio's convolution reads."""
    model, x_BTF = make(), torch.randn(3, 9, 6)
    expected, _ = torchaudios(model)(model.input(x_BTF), torch.full((3,), 9))
    torch.testing.assert_close(model.hidden(x_BTF), expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_the_convolution_are_those_of_torch() -> None:
    convolution = Convolution(OPTIONS).train()
    x_BTD, dy_BTD = torch.randn(3, 9, 8, requires_grad=True), torch.randn(3, 9, 8)
    variables = [x_BTD, *convolution.depthwise.parameters()]
    ours = torch.autograd.grad(convolution.over_time(x_BTD), variables, dy_BTD)
    theirs = torch.autograd.grad(convolution.depthwise(x_BTD.mT).mT, variables, dy_BTD)
    torch.testing.assert_close(ours, theirs)


def test_subsampling_takes_frames_side_by_side() -> None:
    model = make(ConformerOptions(**{**OPTIONS.__dict__, "subsampling": 3}))
    same = make(OPTIONS)
    same.input = model.input
    same.load_state_dict(model.state_dict() | {"mean_F": torch.zeros(6), "scale_F": torch.ones(6)})
    x_BTF = torch.randn(2, 8, 6)
    stacks_BKF = torch.cat([x_BTF, torch.zeros(2, 1, 6)], dim=1).reshape(2, 3, 18)
    same.mean_F, same.scale_F = torch.zeros(18), torch.ones(18)
    torch.testing.assert_close(model(x_BTF), same(stacks_BKF))
