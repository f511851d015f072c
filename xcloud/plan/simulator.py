"""Predict a step of a pipeline: a schedule's actions on a layout's ranks, at given costs.

Letters of the paper: p stages, m micro-batches, tf and tb forward and backward time of a
micro-batch, tt one transfer. Where the model behind them applies, the prediction equals its
formulas (formulas.py).

Model: a rank does one thing at a time, in the order that the real pipeline follows. For an action
it waits for the message that it starts from, decompresses, computes, compresses and hands its own
message on, which then travels while the rank goes on. All ranks of one cloud that send to one
other cloud share that line (line.py); inside a cloud every pair of ranks has its own. After the
actions: the all-reduce inside a stage, the agreement on the gradient norm, the optimizer.

Not modelled: ranks that slow each other down on one machine, and threads of links that do.
"""

from __future__ import annotations

from xcloud.cluster.layout import ClusterLayout
from xcloud.parallel.schedule import Schedule
from xcloud.plan.costs import Costs
from xcloud.plan.engine import run, run_blocking
from xcloud.plan.prediction import Prediction
from xcloud.plan.step_program import CONTROL, StepProgram


def simulate(
    schedule: Schedule,
    layout: ClusterLayout,
    costs: Costs,
    *,
    transfers_block: bool = False,
    agrees: bool = False,
    num_passes: int = 1,
    num_steps: int = 1,
) -> Prediction:
    """One simulation. For many costs of one schedule and layout build the Simulator once."""
    simulator = Simulator(
        schedule,
        layout,
        transfers_block=transfers_block,
        agrees=agrees,
        num_passes=num_passes,
        num_steps=num_steps,
    )
    return simulator.run(costs)


class Simulator(StepProgram):
    """The program of a step, to be run at any costs."""

    def run(self, costs: Costs) -> Prediction:
        seconds = [
            [self.op_s(costs, rank, op) for op in ops] * self.num_steps
            for rank, ops in enumerate(self.ops)
        ]
        num_bytes = [
            costs.control_bytes if transfer is CONTROL else costs.message_bytes(transfer)
            for transfer in self.transfers
        ] * self.num_steps
        lines = [
            costs.line(route.here, route.there, self.layout.wan_between(*route.sample))
            for route in self.routes
        ]
        carry_out = run_blocking if self.transfers_block else run
        moments = carry_out(self.program, seconds, num_bytes, lines)
        for rank in range(self.layout.num_ranks):
            if not moments.has_ended(self.program, rank):
                raise self.deadlock()
        return Prediction(self, costs, seconds, num_bytes, lines, moments)
