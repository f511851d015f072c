"""The rows of this feature in tables that tests share (feature_rows.py)."""

from __future__ import annotations

from tests.feature_rows import Factor, FeatureRows, Shown, Told
from xcloud.features.privacy.figures import GUARANTEE
from xcloud.features.privacy.settings import Privacy

SAMPLE = ["strategy=data_parallel", "security/privacy=sample", "schedule.num_micro_batches=8"]
CLOUD = [
    *("strategy=local_updates", "strategy.averaging.every=2"),
    *("security/privacy=cloud", "security.privacy.noise=0"),
]

ROWS = FeatureRows(
    figure=GUARANTEE,
    shown=[
        Shown(
            {"privacy": {"unit": "sample", "delta": 1e-5, "epsilon": 3.5,
                         "epsilon_if_sampled": 1.25}},
            [("privacy, epsilon", "3.50",
              "by sample, delta 1e-05; 1.25 if batches were random and secret")],
            {"epsilon": 3.5},
        ),
        Shown(
            {"privacy": {"unit": "sample", "delta": 1e-5, "epsilon": 3.14159,
                         "epsilon_if_sampled": 0.5}},
            [("privacy, epsilon", "3.14",
              "by sample, delta 1e-05; 0.50 if batches were random and secret")],
            {"epsilon": 3.14159},
        ),
        Shown(
            {"privacy": {"unit": "cloud", "delta": 1e-5, "epsilon": None,
                         "epsilon_if_sampled": None}},
            [("privacy, epsilon", "-", "by cloud, delta 1e-05")],
        ),
    ],
    told=[
        Told(
            [{"event": "privacy", "rank": 0, "cloud": "a", "t": 1.0, "epsilon": 1.0},
             {"event": "privacy", "rank": 0, "cloud": "a", "t": 2.0, "epsilon": 3.5}],
            {"privacy": {"epsilon": 3.5}},
        ),
    ],
    of_rank_0={
        "privacy": "unit clip noise delta epsilon epsilon_if_sampled sampling_rate num_updates",
    },
    whole_run=True,
    left_out_of_trials={"security.privacy": None},
    factors={
        "privacy": Factor(
            "security.privacy",
            {"none": None, "sample": Privacy("sample", clip=0.5, noise=0.1),
             "cloud": Privacy("cloud", clip=0.5, noise=0.1)},
            r"security[./]privacy",
            {"sample", "cloud"},
        ),
    },
    golden={  # without noise, which is not of the run's seed
        "clipped samples": (
            {"privacy": Privacy("sample", 0.5, 0.0)},
            {"strategy": "data_parallel", "micro_batches": "8"},
        ),
        "clipped clouds": (
            {"privacy": Privacy("cloud", 0.5, 0.0)},
            {"strategy": "local_updates", "micro_batches": "8"},
        ),
    },
    owners={  # without noise, which is drawn from no seed
        "privacy of a sample": {"overrides": [*SAMPLE, "security.privacy.noise=0"]},
        "privacy of a cloud, cut": {
            "overrides": [*CLOUD, "training.max_steps=100"], "is_cut": True,
        },
        "noise of privacy": {
            "overrides": [*SAMPLE, "security.privacy.noise=1"], "alike": ("privacy", "epsilon"),
        },
        "mailbox of three": {"overrides": CLOUD, "cluster": "three_clouds", "listen": ()},
    },
    settings={
        "xcloud.features.privacy.settings.Privacy": {
            "unit": "one of sample, cloud = ",
            "clip": "a number in (0, inf) = ",
            "noise": "a number in [0, inf) = ",
            "delta": "a number in (0, 0.999999] = 1e-05",
        },
        "xcloud.security.policy.Visibility": {"privacy": "a Privacy or null = null"},
    },
)  # fmt: skip
