"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from tests.feature_rows import FeatureRows, Shown
from xcloud.features.one_way.feed import Feed
from xcloud.features.one_way.figures import PRODUCERS

ROWS = FeatureRows(
    figure=PRODUCERS,
    shown=[
        Shown(
            {"feed": {"bytes_per_token": 2.5, "num_skipped": 3, "producers": {
                "x": {"state": "slow", "loss": 1.5, "num_batches": 8, "share_taken": 0.75},
                "y": {"state": "active", "loss": None, "num_batches": 0, "share_taken": None}}}},
            [("bytes per token", "2.50", "between clouds, counted"),
             ("fed by x", "75.0 %", "8 batches, loss 1.500, slow"),
             ("fed by y", "0.0 %", "0 batches, loss -"),
             ("batches missed", "3", "of slow or lost producers")],
            {"bytes_per_token": 2.5, "num_skipped": 3},
        ),
        Shown(
            {"feed": {"bytes_per_token": 2.345, "num_skipped": 3, "producers": {
                "a": {"state": "active", "loss": 1.5, "num_batches": 9, "share_taken": 0.75},
                "b": {"state": "dead", "loss": None, "num_batches": 0, "share_taken": None}}}},
            [("bytes per token", "2.35", "between clouds, counted"),
             ("fed by a", "75.0 %", "9 batches, loss 1.500"),
             ("fed by b", "0.0 %", "0 batches, loss -, dead"),
             ("batches missed", "3", "of slow or lost producers")],
            {"bytes_per_token": 2.345, "num_skipped": 3},
        ),
        Shown({}),
    ],
    of_rank_0={"producer": "producer state step"},
    groups={"feed": Feed},
    settings={
        "xcloud.features.one_way.feed.Feed": {
            "run_ahead": "1..4096 or null = null",
            "slow_after_s": "a number in (0, inf) = 30.0",
            "on_dead": "one of redistribute, stop = redistribute",
        },
        "xcloud.features.one_way.job.OneWayExperiment": {
            "name": "a text = ",
            "seed": "a whole number >= 0 = 1",
            "profile": "a text = demo",
            "sweep": "a text or null = null",
            "label": "a text or null = null",
            "cluster": "an OneWayLayout = ",
            "training": "an OneWayTraining = ",
            "tracker": "a Tracker = ",
            "cache_dir": "a text = .cache",
            "plan": "a PlanSettings or null = null",
            "model": "an OneWayModel = ",
            "follow_up": "a list of which each is a text = []",
        },
        "xcloud.features.one_way.job.OneWayTraining": {
            "max_steps": "a whole number >= 1 = ",
            "batches_per_step": "a whole number >= 1 = ",
            "on_divergence": "one of stop, skip = stop",
            "max_skips_in_a_row": "a whole number >= 1 = 10",
        },
        "xcloud.features.one_way.layout.OneWayCloud": {
            "num_ranks": "a whole number >= 1 = 1",
            "share": "a number in (0, inf) or null = null",
            "device": "one of auto, cpu, cuda = auto",
            "price": "a Price or null = null",
        },
        "xcloud.features.one_way.layout.OneWayLayout": {
            "clouds": "a mapping = ",
            "wan": "a Wan or one of real, free, sealed = real",
            "links": "a mapping = {}",
            "name": "a text = one_way",
            "link_budget_bytes": "a whole number >= 1 = 64000000",
            "carrier": "a Carrier or null = null",
            "reconnect_s": "a number in (0, inf) = 120.0",
            "form": "one of clouds, one_cloud, local = clouds",
        },
    },
)  # fmt: skip
