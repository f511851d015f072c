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

from xcloud.plan.costs import Costs
from xcloud.plan.prediction import Prediction
from xcloud.plan.step_program import StepProgram


class Simulator(StepProgram):
    """The program of a step, to be run at any costs."""

    def run(self, costs: Costs) -> Prediction:
        return Prediction(self, costs, *self.carry_out(costs))
