"""What replicas do with the mean of their changes. The inner optimizer is the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from xcloud.base.checks import check_choice, check_number
from xcloud.base.errors import ConfigError


@dataclass(frozen=True)
class OuterOptimizer:
    """Gradient descent on what replicas agreed on last (`anchor`), whose gradient is how far they
    have moved away from it: anchor - values, merged over the replicas.

    velocity = momentum * velocity + gradient
    anchor -= learning_rate * (gradient + momentum * velocity   if nesterov, else velocity)

    DiLoCo (arXiv:2311.08105): 0.7, 0.9, Nesterov. Learning rate 1 without momentum replaces the
    anchor by the mean of the replicas: local SGD, and FedAvg (arXiv:1602.05629) where replicas
    count by their samples.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_number("outer.learning_rate", self.learning_rate, 0.0, above=True)
        check_number("outer.momentum", self.momentum, 0.0, 0.999999)
        check_choice("outer.nesterov", self.nesterov, (True, False))
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "outer.nesterov needs a momentum; set outer.momentum, or outer.nesterov=false"
            )

    @property
    def label(self) -> str:
        if not self.momentum:
            return "mean" if self.learning_rate == 1 else f"sgd({self.learning_rate:g})"
        name = "nesterov" if self.nesterov else "momentum"
        return f"{name}({self.learning_rate:g}, {self.momentum:g})"

    def step(
        self, anchors: Sequence[Tensor], velocities: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Changes anchors and velocities in place, tensor by tensor."""
        for anchor, velocity, gradient in zip(anchors, velocities, gradients, strict=True):
            # Multiplications and additions apart: a fused one rounds once, and replicas on
            # different processors would drift apart.
            update = gradient
            if self.momentum:
                velocity.mul_(self.momentum).add_(gradient)
                update = gradient + velocity * self.momentum if self.nesterov else velocity
            anchor.sub_(update * self.learning_rate)
