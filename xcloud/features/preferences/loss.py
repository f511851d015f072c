"""The loss of preference tuning, and which samples it needs a reference of.

Shapes: B pairs in a micro-batch, each of two documents, the chosen answer first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.tasks.preferences import nats_of


@dataclass(eq=False)
class PreferenceLoss:
    """A DocumentLoss: -log sigmoid(beta * margin), summed over the pairs of a micro-batch. The
    margin is by how much more the chosen answer gained in log-probability than the rejected one,
    since the start of the run.

    Source: Rafailov et al., arXiv:2305.18290, equation 7.

    reference: predictions of the initial model, by training sample (CausalStage.predict).
    """

    beta: float
    reference: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __call__(self, nats_D: Tensor, ids_B: Tensor) -> Tensor:
        start_B2 = torch.from_numpy(nats_of([self.reference[i] for i in ids_B.tolist()]))
        gained_B2 = start_B2.to(nats_D.device) - nats_D.view(-1, 2)
        margins_B = gained_B2[:, 0] - gained_B2[:, 1]
        # nats are float64: differences of sums over long answers lose digits in float32.
        return -F.logsigmoid(self.beta * margins_B).sum().float()


def trained_pieces(plan: BatchPlan, num_steps: int, size: int) -> list[Tensor]:
    """Return the samples that the first `num_steps` updates train on, in the order in which they
    first come, in pieces of `size`. The last one is filled up by samples of later updates, so that
    a longer run has the same pieces, and so the same bits of each sample."""
    # A dict keeps the order in which samples first come, and finds them in constant time.
    found: dict[int, None] = {}
    num_wanted = 0
    for step in count(1):
        if len(found) == plan.num_samples or (step > num_steps and len(found) >= num_wanted):
            break
        found.update(dict.fromkeys(plan.ids(step).tolist()))
        if step <= num_steps:
            num_wanted = -(-len(found) // size) * size
    return list(torch.split(torch.tensor([*found][:num_wanted]), size))
