"""The masked language model of integration/c_trainer: same parameters, names and start.

    x = embedding[token]
    per layer:  x += attention(layernorm(x)) out     scores get a learned bias per head and distance
                x += gelu(layernorm(x) in) out
    logits = layernorm(x) embedding^T                at masked positions only

No biases besides the distance table: one on the keys would have a gradient of rounding noise, which
a 1-bit momentum blows up to full size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from data import RNG_INIT, rng_values
from torch.nn import functional as F


class ModelShape(NamedTuple):
    """Sizes of the model."""

    vocab: int
    width: int
    layers: int
    heads: int
    mlp: int
    positions: int


class Weights(torch.nn.Module):
    """Parameters under their names."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))


class Bert(torch.nn.Module):
    """The model. Its parameters depend on seed and shape alone; their order is the C trainer's."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        width, mlp = shape.width, shape.mlp
        self.embedding = torch.nn.Parameter(torch.zeros(shape.vocab, width))
        self.distance_bias = torch.nn.Parameter(torch.zeros(shape.heads, 2 * shape.positions - 1))
        self.final = Weights(gain=(width,))
        for i in range(shape.layers):
            layer = torch.nn.Module()
            layer.attention = Weights(gain=(width,), qkv=(width, 3 * width), out=(width, width))
            layer.mlp = Weights(**{"gain": (width,), "in": (width, mlp), "out": (mlp, width)})
            self.add_module(f"layer{i}", layer)
        self._start(seed)

    @torch.no_grad()
    def _start(self, seed: int) -> None:
        for i, (name, p) in enumerate(self.named_parameters()):
            if name.endswith("gain"):
                p.fill_(1.0)
            else:
                std = 0.02 if name == "distance_bias" else 0.05
                p.copy_(torch.tensor(normal(seed, i, p.numel(), std)).view_as(p))

    def groups(self) -> list[dict[str, list[torch.nn.Parameter]]]:
        """Group 0: matrices, with the configuration's weight decay. Group 1: gains and distance
        biases, whose weight decay the configurations set to 0."""
        plain = [n.endswith("gain") or n == "distance_bias" for n, _ in self.named_parameters()]
        params = list(self.parameters())
        return [
            {"params": [p for p, is_plain in zip(params, plain) if is_plain is wanted]}
            for wanted in (False, True)
        ]

    def _attend(self, x: torch.Tensor, w: Weights, bias: torch.Tensor) -> torch.Tensor:
        """Layernorm and attention up to, but without, the projection back."""
        s = self.shape
        n, size = s.positions, s.width // s.heads
        qkv = F.layer_norm(x, (s.width,), w.gain) @ w.qkv
        parts = qkv.view(-1, n, 3, s.heads, size).permute(2, 0, 3, 1, 4).reshape(3, -1, n, size)
        q, k, v = parts.unbind()
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=1 / math.sqrt(size))
        mixed = torch.bmm(torch.softmax(scores, -1), v)
        return mixed.view(-1, s.heads, n, size).transpose(1, 2).reshape(-1, s.width)

    def _transform(self, x: torch.Tensor, mixed: torch.Tensor, layer: torch.nn.Module):
        """The rest of the layer, row by row: projection, layernorm, MLP."""
        x = torch.addmm(x, mixed, layer.attention.out)
        up = F.layer_norm(x, (self.shape.width,), layer.mlp.gain) @ getattr(layer.mlp, "in")
        return torch.addmm(x, F.gelu(up, approximate="tanh"), layer.mlp.out)

    def forward(self, tokens: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor):
        """Cross entropy in nats, mean over the masked positions."""
        s = self.shape
        x = F.embedding(tokens.view(-1), self.embedding)
        # [head, i, j] is the table's entry of distance j - i; the same for all sequences and layers
        bias = self.distance_bias.unfold(1, s.positions, 1).flip(1).repeat(tokens.shape[0], 1, 1)
        for i in range(s.layers):
            layer = getattr(self, f"layer{i}")
            mixed = self._attend(x, layer.attention, bias)
            if i == s.layers - 1:  # from here on no other row reaches the loss
                x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
            x = self._transform(x, mixed, layer)
        final = F.layer_norm(x, (s.width,), self.final.gain)
        return F.cross_entropy(final @ self.embedding.t(), targets)


def normal(seed: int, tensor: int, n: int, std: float) -> list[float]:
    """What the C trainer draws for a tensor: Box and Muller, by the same functions of libm."""
    uniform = ((rng_values(seed, RNG_INIT, tensor, 0, 2 * n) >> 11).astype(float) + 1.0) / 2.0**53
    sqrt, log, cos = math.sqrt, math.log, math.cos
    pairs = zip(uniform[::2].tolist(), uniform[1::2].tolist())
    return [std * (sqrt(-2.0 * log(a)) * cos(6.283185307179586 * b)) for a, b in pairs]
