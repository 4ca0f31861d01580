"""Packed linear layers: equal results, and only where nothing else holds or takes the weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.packed_linear import PackedLinear, pack_linears

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """One layer called, one whose weight is taken, one tied to an embedding, one never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 16)
        self.called = nn.Linear(16, 24)
        self.taken = nn.Linear(24, 16, bias=False)
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.idle = nn.Linear(3, 3)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.called(self.embedding(token_ids))
        out: torch.Tensor = self.head(nn.functional.linear(hidden, self.taken.weight))
        return out


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_results_are_equal_and_weights_of_others_stay(rows: int) -> None:
    torch.manual_seed(0)
    net, token_ids = Net().eval(), torch.arange(rows)[None] % 48
    expected = net(token_ids)
    assert pack_linears(net, lambda: net(torch.zeros(1, 2, dtype=torch.int64))) == 2
    assert isinstance(net.called, PackedLinear)
    assert isinstance(net.head, PackedLinear)
    assert type(net.taken) is type(net.idle) is nn.Linear
    torch.testing.assert_close(net(token_ids), expected, atol=1e-5, rtol=1e-5)
    assert net.embedding.weight.numel() == 48 * 16
    assert net.called.weight.numel() == 0


def test_other_kinds_of_layers_are_left() -> None:
    class Own(nn.Linear):
        pass

    net = nn.Sequential(Own(4, 4), nn.Linear(4, 4).to(torch.float16), nn.Linear(4, 4, device="meta"))
    assert pack_linears(net, lambda: None) == 0
