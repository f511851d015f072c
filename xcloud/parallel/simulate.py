"""Predict a schedule's step by discrete events.

Letters of the paper [N 1.1]: p stages, m micro-batches, tf and tb forward and backward time of a
micro-batch, tt one transfer. Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from xcloud.parallel.schedule import Action, Schedule


@dataclass(frozen=True)
class SimulatedStep:
    """step_s: until the last action ends. bubble_ratio: idle time of a stage over its ideal
    compute time, (step_s - m(tf+tb)) / (m(tf+tb)), the convention of [N] (1). start_s: of each
    action."""

    step_s: float
    bubble_ratio: float
    start_s: dict[Action, float]


def simulate(
    schedule: Schedule,
    num_stages: int,
    forward_s: float,
    backward_s: float,
    transfer_s: float = 0.0,
    latency_s: float = 0.0,
    *,
    transfers_block: bool = False,
) -> SimulatedStep:
    """One step of equal stages on their own ranks.

    A border is full duplex; each direction carries one message at a time for transfer_s seconds,
    which then needs latency_s more. transfers_block: sender and receiver do nothing else while a
    message crosses (formula (2)); otherwise transfers overlap with computing (formula (2')).
    """
    queues = [list(schedule.actions(stage, num_stages)) for stage in range(num_stages)]
    cost = {"forward": forward_s, "backward": backward_s}
    free_at = [0.0] * num_stages
    line_free_at: dict[tuple[int, int], float] = {}
    to_send: list[tuple[float, Action]] = []  # (computed at, action): results not yet on the line
    arrival: dict[Action, float] = {}  # when the action's input is there
    start: dict[Action, float] = {}
    while any(queues):
        # Of all that could happen next the earliest does, a transfer before an action.
        events: list[tuple[float, int, int]] = []
        for index, (at, action) in enumerate(to_send):
            line = _line(action)
            begin = max(at, line_free_at.get(line, 0.0))
            if transfers_block:
                begin = max(begin, free_at[line[0]], free_at[line[1]])
            events.append((begin, 0, index))
        held = {action.stage for _, action in to_send} if transfers_block else set()
        for stage, queue in enumerate(queues):
            if queue and stage not in held:
                at_or_none = _input_at(queue[0], num_stages, arrival, start, cost)
                if at_or_none is not None:
                    events.append((max(at_or_none, free_at[stage]), 1, stage))
        if not events:
            raise ValueError(
                f"{schedule.label} with {num_stages} stages waits for itself for ever"
            )
        begin, is_action, index = min(events)
        if is_action:
            action = queues[index].pop(0)
            start[action] = begin
            free_at[index] = begin + cost[action.kind]
            if 0 <= _line(action)[1] < num_stages:
                to_send.append((free_at[index], action))
        else:
            _, action = to_send.pop(index)
            line = _line(action)
            line_free_at[line] = begin + transfer_s
            if transfers_block:
                free_at[line[0]] = free_at[line[1]] = begin + transfer_s
            arrival[action._replace(stage=line[1])] = begin + transfer_s + latency_s
    step_s = max(start[action] + cost[action.kind] for action in start)
    ideal = schedule.num_micro_batches * (forward_s + backward_s)
    return SimulatedStep(step_s, (step_s - ideal) / ideal, start)


def _line(action: Action) -> tuple[int, int]:
    """The stages between which the action's result travels."""
    return action.stage, action.stage + (1 if action.kind == "forward" else -1)


def _input_at(
    action: Action,
    num_stages: int,
    arrival: dict[Action, float],
    start: dict[Action, float],
    cost: dict[str, float],
) -> float | None:
    """When the input of `action` is there; None if it is not known yet."""
    if action.kind == "forward" and action.stage == 0:
        return 0.0
    if action.kind == "backward" and action.stage == num_stages - 1:
        forward = action._replace(kind="forward")
        return start[forward] + cost["forward"] if forward in start else None
    return arrival.get(action)
