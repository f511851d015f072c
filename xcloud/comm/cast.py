"""Send a tensor unchanged, or in a shorter floating-point format. Integers: quantize.py.

Shapes: N values of the tensor, in any shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xcloud.base.checks import check_choice
from xcloud.cluster.tensor_spec import TensorSpec
from xcloud.comm.compressor import Family, Feedback, Parts, refuse_integers, wide

_LABELS = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Nothing:
    """The tensor itself, in its own dtype. Wire: the tensor. The part may share its memory."""

    family: ClassVar[Family] = "none"
    feedback: ClassVar[Feedback] = "needless"

    @property
    def label(self) -> str:
        return "none"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (spec,)

    def compress(self, tensor: Tensor) -> Parts:
        refuse_integers(tensor)
        return (tensor.detach(),)

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class Cast:
    """float16 or bfloat16 on the wire.

    float16 values are scaled by a power of two that brings max|x| into [2**14, 2**15): gradients
    of 1e-9 keep all 11 bits, where a plain cast would flush them to zero, and 1e9 does not
    overflow. Values below 2**-29 of the maximum lose bits. Scaling by a power of two leaves the
    mantissa alone, so values that plain float16 can represent give the same result.
    bfloat16 has the range of float32 and needs no exponent.
    NaN stays NaN; an inf stays inf (and, in float16, makes inf of what exceeds 65504).

    Wire, for [*shape]: values [*shape] (2 bytes each); float16 only: exponent int16 [1].
    """

    family: ClassVar[Family] = "precision"
    feedback: ClassVar[Feedback] = "useful"
    dtype: str = "float16"

    def __post_init__(self) -> None:
        check_choice("Cast.dtype", self.dtype, _LABELS)

    @property
    def label(self) -> str:
        return _LABELS[self.dtype]

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        if self.dtype == "bfloat16":
            return (TensorSpec(spec.shape, torch.bfloat16),)
        return (TensorSpec(spec.shape, torch.float16), TensorSpec((1,), torch.int16))

    def compress(self, tensor: Tensor) -> Parts:
        refuse_integers(tensor)
        tensor = tensor.detach()
        if self.dtype == "bfloat16":
            return (tensor.to(torch.bfloat16),)
        if tensor.dtype == torch.float16 or tensor.numel() == 0:
            return (tensor.half(), torch.zeros(1, dtype=torch.int16, device=tensor.device))
        values = tensor.to(wide(tensor.dtype))
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high)
        exponent = torch.frexp(largest).exponent - 15
        # 2**126 is the largest power of two whose inverse is normal in float32.
        exponent = exponent.clamp_(-126).where(largest.isfinite(), 0)
        scaled = values * torch.exp2(-exponent.to(values.dtype))
        return (scaled.half(), exponent.to(torch.int16).view(1))

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        if self.dtype == "bfloat16" or spec.dtype == torch.float16:
            return parts[0].to(spec.dtype)
        values, exponent = parts
        values = values.to(wide(spec.dtype))
        return values.mul_(torch.exp2(exponent[0].to(values.dtype))).to(spec.dtype)
