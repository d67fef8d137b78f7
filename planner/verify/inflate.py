"""Make a target cost what a larger one costs without changing what it says, and store weights in eight bits."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from planner.verify.nets.transformer import Mlp, Transformer


def inflate(net: Transformer, intermediate_size: int, seed: int = 0) -> Transformer:
    """Widen every MLP to `intermediate_size` units. The new units read the input like any other, but their down-projection is zero: they are
    computed and moved, and add exactly nothing, so logits stay equal to the last bit up to the order of summation."""
    if intermediate_size < net.shape.intermediate_size:
        raise ValueError(f"intermediate_size {intermediate_size} is below the model's {net.shape.intermediate_size}")
    generator = torch.Generator().manual_seed(seed)
    wide = copy.deepcopy(net)
    wide.shape = replace(net.shape, intermediate_size=intermediate_size)
    extra, hidden = intermediate_size - net.shape.intermediate_size, net.shape.hidden_size
    for layer in wide.layers:
        mlp: Mlp = layer.mlp  # type: ignore[assignment]
        old = mlp.gate_proj.weight
        for linear in (mlp.gate_proj, mlp.up_proj):
            new = torch.randn(extra, hidden, generator=generator).to(old) * 0.02
            linear.weight = nn.Parameter(torch.cat((linear.weight, new)), requires_grad=False)
            linear.out_features = intermediate_size
        mlp.down_proj.weight = nn.Parameter(torch.cat((mlp.down_proj.weight, old.new_zeros(hidden, extra)), dim=1), requires_grad=False)
        mlp.down_proj.in_features = intermediate_size
    return wide.eval()


class Int8Linear(nn.Module):
    """Weight-only int8, one scale an output row: y = (x Wq^T) * scale, by torch's packed kernel.

    The kernel takes bf16 activations: on a CPU with AVX2 it costs about the same for one to three rows, where float32 triples (and its float32
    form is several times slower than a dense product).
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127.0
        self.register_buffer("weight", torch.round(weight / scale[:, None]).to(torch.int8))
        self.register_buffer("scale", scale.to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        return torch._weight_int8pack_mm(flat, self.get_buffer("weight"), self.get_buffer("scale")).view(*x.shape[:-1], -1).to(x.dtype)


def quantise_int8(net: Transformer) -> Transformer:
    """A copy whose layer matrices are stored in int8 (embedding, LM head and norms stay as they are). It is another model: outputs differ."""
    out = copy.deepcopy(net)
    for module in list(out.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return out.eval()
