"""A module and the optimizer of its parameters, as state that names parameters and no objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from xcloud.base.errors import DataError
from xcloud.comm.state import State, copy_of, fill, join_states, split_state
from xcloud.parallel.exchange import digest, local_part, with_part


@dataclass(frozen=True)
class TrainedModule:
    """State: "values.NAME" of every trained parameter and persistent buffer, "moments.WHAT.NAME"
    of what the optimizer keeps of a parameter ("exp_avg"), and "frozen", a digest of the frozen
    parameters, which are made anew. Learning rates follow from the step. Of parameters dealt over
    ranks it is what this rank holds.

    optimizer: None where nothing is trained.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    @cached_property
    def _frozen(self) -> Tensor:
        """uint8 [16]. Frozen parameters do not change, so it is made once."""
        return digest(p for p in self.module.parameters() if not p.requires_grad)

    @property
    def _values(self) -> dict[str, Tensor]:
        every = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, p in every if not p.requires_grad}
        return {n: v for n, v in self.module.state_dict().items() if n not in frozen}

    def state_dict(self) -> State:
        moments: dict[str, State] = {}
        for name, parameter in self._trained.items():
            assert self.optimizer is not None
            for what, value in self.optimizer.state.get(parameter, {}).items():
                moments.setdefault(what, {})[name] = _copy(value)
        values = {name: _copy(value) for name, value in self._values.items()}
        states = join_states({"values": values, "moments": join_states(moments)})
        return {**states, "frozen": self._frozen}

    def load_state_dict(self, state: State) -> None:
        rest = dict(state)
        frozen = rest.pop("frozen", None)
        if not isinstance(frozen, Tensor) or not torch.equal(frozen, self._frozen):
            raise DataError(
                "the frozen parameters are not those that this was trained with: a checkpoint or "
                "a kept backbone has changed since. Put the old one back, or start a new run"
            )
        parts = split_state(rest, ("values", "moments"), "a trained module")
        own = {name: local_part(value) for name, value in self._values.items()}
        fill(own, parts["values"], "a trained module")
        self._load_moments(parts["moments"])

    def _load_moments(self, state: State) -> None:
        trained = self._trained
        moments: dict[str, State] = {}
        for key, value in state.items():
            what, _, name = key.partition(".")
            moments.setdefault(name, {})[what] = _copy(value)
        if moments and (wrong := moments.keys() ^ trained.keys()):
            raise ValueError(
                f"the state of an optimizer does not fit it: {', '.join(sorted(wrong))} missing "
                "or unknown; it was saved with other settings"
            )
        if self.optimizer is None:
            return
        # The optimizer numbers parameters in the order of its groups, and puts each moment on the
        # device and in the dtype of its parameter.
        for name, kept in moments.items():
            for what, value in kept.items():
                if isinstance(value, Tensor) and value.shape == local_part(trained[name]).shape:
                    kept[what] = with_part(trained[name], value)
        numbered = {n: moments[name] for n, name in enumerate(trained) if name in moments}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer holds, in its order."""
        if self.optimizer is None:
            return {}
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return {names[p]: p for group in self.optimizer.param_groups for p in group["params"]}


def _copy(value: Tensor | int) -> Tensor | int:
    return copy_of(local_part(value)) if isinstance(value, Tensor) else value
