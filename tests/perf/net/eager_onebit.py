"""The 1-bit all-reduce as frameworks had it: a list of tensor operations and collectives, one after another, each over the
whole array (compressed all-reduce of 1-bit Adam, arXiv:2102.02888, figure 3, with error feedback on both sides)."""

import math

import numpy as np
import torch
import torch.distributed as dist


def _signs(bits):
    """-1 or 1 for each bit of packed bytes, float32."""
    unpacked = torch.from_numpy(np.unpackbits(bits.numpy()))
    return unpacked.float().add_(-0.5).mul_(2.0)


def _compress(values, residual):
    """Packed signs and the scale of values + residual; the residual becomes what they miss."""
    values = values.add_(residual)
    scale = torch.linalg.vector_norm(values) / math.sqrt(values.numel())
    positive = values.sign().add_(1).bool()
    residual.copy_(values - scale * positive.float().add_(-0.5).mul_(2.0))
    return torch.from_numpy(np.packbits(positive.numpy())), scale.reshape(1)


class EagerOneBit:
    """State of one rank for float32 arrays of n elements."""

    def __init__(self, n):
        self._n, self._ranks = n, dist.get_world_size()
        unit = 8 * self._ranks
        padded = -(-n // unit) * unit
        self._worker, self._server = torch.zeros(padded), torch.zeros(padded // self._ranks)

    def mean(self, data):
        """Replaces data by the compressed mean over ranks."""
        padded = torch.nn.functional.pad(data, (0, len(self._worker) - self._n))
        bits, scale = _compress(padded, self._worker)
        received = torch.empty_like(bits)
        dist.all_to_all_single(received, bits)
        scales = torch.empty(self._ranks)
        dist.all_gather_into_tensor(scales, scale)
        parts = _signs(received).view(self._ranks, -1).mul_(scales.div_(self._ranks).unsqueeze(1))
        bits, scale = _compress(parts.sum(0), self._server)
        whole = torch.empty(self._ranks * len(bits), dtype=torch.uint8)
        dist.all_gather_into_tensor(whole, bits)
        dist.all_gather_into_tensor(scales, scale)
        result = _signs(whole).view(self._ranks, -1).mul_(scales.unsqueeze(1))
        data.copy_(result.view(-1)[:self._n])
