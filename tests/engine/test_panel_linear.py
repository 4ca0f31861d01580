"""Linear layers in panels, of upper halves of bfloat16 weights or of whole ones: the same products, in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine import panel_linear
from engine.packed_linear import PackedLinear, pack_linears
from engine.panel_linear import FEW_ROWS, PanelLinear, is_bfloat16, linear_kind

pytestmark = pytest.mark.usefixtures("one_thread")


def layer(inputs: int, outputs: int, bias: bool = True, rounded: bool = True) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    linear = nn.Linear(inputs, outputs, bias=bias).eval()
    if rounded:
        linear.weight.data = linear.weight.data.bfloat16().float()
    return linear


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, FEW_ROWS, FEW_ROWS + 1, 100])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"),
    [(24, 40, True), (33, 7, False), (1, 1, True), (8, 16, True), (40, 128, False), (9, 150, True)],
)
@pytest.mark.parametrize(("alone", "rounded"), [(True, True), (False, True), (True, False)])
def test_every_number_of_rows_gives_what_the_layer_gives(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    inputs: int,
    outputs: int,
    bias: bool,
    alone: bool,
    rounded: bool,
) -> None:
    monkeypatch.setattr(panel_linear, "panels_alone", lambda: alone)
    linear = layer(inputs, outputs, bias, rounded)
    x = torch.randn(1, rows, inputs)
    torch.testing.assert_close(PanelLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("rounded", [True, False])
def test_a_row_is_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch, rounded: bool) -> None:
    monkeypatch.setattr(panel_linear, "panels_alone", lambda: True)
    linear = PanelLinear(layer(40, 150, rounded=rounded))
    assert linear.has_halves == rounded
    x = torch.randn(100, 40)
    whole = linear(x)
    for count in (1, 2, 3, 4, 5, 6, 13, 99):
        assert torch.equal(linear(x[-count:]), whole[-count:])


@torch.inference_mode()
def test_rows_that_do_not_lie_in_one_piece() -> None:
    linear = layer(16, 8)
    x = torch.randn(16, 3).t()
    torch.testing.assert_close(PanelLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_weight_with_one_number_that_is_no_bfloat16_is_read_whole() -> None:
    linear = layer(24, 40)
    linear.weight.data[39, 23] = 1 / 3
    assert not is_bfloat16(linear.weight.data)
    x = torch.zeros(1, 24)
    x[0, 23] = 1.0
    assert PanelLinear(linear)(x)[0, 39] == linear(x)[0, 39]


@torch.inference_mode()
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_stays_so(number: float) -> None:
    linear = layer(8, 4)
    x = torch.zeros(1, 8)
    x[0, 3] = number
    torch.testing.assert_close(PanelLinear(linear)(x), linear(x), equal_nan=True)


def test_halves_are_kept_where_there_is_room_and_something_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, full = layer(24, 40), layer(24, 40, rounded=False)
    halves = 2 * 24 * 40
    monkeypatch.setattr(panel_linear, "panels_alone", lambda: True)
    assert linear_kind(nn.Sequential(linear), 0) is PanelLinear
    assert linear_kind(nn.Sequential(full), 0) is PanelLinear
    monkeypatch.setattr(panel_linear, "panels_alone", lambda: False)
    assert linear_kind(nn.Sequential(linear), 2 * halves) is PanelLinear
    assert linear_kind(nn.Sequential(linear), 2 * halves - 1) is PackedLinear
    assert linear_kind(nn.Sequential(full), 1 << 40) is PackedLinear
    assert linear_kind(nn.Sequential(linear.to(torch.bfloat16)), 1 << 40) is PackedLinear


@torch.inference_mode()
def test_layers_of_a_model_are_replaced_and_their_float32_weights_given_up() -> None:
    net = nn.Sequential(layer(24, 40), layer(40, 8))
    x = torch.randn(3, 24)
    expected = net(x)
    assert pack_linears(net, lambda: net(x), PanelLinear) == 2
    torch.testing.assert_close(net(x), expected, atol=1e-5, rtol=1e-5)
    assert all(isinstance(part, PanelLinear) and not part.weight.numel() for part in net)
