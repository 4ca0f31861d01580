"""Linear layers of a model on a CPU, their weights laid out once for oneDNN.

`F.linear` lays a weight out anew in each call, which for a few rows costs more than the product. Two threads on two
Zen 3 cores, float32, the linears of SmolLM2's 30 layers without `lm_head`, ms a step (best of 8):

    rows        1    2    4    8   16   32   64   128   256
    F.linear   50   85   85   86   79  116  151   276   542
    packed     47   45   56   53   66  106  137   300   427

One layout serves every number of rows.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

_ROWS = 32
"""The number of rows that oneDNN chooses the layout for."""


_handles = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, PackedLinear] = weakref.WeakValueDictionary()
"""Compiled code takes no weight in oneDNN's layout, so it calls an op that finds the layer by number."""


class PackedLinear(nn.Module):
    """A linear layer that holds its weight in oneDNN's layout alone."""

    handle: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Modules that ask for the weight's dtype or device get them; one that computes with it fails.
        self.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        self._packed = self.pack(linear.weight.data)
        handle = next(_handles)
        _layers[handle] = self
        # A tensor, so that it is an input of the graph: one graph then serves all layers.
        self.register_buffer("handle", torch.tensor(handle), persistent=False)

    def pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The weight as oneDNN wants it; None: it is not needed."""
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        return packed

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        """Whether oneDNN has a layout for it here."""
        if linear.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        dtype = linear.weight.dtype
        return dtype == torch.float32 or (
            dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if torch.compiler.is_compiling():
            out: torch.Tensor = torch.ops.millstream.packed_linear(x, self.handle, self.out_features)
            return out
        return self.multiply(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The work of `forward`, hidden from compilers."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def _packed_linear(x: torch.Tensor, handle: torch.Tensor, _: int) -> torch.Tensor:
    return _layers[int(handle)].multiply(x)


def _packed_linear_shape(x: torch.Tensor, _: torch.Tensor, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


_library: Any = torch.library.Library("millstream", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("packed_linear(Tensor x, Tensor handle, int out_features) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
torch.library.register_fake("millstream::packed_linear", _packed_linear_shape, lib=_library)


class LinearKind(Protocol):
    """A module that does a linear layer's work."""

    def takes(self, linear: nn.Linear) -> bool:
        """Whether a layer can be replaced by one of this kind."""
        ...

    def __call__(self, linear: nn.Linear) -> nn.Module:
        """What takes its place."""
        ...


def pack_linears(model: nn.Module, run: Callable[[], Any], kind: LinearKind = PackedLinear) -> int:
    """Replace the linear layers of a model by packed ones; those that the kind does not take stay as they are.

    Args:
        model: in evaluation mode.
        kind: `PackedLinear`, `PanelLinear` or `Int8Linear`.
        run: calls the model once. Only layers that it calls are replaced: a module may also take a layer's weight and
            compute with that.

    Returns:
        How many were replaced. Weights that nothing else holds (an embedding may be tied to one) are given up.
    """
    called = _called(model, run)
    holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module) in called and kind.takes(module)
    ]
    for name, linear in linears:
        model.set_submodule(name, kind(linear))
        if holders[id(linear.weight)] == 1:
            linear.weight.data = linear.weight.data.new_empty(0)
    return len(linears)


def _called(model: nn.Module, run: Callable[[], Any]) -> set[int]:
    called: set[int] = set()
    hooks = [
        module.register_forward_hook(lambda module, *_: called.add(id(module)))
        for module in model.modules()
        if type(module) is nn.Linear
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return called
