"""Which cloud holds which stages of a pipeline, and what every layout has: clouds by name, their
ranks numbered through, and what joins them. Pure arithmetic: no torch, no network.

A stage is a part of the model; a rank is a process. Micro-batch i of a stage with n ranks belongs
to its rank i mod n, so clouds of unequal size (8 ranks feeding 64) need no special case.

The whole pipeline may stand several times, in other clouds each time. Of R such replicas,
micro-batch i belongs to replica i mod R, and there to rank (i // R) mod n of the stage.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import (
    LineAddress,
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
    settings,
)
from xcloud.base.wording import check_name
from xcloud.net.link_profile import BUDGET_BYTES, FREE, REAL, SEALED, Liveness, Wan

if TYPE_CHECKING:
    from xcloud.net.transport import Rendezvous, Transport

_NAMED: Mapping[str, Wan] = {"real": REAL, "free": FREE, "sealed": SEALED}
_MAX_PORT = 65_535


@runtime_checkable
class Carrier(Protocol):
    """The carrier of messages between ranks."""

    def transport(self, rendezvous: Rendezvous) -> Transport:
        """Return the transport of the rank that came to this rendezvous. Every rank calls it, once
        all have agreed on what they run."""


@settings("cluster")
class Layout(ABC):
    """All clouds of a run, and the links between them.

    clouds: the clouds by name. Each has num_ranks and a device ("auto", "cpu" or "cuda").
    wan: LinkProfile = an emulated link between every pair of clouds; "real" = leave the network
        alone; "free" = no limit (messages are still framed, compressed and counted); "sealed" =
        sealed lines between the clouds of several owners, each started by `xcloud join`.
    links: a LinkProfile for a pair of clouds that differs, by the name "a-b" or "b-a".
    liveness: limits after which a rank that is silent outside a training step counts as lost.
    link_budget_bytes: bytes that the posted receives of one direction between two ranks may fill,
        and the queue at each of its ends. Three receives are always posted, and the queues always
        have room for all micro-batches that wait for a gradient under the schedule. An evaluation,
        and training over a boundary that no gradient crosses, is blocked instead.
    carrier: the transport of messages, also inside a cloud. None: gloo (gloo_link.py).
    reconnect_s: seconds that a sealed line may be down before the run ends.
    name: name of the layout in run folders and reports.
    """

    clouds: Mapping[str, Any]
    wan: Wan | Literal["real", "free", "sealed"] = "real"
    links: Mapping[str, Wan | Literal["real", "free"]] = field(default_factory=dict)
    name: str = "cluster"
    liveness: Liveness = field(default_factory=Liveness)
    link_budget_bytes: Positive = BUDGET_BYTES
    carrier: Carrier | None = None
    reconnect_s: PositiveFloat = 120.0

    def _check_clouds(self) -> None:
        if not self.clouds:
            raise ConfigError("cluster.clouds must name at least one cloud")
        for name in self.clouds:
            check_name("a cloud in cluster.clouds", name=name, spoken=True)

    def _check_links(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Raise ConfigError unless every key of `links` names one pair of clouds.

        pairs: pairs of clouds that have a link.
        """
        # Each pair once, whichever way round.
        pairs = sorted({(min(pair), max(pair)) for pair in pairs})
        for key in self.links:
            # Names may hold a dash: "a-b-c" could be a-b and c, or a and b-c.
            meant = [(a, b) for a, b in pairs if key in (f"{a}-{b}", f"{b}-{a}")]
            if not meant:
                names = ", ".join(f"{a}-{b}" for a, b in pairs) or "none here"
                raise ConfigError(f"cluster.links.{key}: name a pair of clouds, one of {names}")
            if len(meant) > 1:
                both = " and ".join(f"{a!r} and {b!r}" for a, b in meant)
                raise ConfigError(
                    f"cluster.links.{key} names more than one pair of clouds: {both}; give these "
                    "clouds names without a common part"
                )

    @property
    def prices(self) -> dict[str, Price]:
        """The prices of the clouds that have any."""
        prices = {name: getattr(cloud, "price", None) for name, cloud in self.clouds.items()}
        return {name: price for name, price in prices.items() if price is not None}

    @property
    def between_owners(self) -> bool:
        """Return whether clouds have several owners: sealed lines or a mailbox lie between."""
        return (_NAMED[self.wan] if isinstance(self.wan, str) else self.wan).between_owners

    @property
    def is_on_one_machine(self) -> bool:
        """Return whether one machine plays all clouds: no line between them is a real one."""
        wans = (self.wan, *self.links.values())
        return all((_NAMED[wan] if isinstance(wan, str) else wan).has_numbers for wan in wans)

    @property
    def num_ranks(self) -> int:
        return sum(cloud.num_ranks for cloud in self.clouds.values())

    @property
    def num_processes(self) -> int:
        """The number of processes that hold the ranks: one each, or one for all of them."""
        return self.num_ranks

    @cached_property
    def _ranks_in(self) -> dict[str, tuple[int, ...]]:
        found = dict[str, tuple[int, ...]]()
        first = 0
        for name, cloud in self.clouds.items():
            found[name] = tuple(range(first, first + cloud.num_ranks))
            first += cloud.num_ranks
        return found

    @property
    def crosses_clouds(self) -> bool:
        return len(self.clouds) > 1

    def ranks_in(self, cloud: str) -> tuple[int, ...]:
        if cloud not in self._ranks_in:
            raise ConfigError(f"there is no cloud {cloud!r} among {', '.join(self.clouds)}")
        return self._ranks_in[cloud]

    def cloud_of(self, rank: int) -> str:
        for name, ranks in self._ranks_in.items():
            if rank in ranks:
                return name
        raise ConfigError(f"rank {rank} is not in this layout of {self.num_ranks} ranks")

    @abstractmethod
    def placement(self, rank: int) -> Any:
        """Return where a rank stands: its `cloud`, and what else the kind of layout says."""

    def wan_of(self, here: str, there: str) -> Wan:
        """Return the line between two clouds."""
        # Either way round; the general line where a pair has none of its own.
        wan = self.links.get(f"{here}-{there}", self.links.get(f"{there}-{here}", self.wan))
        return _NAMED[wan] if isinstance(wan, str) else wan

    def wan_between(self, rank: int, peer: int) -> Wan | None:
        """Return the line between two ranks; None if they are in one cloud."""
        here = self.cloud_of(rank)
        there = self.cloud_of(peer)
        if here == there or not self.crosses_clouds:
            return None
        return self.wan_of(here, there)

    def overdue_s(self, rank: int, peer: int, num_bytes: int) -> float:
        """Return how long `rank` waits for `num_bytes` from `peer` before calling it silent."""
        overdue_after_s = self.liveness.overdue_after_s
        wan = self.wan_between(rank, peer)
        if wan is None:
            return overdue_after_s
        # A slow line takes its time for so many bytes, which is no silence.
        return overdue_after_s + wan.allowance_s(num_bytes)

    def describe(self) -> str:
        if not self.crosses_clouds:
            return f"one cloud ({self._described}), no link between clouds"
        return f"{len(self.clouds)} clouds ({self._described}), link: {self.describe_link()}"

    @property
    @abstractmethod
    def _described(self) -> str:
        """The clouds and what each does, in words."""

    def describe_link(self) -> str:
        if not self.crosses_clouds:
            return "none"
        named = {"": self.wan, **self.links}
        wans = {pair: _NAMED[wan] if isinstance(wan, str) else wan for pair, wan in named.items()}
        return "; ".join(f"{pair} {wan.describe()}".lstrip() for pair, wan in wans.items())


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[::1]:port". Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    # An IPv6 address without brackets has no end that could be told from its port.
    elif ":" in host:
        raise ValueError(address)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= _MAX_PORT:
        raise ValueError(address)
    return host, int(port)


def _checked_address(where: str, address: str) -> int:
    """Return the port of an address. Raises ConfigError naming the setting `where`."""
    try:
        return host_and_port(address)[1]
    except ValueError:
        raise ConfigError(
            f"{where} is {address!r}, but must be HOST:PORT, such as 192.0.2.7:7000"
        ) from None


def check_machines(num_ranks: int, num_machines: int, where: str) -> None:
    """Raise ConfigError unless each machine of a cloud gets as many of its ranks. where: the
    setting that says how many machines there are."""
    if num_ranks % num_machines:
        raise ConfigError(
            f"{where}: {num_ranks} ranks cannot be dealt evenly to {num_machines} machines"
        )


def num_ranks_in_words(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


@settings("price")
class Price:
    """The prices of a cloud, in any currency; a run's summary then has its cost. Plans for clouds
    that one does not have call them rank_hour and egress_per_gb.

    hour: price of an hour of one rank.
    gb_out: price of a GB (10^9 bytes) that leaves the cloud.
    """

    hour: NotNegativeFloat = 0.0
    gb_out: NotNegativeFloat = 0.0


@settings("cloud")
class Cloud:
    """A cloud. Every rank holds all of the cloud's stages, or, with one_stage_per_rank, the ranks
    are assigned to the stages in order (first the ranks of the first stage).

    stages: numbers of the stages that live here; None = the cloud's own position in its replica.
    device: "auto" takes a GPU where there is one.
    slowdown: 4 = the cloud's ranks compute four times as long as this machine needs (a user's own
        weak device, emulated: they sleep after each piece of work). Compressing is not slowed.
    shard: distribute parameters, gradients and moments of each stage over its ranks, so that none
        holds a stage whole while it trains (FSDP2).
    replica: number of the copy of the pipeline that this cloud is a part of.
    num_ranks: number of processes of this cloud.
    one_stage_per_rank: True to assign each rank to one stage instead of all. num_ranks is then a
        multiple of the number of stages.
    address: HOST:PORT at which other owners' clouds reach this one's first rank; the next rank is
        at PORT + 1, and so on (cluster/wan=sealed). If the cloud has several machines: a list with
        the address of the first rank on each. A cloud without an address dials the others.
    price: {hour: …, gb_out: …} of this cloud. None: its cost is not counted.
    """

    num_ranks: Positive = 1
    stages: Annotated[Sequence[NotNegative], Field(min_length=1)] | None = None
    one_stage_per_rank: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    slowdown: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0
    shard: bool = False
    replica: NotNegative = 0
    address: LineAddress | Annotated[Sequence[LineAddress], Field(min_length=1)] | None = None
    price: Price | None = None

    def __post_init__(self) -> None:
        if self.stages is not None:
            # Compared and hashed, so a list would not do.
            object.__setattr__(self, "stages", tuple(self.stages))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all its machines; none where it dials."""
        if self.address is None:
            return ()
        return (self.address,) if isinstance(self.address, str) else tuple(self.address)


@dataclass(frozen=True)
class Placement:
    """The cloud, stages and replica of a rank."""

    rank: int
    cloud: str
    stages: tuple[int, ...]
    replica: int = 0


@settings("cluster")
class ClusterLayout(Layout):
    """The clouds that hold the stages of a pipeline, each stage once in every replica.

    relay: HOST:PORT of an `xcloud relay` that clouds of two owners dial, of which neither has an
        address (cluster/wan=sealed).
    """

    clouds: Mapping[str, Cloud]
    relay: LineAddress | None = None

    def __post_init__(self) -> None:
        self._check_clouds()
        self._check_links((a, b) for a in self.clouds for b in self.clouds if a < b)
        resolved: dict[str, Cloud] = {}
        held: dict[int, list[int]] = {}  # stages, by replica
        for name, cloud in self.clouds.items():
            # A cloud without stages takes those of its position in its replica.
            position = sum(other.replica == cloud.replica for other in resolved.values())
            stages = (position,) if cloud.stages is None else tuple(cloud.stages)
            if cloud.one_stage_per_rank and cloud.num_ranks % len(stages):
                raise ConfigError(
                    f"cluster.clouds.{name}: {cloud.num_ranks} ranks cannot be dealt evenly to "
                    f"{len(stages)} stages; make num_ranks a multiple of {len(stages)}"
                )
            resolved[name] = replace(cloud, stages=stages)
            held.setdefault(cloud.replica, []).extend(stages)
        # The object is frozen; stages are known only once all clouds are.
        object.__setattr__(self, "clouds", resolved)
        if sorted(held) != list(range(len(held))):
            raise ConfigError(
                f"cluster.clouds.*.replica must count the replicas from 0 on, got {sorted(held)}"
            )
        for number, stages_held in held.items():
            if sorted(stages_held) != list(range(len(held[0]))):
                where = f" in replica {number}" if len(held) > 1 else ""
                raise ConfigError(
                    f"cluster.clouds must hold every stage from 0 on exactly once{where}, got "
                    f"{sorted(stages_held)}"
                )
        self._check_addresses()

    def address_of(self, rank: int) -> tuple[str, int] | None:
        """Return the host and port at which this rank listens for other clouds; None where its
        cloud has no address."""
        name = self.cloud_of(rank)
        cloud = self.clouds[name]
        if not cloud.addresses:
            return None
        # A cloud of several machines has as many ranks on each.
        ranks_a_machine = cloud.num_ranks // len(cloud.addresses)
        machine, number = divmod(rank - self.ranks_in(name)[0], ranks_a_machine)
        host, port = host_and_port(cloud.addresses[machine])
        return host, port + number

    def listener_of(self, here: str, there: str) -> str:
        """Return which of two clouds listens, while the other dials: the one with an address, of
        two with one the first in cluster.clouds."""
        named = [name for name in self.clouds if name in (here, there)]
        # Both ends must choose alike, so the order of the file decides.
        return next((name for name in named if self.clouds[name].addresses), named[0])

    def _check_addresses(self) -> None:
        """Raise ConfigError for an address that cannot be, and for settings without meaning where
        clouds have several owners."""
        given = {name: cloud.addresses for name, cloud in self.clouds.items() if cloud.addresses}
        if self.relay is not None:
            if self.wan != "sealed":
                raise ConfigError("cluster.relay is for sealed lines: set cluster/wan=sealed")
            _checked_address("cluster.relay", address=self.relay)
        for name, addresses in given.items():
            where = f"cluster.clouds.{name}.address"
            if self.wan != "sealed":
                raise ConfigError(f"{where} is for sealed lines: set cluster/wan=sealed")
            check_machines(self.clouds[name].num_ranks, num_machines=len(addresses), where=where)
            for address in addresses:
                port = _checked_address(where, address)
                # Each rank listens at a port of its own, counted from the first.
                last = port + self.clouds[name].num_ranks // len(addresses) - 1
                if last > _MAX_PORT:
                    raise ConfigError(
                        f"{where}: its ranks listen at ports {port} to {last}, of which the "
                        f"highest may be {_MAX_PORT}"
                    )
        if not self.between_owners:
            return
        if not self.crosses_clouds:
            raise ConfigError(
                "cluster/wan=sealed or mailbox joins several clouds, and there is one here"
            )
        if self.links or self.carrier is not None:
            raise ConfigError(
                "cluster/wan=sealed or mailbox takes neither cluster.links nor cluster.carrier"
            )
        if self.wan != "sealed":
            return
        # Whoever waits for a message must not give up before the line is given up: its end is what
        # can be mended.
        if self.reconnect_s >= self.liveness.overdue_after_s:
            raise ConfigError(
                f"cluster.reconnect_s ({self.reconnect_s:g}) must be below "
                f"cluster.liveness.overdue_after_s ({self.liveness.overdue_after_s:g}), or a "
                "message is overdue before the line is given up"
            )

    def check_lines(self) -> None:
        """Raise ConfigError for a sealed line of which neither end can be reached. Called once
        each cloud has its replica and its stages."""
        if self.wan != "sealed":
            return
        # Only now are stages and replicas known, so which lines there are.
        relayed = [pair for pair in self.lines if self.is_relayed(*pair)]
        if self.relay is None and relayed:
            here, there = relayed[0]
            raise ConfigError(
                f"there is a line between clouds {here!r} and {there!r}, so one of them must "
                f"say where the other reaches it: cluster.clouds.{here}.address=HOST:PORT; or "
                "both dial a relay: cluster.relay=HOST:PORT"
            )
        if self.relay is not None and not relayed:
            raise ConfigError(
                "cluster.relay joins clouds without an address, and every line here has a cloud "
                "with one: remove cluster.relay"
            )

    def is_relayed(self, here: str, there: str) -> bool:
        """Return whether the line between two clouds needs a relay: neither has an address."""
        return not (self.clouds[here].addresses or self.clouds[there].addresses)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Return the pairs of clouds between which messages go.

        The first cloud has a line to each other one. In a replica neighbouring stages have one, so
        have both ends, whose weights may be tied, and the first cloud and each other one, which
        sum the norm. Clouds with the same stage in several replicas average.
        """
        first, *others = self.clouds
        found = [(first, other) for other in others]
        stages = range(self.num_stages)
        for replica in range(self.num_replicas):
            in_turn = [self.stage_cloud(stage, replica) for stage in stages]
            leader = self.cloud_of(self.leaders(replica)[0])
            # Neighbouring stages, and both ends.
            found += [*pairwise(in_turn), (in_turn[0], in_turn[-1])]
            # Sums of the norm go through the leader of the replica.
            found += [(leader, other) for other in in_turn]
        for stage in stages:
            # The holders of a stage in all replicas average with each other.
            holders = [self.stage_cloud(stage, replica) for replica in range(self.num_replicas)]
            found += combinations(holders, 2)
        return [(here, there) for here, there in found if here != there]

    def lines_of(self, cloud: str) -> list[str]:
        """Return the clouds to which one has a line."""
        pairs = [pair for pair in self.lines if cloud in pair]
        return [*dict.fromkeys(there for pair in pairs for there in pair if there != cloud)]

    @property
    def num_replicas(self) -> int:
        return 1 + max(cloud.replica for cloud in self.clouds.values())

    @property
    def num_stages(self) -> int:
        return sum(len(c.stages or ()) for c in self.clouds.values() if c.replica == 0)

    def placement(self, rank: int) -> Placement:
        name = self.cloud_of(rank)
        cloud = self.clouds[name]
        ranks = self.ranks_in(name)
        stages = tuple(cloud.stages or ())
        if cloud.one_stage_per_rank:
            # Ranks are dealt to stages in order: the first ones to the first stage.
            per_stage = cloud.num_ranks // len(stages)
            stages = (stages[(rank - ranks[0]) // per_stage],)
        return Placement(rank, cloud=name, stages=stages, replica=cloud.replica)

    def ranks_of(self, stage: int, replica: int = 0) -> tuple[int, ...]:
        """Return the ranks that hold this stage in one replica, in order."""
        return self._ranks_of.get((stage, replica), ())

    @cached_property
    def _ranks_of(self) -> dict[tuple[int, int], tuple[int, ...]]:
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for place in map(self.placement, range(self.num_ranks)):
            for key in ((stage, place.replica) for stage in place.stages):
                found[key] = (*found.get(key, ()), place.rank)
        return found

    def replicas_of(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that hold this stage, by replica: all of them train the same
        weights."""
        return tuple(self.ranks_of(stage, replica=replica) for replica in range(self.num_replicas))

    def owner(self, stage: int, micro_batch: int) -> int:
        """Return the rank that computes this micro-batch of this stage."""
        # Micro-batches go to the replicas in turn, within one to the ranks of the stage.
        turn, replica = divmod(micro_batch, self.num_replicas)
        ranks = self.ranks_of(stage, replica=replica)
        return ranks[turn % len(ranks)]

    def turn(self, stage: int, rank: int) -> tuple[int, int]:
        """Return (first, period): of this stage, `rank`, which holds it, computes the
        micro-batches first, first + period, ..."""
        replica = self.placement(rank).replica
        ranks = self.ranks_of(stage, replica=replica)
        return replica + self.num_replicas * ranks.index(rank), self.num_replicas * len(ranks)

    def stage_cloud(self, stage: int, replica: int = 0) -> str:
        return self.cloud_of(self.ranks_of(stage, replica=replica)[0])

    def leaves_cloud(self, stage: int) -> bool:
        """Return whether the boundary after `stage` joins two clouds in any replica."""
        return any(
            self.stage_cloud(stage, replica) != self.stage_cloud(stage + 1, replica)
            for replica in range(self.num_replicas)
        )

    @property
    def lanes_in_step(self) -> int:
        """The number that micro-batches must be a multiple of, where ranks compute in step."""
        # Ranks of a sharded stage exchange parameters in every micro-batch, so all of them need
        # one at the same time.
        sharded = [cloud for cloud in self.clouds.values() if cloud.shard]
        held = [
            self.ranks_of(stage, replica=c.replica) for c in sharded for stage in c.stages or ()
        ]
        return math.lcm(*map(len, held))

    def rank_period(self, stage: int) -> int:
        """Return the period with which micro-batches meet the same ranks on both sides of the
        boundary after `stage`: i and i + rank_period do."""
        # After the lcm both sides are back at the same pair of ranks.
        both = (*self.replicas_of(stage), *self.replicas_of(stage + 1))
        return self.num_replicas * math.lcm(*(len(ranks) for ranks in both))

    @cached_property
    def num_lanes(self) -> int:
        """The number of micro-batches that a stage computes side by side: i and i + num_lanes meet
        the same rank in every stage, so each residue is a pipeline of its own."""
        held = (len(r) for stage in range(self.num_stages) for r in self.replicas_of(stage))
        return self.num_replicas * math.lcm(*held)

    def leader_of(self, replica: int = 0) -> tuple[int, ...]:
        """Return the first rank of every stage of a replica, by stage."""
        return tuple(self.ranks_of(stage, replica=replica)[0] for stage in range(self.num_stages))

    def leaders(self, replica: int = 0) -> tuple[int, ...]:
        """Return the first ranks of a replica's stages, each once: they speak for their stages
        across clouds."""
        return tuple(sorted({*self.leader_of(replica)}))

    def min_micro_batches(self) -> int:
        """Return the number of micro-batches below which a rank has no work."""
        return max(
            # The last rank of a stage gets its first micro-batch behind those of all ranks before
            # it, in all replicas.
            (len(ranks) - 1) * self.num_replicas + replica + 1
            for stage in range(self.num_stages)
            for replica, ranks in enumerate(self.replicas_of(stage))
        )

    @property
    def _described(self) -> str:
        return ", ".join(
            f"{name}: {num_ranks_in_words(cloud.num_ranks)}, "
            f"stage{'s' * (len(cloud.stages or ()) > 1)} {'+'.join(map(str, cloud.stages or ()))}"
            + (f" of replica {cloud.replica}" if self.num_replicas > 1 else "")
            + (f", {cloud.slowdown:g}x slower" if cloud.slowdown > 1 else "")
            + (", sharded" if cloud.shard else "")
            for name, cloud in self.clouds.items()
        )
