"""Which clouds feed which in a one-way job. Pure arithmetic: no torch, no network.

A producer is a cloud that feeds, the consumer the one that is fed. Ranks are numbered through the
consumer first, then the producers in order: rank 0 keeps the record of the run, and no producer's
end may take it away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, PositiveFloat, settings
from xcloud.layout import Layout, Price, num_ranks_in_words


@settings("cloud")
class OneWayCloud:
    """A cloud of a one-way job: a producer, or the consumer.

    share: how much of the consumer's batches comes from here, in proportion to the shares of
    the other producers; None makes this cloud the consumer.
    num_ranks: the number of processes of this cloud, which share its batches.
    device: auto takes a GPU where there is one.
    price: {hour: …, gb_out: …} of this cloud; None: its cost is not counted.
    """

    num_ranks: Positive = 1
    share: PositiveFloat | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    price: Price | None = None


@dataclass(frozen=True)
class OneWayPlacement:
    """The place of a rank in a one-way job.

    producer: the number of its cloud among the producers; None in the consumer.
    group_rank: its number among the group_size ranks of its cloud.
    """

    rank: int
    cloud: str
    producer: int | None
    group_rank: int
    group_size: int


@settings("cluster")
class OneWayLayout(Layout):
    """Clouds of which one is fed by all others.

    form: clouds = each in its own place, joined by `wan`; one_cloud = the same ranks and the same
        work on a free link; local = the same ranks in turn, in one process (one for each cloud).
    """

    clouds: Mapping[str, OneWayCloud]
    name: str = "one_way"
    form: Literal["clouds", "one_cloud", "local"] = "clouds"

    def __post_init__(self) -> None:
        self._check_clouds()
        if self.between_owners:
            raise ConfigError(
                "cluster/wan=sealed and mailbox are for pipelines; this is a one-way job: choose "
                "cluster/wan=real, over a VPN between clouds that trust each other"
            )
        consumers = [name for name, cloud in self.clouds.items() if cloud.share is None]
        if len(consumers) != 1:
            raise ConfigError(
                "cluster.clouds must have exactly one cloud that is fed (share: null); got "
                f"{', '.join(consumers) or 'none'} of {', '.join(self.clouds)}"
            )
        if len(self.clouds) == 1:
            raise ConfigError("cluster.clouds has no cloud that feeds: give one a share above 0")
        if self.form == "local" and any(cloud.num_ranks > 1 for cloud in self.clouds.values()):
            raise ConfigError(
                "cluster.form=local does the work of one rank of each cloud; set num_ranks of "
                "every cloud to 1, or take cluster.form=one_cloud"
            )
        # A dict keeps the place of a key's first appearance: the consumer moves to the front, and
        # with it rank 0, whichever line of the YAML it stands in.
        ordered = {consumers[0]: self.clouds[consumers[0]], **self.clouds}
        object.__setattr__(self, "clouds", ordered)
        self._check_links((name, self.consumer) for name in self.producers)

    @property
    def num_processes(self) -> int:
        return 1 if self.form == "local" else self.num_ranks

    @property
    def consumer(self) -> str:
        """The name of the cloud that is fed."""
        return next(iter(self.clouds))

    @property
    def producers(self) -> tuple[str, ...]:
        """The names of the clouds that feed."""
        return tuple(self.clouds)[1:]

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each producer; they add up to 1."""
        shares = [self.clouds[name].share or 0.0 for name in self.producers]
        return tuple(share / sum(shares) for share in shares)

    @property
    def num_consumers(self) -> int:
        """The number of ranks of the consumer, which are the first ranks of the job."""
        return self.clouds[self.consumer].num_ranks

    @cached_property
    def sources(self) -> tuple[range, ...]:
        """The ranks of each producer, by their number among those that feed."""
        first = self.num_consumers
        ranks = map(self.ranks_in, self.producers)
        return tuple(range(own[0] - first, own[-1] - first + 1) for own in ranks)

    @cached_property
    def producer_of(self) -> tuple[int, ...]:
        """The producer of each source."""
        return tuple(p for p, sources in enumerate(self.sources) for _ in sources)

    def placement(self, rank: int) -> OneWayPlacement:
        name = self.cloud_of(rank)
        source = rank - self.num_consumers
        ranks = self.ranks_in(name)
        producer = None if source < 0 else self.producer_of[source]
        return OneWayPlacement(
            rank,
            cloud=name,
            producer=producer,
            group_rank=ranks.index(rank),
            group_size=len(ranks),
        )

    @property
    def crosses_clouds(self) -> bool:
        return self.form == "clouds"

    def describe(self) -> str:
        if self.form == "local":
            return f"one process ({self._described})"
        return super().describe()

    @property
    def _described(self) -> str:
        feeding = ", ".join(
            f"{name} ({num_ranks_in_words(self.clouds[name].num_ranks)}, {100 * share:.0f} %)"
            for name, share in zip(self.producers, self.shares, strict=True)
        )
        return f"{feeding} feed {self.consumer} ({num_ranks_in_words(self.num_consumers)})"
