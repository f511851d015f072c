"""Few bits a value after a random rotation, which makes values nearly Gaussian, whatever they
were. Tensor code only.

Shapes: N values, M blocks of K values.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from xcloud.base.settings import settings
from xcloud.comm.compressor import Draws, Family, Feedback, refuse_integers, wide
from xcloud.comm.precision import Seed, pack, packed_bytes, unpack
from xcloud.net.frame import Tensors, TensorSpec

BLOCK = 128
"""Values that are rotated together: long enough for Gaussian sums, and one scale costs an eighth
of a bit each. With 512 a pass takes longer, for 4 % fewer bytes at 2 bits."""

_LEVELS = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1519),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326),
}
"""Those above 0 of the levels of least squared error for a Gaussian of variance 1 (Max, IRE
Trans. IT 1960)."""


@settings("Eden", frozen=False)
class Eden(Draws):
    """Levels of a Gaussian for values that random signs and a Walsh-Hadamard transform have mixed.

    x_hat = S H (scale * q),  q = the nearest levels of H S x / |H S x| * sqrt(K),
    scale = <H S x, q> / <q, q>, which has the least error; S: random signs, H: orthonormal

    Source: Vargaftik et al., EDEN, arXiv:2108.08842. Differences: blocks of 128 instead of the
    whole tensor, so no tensor is padded to a power of two; signs are the same for all blocks of a
    message and new in each one.

    Squared error: 0.34 to 0.36, 0.11, 0.034 and 0.009 at 1 to 4 bits, of rows, gradients and
    weight gradients of MiniLM alike. BlockInt has 0.46 to 0.65 at 1 bit and 0.13 to 0.17 at 2. At
    3 and 4 bits it has as much as this on gradients, and half as much again on rows.

    Wire, for N values in M = ceil(N / 128) blocks: codes uint8 [packed_bytes(128 M, bits)], scales
    bfloat16 as int16 [M], the seed of the signs int64 [1]. Arithmetic is float32, sums in a fixed
    order, so every processor decodes the same bits. NaN or inf makes its block NaN.

    bits: number of bits per value.
    seed: seed of the signs, which is combined with the channel's seed.
    """

    family: ClassVar[Family] = "precision"
    bits: Literal[1, 2, 3, 4] = 2
    seed: Seed = 0

    @property
    def feedback(self) -> Feedback:
        return "useful" if self.bits > 2 else "needed"

    label_form = "eden{bits}"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        num_blocks = -(-spec.numel // BLOCK)
        return (
            TensorSpec((packed_bytes(num_blocks * BLOCK, bits=self.bits),), dtype=torch.uint8),
            TensorSpec((num_blocks,), dtype=torch.int16),
            TensorSpec((1,), dtype=torch.int64),
        )

    def compress(self, tensor: Tensor) -> Tensors:
        refuse_integers(tensor)
        seed = self._next_seed()
        values_N = tensor.detach().reshape(-1).float()
        blocks_MK = pad(values_N, (0, -len(values_N) % BLOCK)).view(-1, BLOCK)
        largest_M1 = blocks_MK.abs().amax(1, keepdim=True)
        # Divided first, so that squares of gradients of 1e-25 do not underflow.
        unit_M1 = torch.where(largest_M1 > 0, largest_M1, 1)
        mixed_MK = mix(blocks_MK / unit_M1 * _signs(seed).to(tensor.device))
        rms_M1 = mixed_MK.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)
        levels, bounds = _table(self.bits)
        # NaN, which no bound holds back, becomes the last code; its scale is NaN.
        codes_MK = torch.bucketize(mixed_MK / rms_M1, bounds.to(tensor.device))
        chosen_MK = levels.to(tensor.device)[codes_MK]
        scales_M = (mixed_MK * chosen_MK).sum(1) / chosen_MK.square().sum(1) * unit_M1[:, 0]
        return (
            pack(codes_MK.view(-1).to(torch.uint8), bits=self.bits),
            scales_M.to(torch.bfloat16).view(torch.int16),
            torch.tensor([seed], dtype=torch.int64, device=tensor.device),
        )

    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
        packed, scales, seed = parts
        codes_N = unpack(packed, bits=self.bits, num_codes=len(scales) * BLOCK)
        levels = _table(self.bits)[0].to(packed.device)
        chosen_MK = levels[codes_N.long()].view(-1, BLOCK)
        values_MK = mix(chosen_MK) * _signs(int(seed)).to(packed.device)
        values_MK *= scales.view(torch.bfloat16).float()[:, None]
        largest = torch.finfo(spec.dtype).max
        values_N = values_MK.view(-1)[: spec.numel].to(wide(spec.dtype))
        return values_N.clamp(-largest, largest).to(spec.dtype).view(spec.shape)


def mix(blocks_MK: Tensor) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of each block, which is its own inverse."""
    num_values = blocks_MK.shape[1]
    half = 1
    while half < num_values:
        pairs = blocks_MK.view(-1, num_values // (2 * half), 2, half)
        first, second = pairs.unbind(2)
        # Sums of two in a fixed order, which a matrix product would not promise.
        blocks_MK = torch.stack((first + second, first - second), dim=2).view(-1, num_values)
        half *= 2
    return blocks_MK / math.sqrt(num_values)


def _signs(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (BLOCK,), generator=generator) * 2.0 - 1.0


@lru_cache
def _table(bits: int) -> tuple[Tensor, Tensor]:
    """Return all levels in ascending order, and the bounds between them. No caller changes
    them."""
    positive = torch.tensor(_LEVELS[bits])
    levels = torch.cat([-positive.flip(0), positive])
    return levels, (levels[1:] + levels[:-1]) / 2
