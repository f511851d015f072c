"""Which cloud may hold which batch field and which part of the model, checked before anything is
read; plus the settings of defences and leak meter.

A rank loads exactly the fields that its stages read, so text that a stage does not need never
enters its cloud. In addition, a field or part may be restricted to named clouds; a layout with a
stage that reads or holds it elsewhere is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.security.defences import Defences
from xcloud.security.observer import LeakMeter
from xcloud.security.privacy import Privacy


@settings("security")
class Visibility:
    """The settings of `security`.

    holders: field name -> clouds that may hold it. Unnamed fields may be held wherever a stage
        reads them.
    weights: the same for parts of the model, such as embeddings, layers, head.
    may_keep_rows: whether a cloud may keep what crossed from another for later epochs
        (training.activation_cache_mb).
    defences: noise on what crosses a boundary. meter: measure after training what others could
        recover. privacy: clip and noise gradients or weight changes, and account for it.
    """

    holders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    weights: Mapping[str, Sequence[str]] = field(default_factory=dict)
    may_keep_rows: bool = True
    defences: Defences = field(default_factory=Defences)
    meter: LeakMeter | None = None
    privacy: Privacy | None = None

    def check(self, clouds: Sequence[str], needs: Mapping[int, frozenset[str]],
              stage_cloud: Mapping[int, str]) -> None:  # fmt: skip
        """Raise ConfigError if a stage reads a field in a cloud that may not hold it.

        needs: stage -> fields that it reads. stage_cloud: stage -> its cloud.
        """
        _check(
            "holders", "reads", "no stage reads that field; the fields are",
            self.holders, clouds, needs, stage_cloud,
        )  # fmt: skip

    def check_weights(self, clouds: Sequence[str], parts: Mapping[int, frozenset[str]],
                      stage_cloud: Mapping[int, str]) -> None:  # fmt: skip
        """The same for parts of the model. parts: stage -> names of the parts that it holds."""
        _check(
            "weights", "holds the weights of", "the model has no such part; its parts are",
            self.weights, clouds, parts, stage_cloud,
        )  # fmt: skip


def _check(
    setting: str,
    verb: str,
    unknown: str,
    rule: Mapping[str, Sequence[str]],
    clouds: Sequence[str],
    needs: Mapping[int, frozenset[str]],
    stage_cloud: Mapping[int, str],
) -> None:
    known = frozenset[str]().union(*needs.values())
    for name, holders in rule.items():
        if name not in known:
            raise ConfigError(f"security.{setting}.{name}: {unknown} {', '.join(sorted(known))}")
        for holder in holders:
            if holder not in clouds:
                raise ConfigError(
                    f"security.{setting}.{name} names cloud {holder!r}; the clouds are "
                    f"{', '.join(clouds)}"
                )
    for stage, names in needs.items():
        for name in sorted(names & rule.keys()):
            if stage_cloud[stage] not in rule[name]:
                raise ConfigError(
                    f"stage {stage} {verb} {name!r} but is in cloud {stage_cloud[stage]!r}; "
                    f"security.{setting} allows {name!r} only in "
                    f"{', '.join(rule[name]) or 'no cloud'}. Move the stage "
                    "(cluster.clouds) or the rule."
                )
