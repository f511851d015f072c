"""The contract between the members of a one-way job and whoever runs them: producers make batches
of integers from their own data, one consumer learns from them. No network, no schedule.

A producer or consumer here is one rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from xcloud.comm.state import Stateful
from xcloud.contracts.model import BuildPlace, NumCut, Scores

COUNTS = ("true_positives", "false_positives", "false_negatives")
SUMS = ("loss_sum", "weight", "samples", "tokens", *COUNTS)
"""What `Consumer.consume` may sum up. `weight` divides `loss_sum` and the gradients. What is left
out counts as 0."""


@dataclass(frozen=True)
class Fed:
    """One batch for one rank of the consumer.

    payload: uint8 [N], packed, all that the consumer gets to know.
    loss: the producer's own mean loss of this batch; reported, not sent.
    """

    payload: Tensor
    num_samples: int
    num_tokens: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class OneWayContext(BuildPlace):
    """The facts that a rank gives to a model that builds its producer or consumer.

    num_steps: the number of updates that the rank will make, as far as is known; a producer's
        until `Producer.replan`.
    producers: the names of the clouds that feed.
    cloud: the cloud of this rank, which is number `group_rank` of the `group_size` ranks of that
        cloud.
    """

    num_steps: int
    producers: Sequence[str] = ()
    cloud: str = ""
    group_size: int = 1


class Producer(Stateful, Protocol):
    """One rank of a cloud that feeds.

    State: what it has learned; batches follow from numbers.
    """

    @property
    def parameters_module(self) -> nn.Module | None:
        """The trained module, its gradients averaged over the cloud's ranks. None: nothing is
        trained."""

    def own_digests(self) -> Mapping[str, str]:
        """Return a digest of each thing that this rank has read, by a name for messages.

        A later attempt at the run must read the same; nobody else is shown them.
        """

    @property
    def num_cut(self) -> NumCut:
        """Return how many of this cloud's texts did not fit, by kind; empty if all did."""

    def produce(self, number: int) -> Fed:
        """Make batch `number` (from 1) of this rank's own stream.

        Adds the gradients of its own mean loss to `.grad`. The same seed and number give the same
        batch whatever other clouds do. Called for every number in turn.
        """

    def replan(self, num_steps: int) -> None:
        """Take the number of updates that this rank will make in all, as planned now.

        It is more than its share when it takes over from another. Called in all ranks of a cloud
        before the update of the same number.
        """

    def update(self, number: int) -> None:
        """Make an optimizer step, once the gradients of batch `number` are averaged."""

    def finish(self, run_dir: Path) -> None:
        """Export what is worth keeping. Called after the last batch, in the first rank of the
        cloud."""


class Consumer(Stateful, Protocol):
    """One rank of the cloud that is fed.

    State, between two steps: what it has learned, and what its evaluation needs of earlier steps.
    """

    @property
    def module(self) -> nn.Module: ...

    def own_digests(self) -> Mapping[str, str]:
        """Return digests as Producer.own_digests does."""

    def consume(self, payloads: Sequence[tuple[int, Tensor]]) -> Mapping[str, float]:
        """Do forward and backward of (number of the producer, payload) pairs.

        Adds gradients of the SUM of the losses to `.grad`; returns sums by the names of SUMS.
        Raises FrameError naming the producer whose payload cannot be used.
        """

    def update(self, step: int, weight: float) -> None:
        """Divide the gradients, summed over the cloud's ranks, by `weight`, and make an optimizer
        step."""

    def skip(self, step: int) -> None:
        """Forget what `consume` noted of a step whose loss or gradient is not finite in some rank.

        Called in place of `update`; parameters stay.
        """

    def export(self, run_dir: Path) -> None:
        """Write what was trained. Called after the last step, in the first rank of the cloud."""

    def evaluate(self) -> Scores:
        """Return scores; nothing is reported without values.

        Called last of all, in the first rank of the cloud, when nobody feeds any more.
        """


@runtime_checkable
class OneWayModel(Protocol):
    """The producers and the consumer of a one-way job, as configured."""

    @property
    def max_payload_bytes(self) -> int:
        """The longest payload of any producer."""

    @property
    def max_positions(self) -> int | None:
        """The tokens of the longest text that the exported encoder can read; None: any."""

    def describe(self) -> str:
        """Return producers, consumer and data in a few words; known without reading anything."""

    @property
    def data(self) -> str:
        """The data that the producers read, as every cloud may know it."""

    def check(self, producers: Sequence[str]) -> None:
        """Raise ConfigError if a cloud has no producer here, or a producer no cloud, and DataError
        if data are missing, as far as that is seen at once."""

    def producer(self, context: OneWayContext) -> Producer: ...

    def consumer(self, context: OneWayContext) -> Consumer: ...

    def leaves(self, run_dir: Path) -> Mapping[str, str]:
        """Return settings of another experiment that make it read what a finished run left."""

    def next_command(self, run_dir: Path) -> str | None:
        """Return a command for what a finished run left, to be copied; None: nothing in
        particular."""
