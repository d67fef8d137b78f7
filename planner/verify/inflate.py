"""Make a target cost what a larger one costs without changing what it says, and store weights in eight bits."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from planner.verify.nets.transformer import Shape, Transformer


def inflate(net: Transformer, shape: Shape, seed: int = 0) -> Transformer:
    """The same function at the cost of a larger `shape`: wider MLPs, more heads, more layers, a wider residual stream.

    New MLP units and heads read the input like any other, but what they would add is multiplied by zeros; new layers add nothing; new channels
    of the residual stream stay zero, and the norms are scaled by sqrt(old / new width) for them. All is computed and moved. Outputs are equal up
    to the order of summation. (On a GPU, products with zeros draw less power than others: a clock that follows power may run higher.)

    Raises ValueError where `shape` is smaller somewhere, or changes what cannot be padded: head size, G, vocabulary, rotary base.
    """
    old = net.shape
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if getattr(shape, name) < getattr(old, name):
            raise ValueError(f"{name} {getattr(shape, name)} is below the model's {getattr(old, name)}")
    for name in ("head_dim", "gqa_group_size", "vocab_size", "rope_theta"):
        if getattr(shape, name) != getattr(old, name):
            raise ValueError(f"{name} must stay {getattr(old, name)}, not {getattr(shape, name)}")
    narrow = old.hidden_size / shape.hidden_size
    weight = net.embed_tokens.weight
    with torch.device("meta"):
        wide = Transformer(replace(shape, rms_norm_eps=old.rms_norm_eps * narrow), net.taps).to(weight.dtype)
    wide = wide.to_empty(device=weight.device).requires_grad_(False)
    wide.feature_size = net.feature_size
    generator = torch.Generator(weight.device).manual_seed(seed)
    known = dict(net.named_parameters())
    for name, p in wide.named_parameters():
        if p.ndim == 1:
            p.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            p.zero_()
        else:
            p.normal_(0.0, 0.02, generator=generator)
        if name in known:
            before = known[name]
            p[tuple(slice(n) for n in before.shape)] = before * narrow**0.5 if p.ndim == 1 else before
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
