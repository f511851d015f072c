"""Experiment files of earlier releases: what they call by a name that has changed since.

A module or class that a config names and that moves gets a line here; `translate`, `report` and
sweeps that go on read the files of earlier runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from xcloud.cluster.liveness import DEFAULT_LIVENESS
from xcloud.errors import ConfigError
from xcloud.job.job import Launch
from xcloud.parallel.strategy import Strategy
from xcloud.training.settings import Checkpoints

MOVED = {
    "xcloud.cluster.feed_layout.FeedCloud": "xcloud.cluster.one_way_layout.OneWayCloud",
    "xcloud.cluster.feed_layout.FeedLayout": "xcloud.cluster.one_way_layout.OneWayLayout",
    "xcloud.electra.config.MultilingualElectra": "xcloud.electra.model.MultilingualElectra",
    "xcloud.experiment.Experiment": "xcloud.job.experiment.Experiment",
    "xcloud.feed_experiment.FeedExperiment": "xcloud.job.one_way.OneWayExperiment",
    "xcloud.feed_experiment.FeedTraining": "xcloud.job.one_way.OneWayTraining",
    "xcloud.parallel.feed_plan.Feed": "xcloud.parallel.one_way.feed.Feed",
    "xcloud.tracking.MlflowTracker": "xcloud.record.tracking.MlflowTracker",
    "xcloud.tracking.NullTracker": "xcloud.record.tracking.NullTracker",
}
VALUES = {
    "xcloud.cluster.layout.free_network": "free",
    "xcloud.cluster.layout.real_network": "real",
}
"""What once was a call is now its result."""
GONE = {
    "xcloud.models.split_point.Split": {
        "warm_start_steps": (0, "a warm start of the cut was found to be of no use"),
    },
}
"""Settings that are no more, the value that did nothing, and why they went."""
ADDED: dict[str, dict[str, object]] = (
    {
        target: {
            "on_divergence": "stop",
            "max_skips_in_a_row": 10,
            "checkpoint": {"_target_": "xcloud.training.settings.Checkpoints"}
            | asdict(Checkpoints()),
            **more,
        }
        for target, more in (
            ("xcloud.training.settings.Training", {"keep_frozen_mb": 0}),
            ("xcloud.job.one_way.OneWayTraining", {}),
        )
    }
    | {
        f"xcloud.cluster.{target}": {
            "liveness": {"_target_": "xcloud.cluster.liveness.Liveness"} | asdict(DEFAULT_LIVENESS)
        }
        for target in ("layout.ClusterLayout", "one_way_layout.OneWayLayout")
    }
    | {
        "xcloud.job.experiment.Experiment": {
            "launch": {"_target_": "xcloud.job.job.Launch"} | asdict(Launch()),
            "strategy": {"_target_": "xcloud.parallel.strategy.Strategy"} | asdict(Strategy()),
            "autopilot": {"_target_": "xcloud.plan.autopilot.no_autopilot"},
        },
        "xcloud.job.one_way.OneWayExperiment": {
            "launch": {"_target_": "xcloud.job.job.Launch"} | asdict(Launch()),
            "autopilot": {"_target_": "xcloud.plan.autopilot.no_autopilot"},
        },
        "xcloud.security.visibility.Visibility": {
            "privacy": {"_target_": "xcloud.security.privacy.no_privacy"},
            "may_keep_rows": True,
        },
        "xcloud.security.observer.LeakMeter": {"averaging_steps": 3},
        "xcloud.models.abnet.AbNet": {"word_adapters": False},
        "xcloud.cluster.liveness.Liveness": {"join_within_s": DEFAULT_LIVENESS.join_within_s},
    }
    | {
        f"xcloud.tasks.translation.translation_from_{source}": {
            f"{side}_monolingual_file": None for side in ("source", "target")
        }
        for source in ("files", "hub")
    }
)
"""Settings that are new, with their defaults: so a run of today has the same as one of before."""


def with_names_of_today(node: Any, path: str = "") -> Any:
    """A copy of plain containers, as read from an experiment file. Raises ConfigError for a
    setting that had an effect and is no more."""
    if isinstance(node, list):
        return [with_names_of_today(entry, f"{path}[{i}]") for i, entry in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    target = node.get("_target_")
    if target in VALUES:
        return VALUES[target]
    gone = GONE.get(str(target), {})
    for key in gone.keys() & node.keys():
        without_effect, why = gone[key]
        if node[key] != without_effect:
            raise ConfigError(
                f"{path}.{key} is {node[key]!r}, but there is no such setting any more ({why}); "
                f"only {without_effect!r} can still be read: check out the commit that made it"
            )
    renamed = {
        key: with_names_of_today(value, f"{path}.{key}" if path else str(key))
        for key, value in node.items()
        if key not in gone
    }
    if target is None:
        return renamed
    today = MOVED.get(str(target), str(target))
    renamed["_target_"] = today
    return {**ADDED.get(today, {}), **renamed}
