"""Where contributions to an averaging leave and enter a cloud: noise on what leaves, notes for the
leak meter on what comes. What the noise guarantees is security/privacy.py's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from xcloud.comm.state import State
from xcloud.parallel.averaging import Aggregators, AllToAll, Averager, Watch
from xcloud.security.privacy import CloudPrivacy, clip_factor, noise_like


@dataclass(frozen=True)
class AveragingGuard:
    """privacy: of what this rank sends. watch: told of each contribution that comes."""

    privacy: CloudPrivacy | None = None
    watch: Watch | None = None

    def around(
        self,
        averager: AllToAll | Aggregators,
        names: Collection[str],
        num_parts: int,
        silent: Collection[str] = (),
    ) -> Averager:
        """See PrivateAverager."""
        averager.watch = self.watch
        if self.privacy is None:
            return averager
        return PrivateAverager(averager, names, self.privacy, num_parts, silent)


class PrivateAverager:
    """An Averager. names: of the tensors. num_parts: messages that together are one contribution
    of a cloud. silent: names that are not told at all: zero is sent (or nan, where they are not
    finite).

    Noise comes before the encoder, so its residual is of noised values and tells nothing more.
    """

    def __init__(
        self,
        averager: Averager,
        names: Collection[str],
        privacy: CloudPrivacy,
        num_parts: int,
        silent: Collection[str] = (),
    ) -> None:
        self._averager, self._names, self._silent = averager, list(names), set(silent)
        self._limit = privacy.clip / math.sqrt(num_parts)
        self._deviation = privacy.clip * privacy.noise
        # Not drawn from the run's seed: the other clouds know that one too.
        self._chance = np.random.default_rng()

    @property
    def max_bytes(self) -> int:
        return self._averager.max_bytes

    def start(self, step: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
        told = [t for n, t in zip(self._names, tensors, strict=True) if n not in self._silent]
        factor = clip_factor(told, self._limit)
        self._averager.start(
            step,
            [
                0 * tensor if name in self._silent else self._noised(tensor * factor)
                for name, tensor in zip(self._names, tensors, strict=True)
            ],
            weight,
        )

    def finish(self, step: int) -> list[Tensor]:
        return self._averager.finish(step)

    def state_dict(self) -> State:
        return self._averager.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._averager.load_state_dict(state)

    def _noised(self, tensor: Tensor) -> Tensor:
        if not self._deviation:
            return tensor
        return tensor + noise_like(tensor, self._deviation, self._chance)
