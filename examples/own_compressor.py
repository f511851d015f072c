"""Train with a compressor that is not in xcloud: the sign of each value, and each row's mean size.

    python examples/own_compressor.py [SETTING=VALUE ...]

docs/add-a-compressor.md says what the methods owe.
"""

import os
import sys
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

import xcloud
from xcloud.base.settings import settings
from xcloud.comm.compressor import Compressor, Family, Feedback, refuse_integers
from xcloud.net.frame import Tensors, TensorSpec


@settings("RowSigns")
class RowSigns(Compressor):
    """The sign of each value, scaled by the mean size of its row.

    On the wire, for [R, H]: signs int8 [R, H], scales int32 [R, 1], float32 bits.
    """

    family: ClassVar[Family] = "precision"
    feedback: ClassVar[Feedback] = "needed"
    label: ClassVar[str] = "signs"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        rows = (*spec.shape[:-1], 1) if spec.shape else ()
        return TensorSpec(spec.shape, torch.int8), TensorSpec(rows, torch.int32)

    def compress(self, tensor: Tensor) -> Tensors:
        refuse_integers(tensor)
        wide = tensor.detach().float()
        scale = wide.abs().mean(-1, keepdim=bool(wide.shape))
        return wide.sign().to(torch.int8), scale.view(torch.int32)

    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
        signs, scale = parts
        return (signs.float() * scale.view(torch.float32)).to(spec.dtype)


def main() -> None:
    # Every rank is a process of its own, which imports this file by its name.
    here = str(Path(__file__).parent.absolute())
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    result = xcloud.run(
        "lora_clm",
        "compression=int8",
        "compression.backward={_target_: own_compressor.RowSigns}",
        *sys.argv[1:],
    )
    print(f"perplexity {result.scores['perplexity']:.2f}, {result.bytes_per_step:,} bytes a step")


if __name__ == "__main__":
    main()
