"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.feature_rows import Factor, FeatureRows, Told
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain
from xcloud.comm.precision import BlockInt
from xcloud.features.autopilot.figures import SWITCHES
from xcloud.features.autopilot.pilot import like
from xcloud.features.autopilot.settings import Autopilot
from xcloud.net.frame import Tensors

INT4 = Chain(int4=BlockInt(4, block=8, stochastic=True))
ALL_VALUES = {"_target_": "xcloud.comm.sparsify.TopK", "rate": 1.0}  # exact, and larger


def measures() -> tuple[list[Tensors], Callable[[Tensors], object]]:
    mine = torch.zeros(3, 4, dtype=torch.float64)
    return [(mine + 1,)], lambda parts: like(mine, parts, 1)


ROWS = FeatureRows(
    figure=SWITCHES,
    told=[
        Told(
            [{"event": "autopilot", "step": 4, "choice": "int4", "before": "int8",
              "reason": "slow line"}],
            {"autopilot": [{"step": 4, "choice": "int4", "before": "int8"}]},
            ["after step 4 int4; slow line"],
            marks=[(4, "int4")],
        ),
    ],
    of_rank_0={"autopilot": "step choice before reason predicted_s"},
    groups={"autopilot": Autopilot},
    misfits={"look of the autopilot": (["autopilot=on", "autopilot.every=50"],
                                       r"autopilot\.every=50")},
    left_out_of_trials={"autopilot": None},
    factors={
        "autopilot": Factor(
            "autopilot",
            {"off": None, "on": Autopilot({"int4": Compression(INT4, INT4), "none": Compression()},
                                          micro_batches=(4, 8))},
            r"autopilot",
            {"on"},
        ),
    },
    parsers={"measures": measures},
    owners={
        "autopilot": {
            "overrides": [
                "autopilot=on", "~autopilot.choices.int8", "~autopilot.choices.int4",
                "~autopilot.choices.transform", "+compression@autopilot.choices.plain=none",
                "autopilot.worth=1.000001", "autopilot.confirm=1", "autopilot.dwell=1",
                "training.max_steps=40",
            ],
            "changed": {"compression": {way: ALL_VALUES for way in ("forward", "backward")}},
            "switches": "autopilot",
        },
    },
    settings={
        "xcloud.features.autopilot.settings.Autopilot": {
            "choices": "a mapping = ",
            "micro_batches": "a list of which each is a whole number >= 1 = []",
            "in_flight": "a list of which each is a whole number >= 1 = []",
            "every": "a whole number >= 1 = 2",
            "worth": "a number in (1, inf) = 1.05",
            "confirm": "a whole number >= 1 = 4",
            "dwell": "a whole number >= 1 = 10",
        },
        "xcloud.experiment.Experiment": {"autopilot": "an Autopilot or null = null"},
        "xcloud.features.one_way.job.OneWayExperiment": {
            "autopilot": "an Autopilot or null = null",
        },
    },
)  # fmt: skip
