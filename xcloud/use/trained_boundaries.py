"""The boundaries of a trained run in one process: what would cross two clouds goes through the
compressors that the run ended with. Nothing is sent.
"""

from __future__ import annotations

from torch import Tensor

from xcloud.cluster.frame import TensorSpec
from xcloud.comm.boundary import Message
from xcloud.comm.compressor import Compressor
from xcloud.job.experiment import Experiment


class TrainedBorders:
    """compressed: False leaves the compressors out."""

    def __init__(self, experiment: Experiment, compressed: bool) -> None:
        self._experiment, self._compressed = experiment, compressed

    def carry(self, stage: int, message: Message) -> Message:
        """What arrives behind `stage` of what it sends."""
        compressor = self._compressor(stage)
        if compressor is None:
            return message
        return {
            field.name: _one_way(message[field.name], compressor)
            if field.dtype.is_floating_point
            else message[field.name]
            for field in self._experiment.boundaries[stage].fields
        }

    def _compressor(self, stage: int) -> Compressor | None:
        """What the boundary behind this stage used at the end of training."""
        layout = self._experiment.cluster
        crosses = layout.stage_cloud(stage) != layout.stage_cloud(stage + 1)
        if not (self._compressed and crosses):
            return None
        compression = self._experiment.compression.at_boundary(stage)
        return compression.at(self._experiment.training.max_steps).forward


def _one_way(tensor: Tensor, compressor: Compressor) -> Tensor:
    return compressor.decompress(compressor.compress(tensor), TensorSpec.of(tensor))
