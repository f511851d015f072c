"""What a job may use beyond a plain pipeline of two clouds, where clouds have several owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import combinations
from tests.combinations import FACTORS, experiment
from tests.toy import toy_config
from xcloud.base.errors import ConfigError
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.job.config import Settings
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.transport import Transport

SIX = {name: Cloud(stages=[k % 3], replica=k // 3) for k, name in enumerate("abcdef")}
MIXED = {"a": Cloud(stages=[1]), "b": Cloud(stages=[0]), "c": Cloud(stages=[2])}


@pytest.mark.parametrize(
    ("clouds", "row"),
    [
        (SIX, {"strategy": "data_parallel"}),
        (FACTORS["clouds"]["four"], {"strategy": "hybrid"}),
        (FACTORS["clouds"]["three"], {"strategy": "local_updates"}),
        (FACTORS["clouds"]["u"], {"ends": "tied"}),
        (MIXED, {"ends": "tied"}),
    ],
    ids=["six", "hybrid", "local updates", "U", "tied"],
)
def test_all_messages_between_clouds_go_over_lines_that_the_layout_names(
    clouds: dict[str, Cloud], row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each of these lines is used: an owner opens no port for nothing."""
    monkeypatch.setitem(FACTORS["clouds"], "these", clouds)
    job = experiment({**row, "clouds": "these", "micro_batches": "8"}, max_steps=1)
    used = set[frozenset[str]]()

    def carried(transport: Transport) -> Transport:
        out = transport.out

        def noted(line: str, peer: int, settings: Any) -> Any:
            used.add(frozenset(map(job.cluster.cloud_of, (transport.rank, peer))))
            return out(line, peer, settings)

        monkeypatch.setattr(transport, "out", noted)
        return transport

    combinations.run(job, tmp_path, monkeypatch, carried)
    assert {pair for pair in used if len(pair) > 1} == {frozenset(p) for p in job.cluster.lines}


@pytest.mark.parametrize(
    ("listen", "pair"), [("ab", "'c' and 'd'"), ("ac", "'b' and 'd'"), ("ad", "")]
)
def test_two_clouds_that_only_average_need_an_address_too(listen: str, pair: str) -> None:
    """Pipelines of a and b, and of c and d: stages of b and d are the same."""
    clouds = {
        name: Cloud(address=f"{name}.example:7000" if name in listen else None) for name in "abcd"
    }
    layout = Strategy("hybrid", 2, GradientAveraging()).arrange(ClusterLayout(clouds, "sealed"))
    if not pair:
        return layout.check_lines()
    with pytest.raises(ConfigError, match=f"a line between clouds {pair}, so one of them must"):
        layout.check_lines()


def test_a_file_in_which_nobody_can_be_reached_is_refused() -> None:
    with pytest.raises(ConfigError, match="between clouds 'cloud_a' and 'cloud_b', so one of"):
        Settings.of(toy_config("two_clouds", ["cluster/wan=sealed"]))
