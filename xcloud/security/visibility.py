"""Which cloud may hold which field of a batch. Checked before anything is read.

A rank loads exactly the fields that its own stages read, so text that a stage does not need never
enters its cloud. What this rule adds: a field may be tied to named clouds, and a layout that would
put a stage which reads it anywhere else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xcloud.errors import ConfigError


@dataclass(frozen=True)
class Visibility:
    """holders: field name -> the clouds that may hold it. A field not named here may be held
    wherever a stage reads it."""

    holders: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, clouds in self.holders.items():
            if isinstance(clouds, str) or not all(isinstance(cloud, str) for cloud in clouds):
                raise ConfigError(
                    f"security.holders.{name} must be a list of cloud names, got {clouds!r}"
                )

    def check(self, clouds: Sequence[str], needs: Mapping[int, frozenset[str]],
              stage_cloud: Mapping[int, str]) -> None:  # fmt: skip
        """Raise ConfigError if a stage would read a field in a cloud that may not hold it.

        needs: stage -> fields that it reads. stage_cloud: stage -> its cloud.
        """
        known = frozenset().union(*needs.values())
        for name, holders in self.holders.items():
            if name not in known:
                raise ConfigError(
                    f"security.holders.{name}: no stage reads that field; the fields are "
                    f"{', '.join(sorted(known))}"
                )
            for holder in holders:
                if holder not in clouds:
                    raise ConfigError(
                        f"security.holders.{name} names cloud {holder!r}; the clouds are "
                        f"{', '.join(clouds)}"
                    )
        for stage, fields in needs.items():
            for name in sorted(fields & self.holders.keys()):
                if stage_cloud[stage] not in self.holders[name]:
                    raise ConfigError(
                        f"stage {stage} reads {name!r} but lies in cloud {stage_cloud[stage]!r}; "
                        f"security.holders allows {name!r} only in "
                        f"{', '.join(self.holders[name]) or 'no cloud'}. Move the stage "
                        "(cluster.clouds) or the rule."
                    )
