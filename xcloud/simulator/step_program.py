"""Build the program of a pipeline's step: what every rank does, and which messages join them.

It is for the engine, without costs; prediction.py runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from typing import NamedTuple

from xcloud.base.errors import ConfigError
from xcloud.layout import ClusterLayout
from xcloud.pipeline.schedule import Action, Schedule, rank_actions, split_backwards
from xcloud.simulator import engine
from xcloud.simulator.costs import NORM, Costs, TransferCost


class Op(NamedTuple):
    """An operation of a rank.

    what: the name of the operation in the record of a real step, or one of MARKS, which take no
        time.
    action: the action of a forward, backward or weights operation; else None.
    """

    what: str
    action: Action | None = None
    received: TransferCost | None = None
    sent: TransferCost | None = None


class Route(NamedTuple):
    here: str
    there: str


MARKS = ("arrive", "answer", "shared")


class StepProgram:
    """The program of a step.

    agrees: one rank of each stage sends rank 0 its gradient norm and waits for the sum, as in
        training (pipeline/trainer.py).
    num_passes: the number of passes over the schedule for one update (gradient accumulation).
    num_steps: the number of steps in a row, of which the last is the prediction. A rank may begin
        one while others still end the one before. 1 = all ranks begin at once.
    without_gradient: the boundaries (numbers of the stage before) over which no gradient returns.
    without_rows: the boundaries over which nothing is sent forward, either.

    Raises ValueError, here or when it is run, if the schedule deadlocks.
    """

    def __init__(
        self,
        schedule: Schedule,
        layout: ClusterLayout,
        *,
        agrees: bool = False,
        num_passes: int = 1,
        num_steps: int = 1,
        without_gradient: Container[int] = (),
        without_rows: Container[int] = (),
    ) -> None:
        if layout.num_replicas > 1:
            raise ConfigError(
                f"the simulator knows one pipeline, and this layout has {layout.num_replicas} "
                "replicas of it: what they average is not modelled; simulate one of them"
            )
        self.schedule = schedule
        self.layout = layout
        self.num_stages = layout.num_stages
        self.num_passes = num_passes
        self.num_steps = num_steps
        self._without = {"forward": without_rows, "backward": without_gradient}
        self.placements = [layout.placement(rank) for rank in range(layout.num_ranks)]
        # Of one step; the program repeats it.
        self.ops: list[list[Op]] = [[] for _ in self.placements]
        self.transfers: list[TransferCost] = []  # by parcel
        self.routes: list[Route] = []
        self._one = engine.Program.for_ranks(layout.num_ranks)
        self._route_of: dict[tuple[str, str] | tuple[int, int], int] = {}
        orders = self._orders()
        self._deferred = {stage for order in orders for stage, _ in split_backwards(order)}
        # The token of rank 0 for all other norms; -1 where there is nobody to agree with.
        self._told = -1
        self._carried: dict[int, int] = {}
        if agrees:
            others = {*self.layout.leader_of()} - {0}
            self._told = self._one.token(len(others)) if others else -1
        self._build_passes(orders)
        self._build_update(agrees)
        # A rank may begin a step while others still end the one before, so a steady step is read
        # off the last of several.
        self.program = self._one.repeated(num_steps, self._carried)

    def parts_s(self, costs: Costs, rank: int, op: Op) -> tuple[float, float, float]:
        """Return the seconds of decompressing, of the operation itself, and of compressing."""
        if op.action is None:
            if op.what in MARKS:
                return 0.0, 0.0, 0.0
            what = "norm" if op.what == "clip" else op.what
            return 0.0, costs.update_s(what, rank=rank, stages=self.placements[rank].stages), 0.0
        before = costs.direction(op.received).decompress_s if op.received is not None else 0.0
        behind = costs.direction(op.sent).compress_s if op.sent is not None else 0.0
        own_s = costs.action_s(rank, action=op.action)
        # Costs name the whole backward; where weights come later, that part is an operation of its
        # own.
        if op.what == "backward" and op.action.stage in self._deferred:
            own_s -= costs.action_s(rank, action=op.action._replace(kind="weights"))
        return before, own_s, behind

    def owner(self, stage: int, micro_batch: int) -> int:
        """Return the rank that computes a micro-batch of the schedule at a stage."""
        ranks = self.layout.ranks_of(stage)
        return ranks[micro_batch % self.schedule.num_micro_batches % len(ranks)]

    def _orders(self) -> list[list[Action]]:
        """Return the actions of every rank in one pass."""
        schedule = self.schedule.for_lanes(self.num_stages, num_lanes=self.layout.num_lanes)
        orders: list[list[Action]] = [[] for _ in self.placements]
        for stages in dict.fromkeys(placement.stages for placement in self.placements):
            # In one go for all ranks that hold the same stages: what each takes is dealt out.
            alone = {stage: (0, 1) for stage in stages}
            order = rank_actions(
                schedule, stages=sorted(stages), num_stages=self.num_stages, turn_of=alone
            )
            for action in order:
                if action.kind != "forward" and action.stage in self._without["backward"]:
                    continue
                orders[self.owner(action.stage, micro_batch=action.micro_batch)].append(action)
        every = range(self.num_stages)
        # What the window before has begun, where updates overlap.
        begun = {a for s in every for a in schedule.begun(s, num_stages=self.num_stages)}
        for actions in orders:  # what a rank waits for in itself is no message
            done = set(begun)
            for action in actions:
                before = {"backward": "forward", "weights": "backward"}.get(action.kind)
                if before and action._replace(kind=before) not in done:  # type: ignore[arg-type]
                    raise self.deadlock()
                done.add(action)
        return orders

    def deadlock(self) -> ValueError:
        return ValueError(
            f"{self.schedule.label} with {self.num_stages} stages deadlocks: a stage waits for "
            "a message that it would send later"
        )

    def _build_passes(self, orders: list[list[Action]]) -> None:
        m = self.schedule.num_micro_batches
        # A token for each message, made by whichever of its two ends is built first.
        tokens = defaultdict[TransferCost, int](self._one.token)
        needed = set[TransferCost]()
        posted = set[TransferCost]()
        for first in range(0, self.num_passes * m, m):
            for rank, actions in enumerate(orders):
                if actions:
                    self._add(rank, op=Op("fetch"))
                # Where updates overlap a stage tells its norm as soon as the gradient is whole.
                own = [
                    i for i, a in enumerate(actions) if a.kind != "forward" and a.micro_batch < m
                ]
                told_at = max(own, default=-1) + 1 if self.schedule.overlaps_updates else -1
                for index, action in enumerate(actions):
                    if index == told_at:
                        self._tell_norm(rank)
                    kind = action.kind
                    stage = action.stage
                    received = self._transfer(stage - (kind == "forward"), action, first)
                    sent = self._transfer(stage - (kind == "backward"), action, first)
                    need = -1 if received is None else tokens[received]
                    posts = () if sent is None else (self._post(sent, token=tokens[sent]),)
                    needed |= {received} - {None}  # type: ignore[arg-type]
                    posted |= {sent} - {None}  # type: ignore[arg-type]
                    named = action._replace(micro_batch=first + action.micro_batch)
                    self._add(
                        rank,
                        op=Op(what=kind, action=named, received=received, sent=sent),
                        need=need,
                        posts=posts,
                    )
                if actions and told_at == len(actions):
                    self._tell_norm(rank)
        # What is sent in one window and received in the next, of whose update it is.
        for early in posted - needed:
            at_last = early._replace(micro_batch=early.micro_batch - m)
            self._carried[tokens[early]] = tokens[at_last]

    def _tell_norm(self, rank: int) -> None:
        """Let the leader of a stage send rank 0 the norm of its gradient."""
        if self._told >= 0 and rank and rank in self.layout.leader_of():
            transfer = TransferCost(
                direction=NORM, boundary=-1, micro_batch=0, sender=rank, receiver=0
            )
            told = self._post(transfer, token=self._told)
            self._add(rank, op=Op("arrive"), posts=(told,))

    def _build_update(self, agrees: bool) -> None:
        gathered: dict[tuple[int, ...], int] = {}
        for placement in self.placements:
            mates = self.layout.ranks_of(placement.stages[0])
            if len(mates) > 1:
                if mates not in gathered:
                    gathered[mates] = self._one.token(len(mates))
                # An all-reduce begins once the last of a stage's ranks has arrived.
                self._add(placement.rank, op=Op("arrive"), signal=gathered[mates])
                self._add(placement.rank, op=Op("average"), need=gathered[mates])
            self._add(placement.rank, op=Op("clip"))
        if agrees:
            self._build_agreement()
        for placement in self.placements:
            self._add(placement.rank, op=Op("optimizer"))

    def _build_agreement(self) -> None:
        """Let leaders send to rank 0, rank 0 answer, and leaders pass the answer on."""
        program = self._one
        leader_of = [self.layout.ranks_of(p.stages[0])[0] for p in self.placements]
        others = sorted({*self.layout.leader_of()} - {0})
        # Two hops, as in a run: rank 0 to the leader of each stage, the leader to its mates.
        answers = {leader: program.token() for leader in others}
        shared = {leader: program.token() for leader in set(leader_of)}
        if not self.schedule.overlaps_updates:
            for leader in others:
                self._tell_norm(leader)
        answered = tuple(
            self._post(
                TransferCost(
                    direction=NORM, boundary=-1, micro_batch=0, sender=0, receiver=leader
                ),
                token=token,
            )
            for leader, token in answers.items()
        )
        for placement in self.placements:
            rank = placement.rank
            leader = leader_of[placement.rank]
            if rank == 0:
                self._add(0, op=Op("answer"), need=self._told, posts=answered, signal=shared[0])
            elif rank in answers:
                self._add(rank, op=Op("answer"), need=answers[rank], signal=shared.get(rank, -1))
            else:
                self._add(rank, op=Op("shared"), need=shared[leader])

    def _add(
        self, rank: int, op: Op, need: int = -1, posts: tuple[int, ...] = (), signal: int = -1
    ) -> None:
        self._one.operation(rank, need, posts, signal=signal)
        self.ops[rank].append(op)

    def _post(self, transfer: TransferCost, token: int) -> int:
        both = transfer.sender, transfer.receiver
        here, there = (self.placements[rank].cloud for rank in both)
        # One line for all ranks of a pair of clouds; inside a cloud each pair of ranks has its
        # own.
        shared = (here, there) if here != there else both
        if shared not in self._route_of:
            self._route_of[shared] = self._one.route()
            self.routes.append(Route(here, there))
        self.transfers.append(transfer)
        return self._one.parcel(*both, self._route_of[shared], token)

    def _transfer(self, boundary: int, action: Action, first: int) -> TransferCost | None:
        """Return the message over `boundary`; None at the ends and between stages of one rank."""
        kind = action.kind
        if kind == "weights" or not 0 <= boundary < self.num_stages - 1:
            return None
        if boundary in self._without[kind]:
            return None
        before = self.owner(boundary, micro_batch=action.micro_batch)
        behind = self.owner(boundary + 1, micro_batch=action.micro_batch)
        if before == behind:
            return None
        both = (before, behind) if kind == "forward" else (behind, before)
        return TransferCost(kind, boundary, first + action.micro_batch, *both)
