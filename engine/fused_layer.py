"""A decoder layer of Llama's shape as some ten calls in the place of sixty, on a CPU in float32.

    h = rows + o(attention(split, rotated(qkv(norm(rows)))))          add_norm makes h and norm(h) in one pass
    h + down(SiLU(gate(norm(h))) * up(norm(h)))

Projections of one input are one linear layer, their weights one below the other; `pack_linears` replaces it like any
other. What lies between the products is `engine/fused_kernels.py`. `engine/fusion.py` finds the layers of this shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.attention import Scores, attend_rows, logit_rows
from engine.fused_ops import Norm, add_normed, gate, normed, split
from engine.panel_steps import PanelSteps, fit


class FusedLayer(nn.Module):
    """Takes the place of a decoder layer; bound to its part of the KV store as an attention module is."""

    def __init__(self, layer: Any, head_dim: int, kv_heads: int, scores: Scores) -> None:
        """
        Args:
            layer: one that `engine.fusion.has_shape` passes.
        """
        super().__init__()
        # Models read attributes of their layers, such as `attention_type`.
        self.__dict__.update({name: part for name, part in vars(layer).items() if not name.startswith("_")})
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv_proj = merged([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o_proj = attention.o_proj
        self.gate_up_proj = merged([mlp.gate_proj, mlp.up_proj])
        self.down_proj = mlp.down_proj
        self._input_norm, self._mlp_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self._head_norms = Norm(getattr(attention, "q_norm", None)), Norm(getattr(attention, "k_norm", None))
        self._head_dim, self._kv_heads = head_dim, kv_heads
        self._scores = scores
        self.rotated = True
        """Whether queries and keys are given positions; some layers of some models have none."""
        self.is_last = False
        """Whether no attention comes after its own: then a row matters only where its logits are asked for."""
        self._steps: PanelSteps | None = None

    def settle(self) -> None:
        """To be called once the linear layers are what they will be."""
        linears = [self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj]
        if fit(linears, self._head_dim):
            norms = [self._input_norm, *self._head_norms, self._mlp_norm]
            self._steps = PanelSteps(linears, norms, self._kv_heads, self._head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """`[1, T, C]` to `[1, T, C]`.

        Args:
            position_embeddings: cosines and sines, `[1, T, R]` each.
            attention_mask: for a probe that loads the weights once more; none is made in service.
        """
        hidden = hidden_states[0].contiguous()
        cos, sin = (part[0] if self.rotated else part[0, :, :0] for part in position_embeddings)
        if self._steps is not None:
            rows = self._steps.before(hidden, cos, sin)
            attended = attend_rows(self, *rows, self._scores, attention_mask)
            return self._after(self._steps, hidden, attended)[None]
        qkv = self.qkv_proj(normed(hidden, self._input_norm))
        query, key, value = split(qkv, cos, sin, self._head_norms, self._kv_heads, self._head_dim)
        attended = attend_rows(self, query, key, value, self._scores, attention_mask)
        total, inputs = add_normed(hidden, self.o_proj(attended.flatten(1)), self._mlp_norm)
        return total.add_(self.down_proj(gate(self.gate_up_proj(inputs))))[None]

    def _after(self, steps: PanelSteps, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What comes after attention; in the last layer, rows that nobody asks for stay as they were.

        A row of panels is the same in any batch, so none of the others changes by a bit.
        """
        rows = logit_rows(self) if self.is_last else None
        if rows is None or len(rows) == len(hidden):
            return steps.after(hidden, attended)
        return hidden.index_copy(0, rows, steps.after(hidden[rows], attended[rows]))


def merged(linears: list[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of several, one after the other."""
    outputs = sum(linear.out_features for linear in linears)
    biased = any(linear.bias is not None for linear in linears)
    whole = nn.Linear(linears[0].in_features, outputs, bias=biased, device="meta")
    whole.weight = nn.Parameter(torch.cat([linear.weight.data for linear in linears]), requires_grad=False)
    if biased:
        biases = [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.data
            for linear in linears
        ]
        whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return whole.eval()
