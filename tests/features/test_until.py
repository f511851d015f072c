"""A run that ends at the first evaluation that reaches its target."""

from pathlib import Path

import pytest

from tests.nightly import first_daily
from tests.runs import in_threads, losses, start
from tests.toy import toy_config
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.feature_list import FIGURES
from xcloud.features.until.figures import steady_step_s
from xcloud.features.until.settings import Until
from xcloud.pipeline.settings import Training
from xcloud.record.run_record import RunRecord


def until(**fields: object) -> list[str]:
    words = ",".join(f"{name}:{value}" for name, value in fields.items())
    return [f"training.until={{metric:bleu,{words}}}"]


@pytest.mark.parametrize(
    "cluster", first_daily(["three_clouds", "two_clouds", "two_clouds_dp"], count=1)
)
def test_all_ranks_end_at_the_evaluation_that_reaches_the_target(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["strategy=data_parallel"] if cluster == "two_clouds_dp" else []
    cluster = cluster.removesuffix("_dp")
    whole = toy_config(cluster, [*more, *until(at_least=101, every=2)])
    early = toy_config(cluster, [*more, *until(at_least=0, every=2)])
    unreached = in_threads(tmp_path / "whole", whole, monkeypatch)
    reached = in_threads(tmp_path / "early", early, monkeypatch)

    assert unreached["num_steps"] > 2 and "steps_to_target" not in unreached
    assert reached["num_steps"] == reached["steps_to_target"] == 2
    assert reached["status"] == "finished" and reached["quality"] and reached["dev_quality"]
    assert losses(tmp_path / "early") == losses(tmp_path / "whole")[:2]
    assert reached["target"] == "bleu >= 0"
    assert reached["time_to_target_s"] == pytest.approx(2 * reached["steady_step_s"], abs=2e-3)
    assert "steps to target | 2 | bleu >= 0: " in RunRecord(reached, FIGURES).markdown
    assert (
        RunRecord(unreached, FIGURES)
        .metrics.keys()
        .isdisjoint(("steps_to_target", "time_to_target_s"))
    )


@pytest.mark.slow
def test_a_metric_that_the_task_does_not_score_is_named(tmp_path: Path) -> None:
    more = ["training.until={metric:f1,at_least:1,every:1}"]
    with pytest.raises(RunFailed, match=r"training.until.metric is 'f1'.*take one of bleu"):
        start(tmp_path, toy_config("two_clouds", more))


def test_a_target_has_one_bound_and_needs_updates_that_are_made_together(tmp_path: Path) -> None:
    for wrong in ({}, {"at_most": 1.0, "at_least": 1.0}):
        with pytest.raises(ConfigError, match="either at_most or at_least"):
            Until("loss", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"training.until ends a run at the same update"):
        more = ["strategy=local_updates", *until(at_least=1)]
        start(tmp_path, toy_config("two_clouds", more))


def test_a_loss_is_the_logarithm_of_a_perplexity() -> None:
    target = Until("loss", at_most=3.276)
    assert target.is_reached({"perplexity": 26.4}) and not target.is_reached({"perplexity": 26.6})
    assert target.is_reached({"perplexity": 99.0, "loss": 3.0})
    assert not Until("bleu", at_least=20.0).is_reached({"bleu": 19.9})


def test_the_dev_split_is_scored_at_both_intervals() -> None:
    both = Training(max_steps=9, evaluate_every=4, until=Until("loss", at_most=1.0, every=3))
    assert [step for step in range(1, 10) if both.is_evaluated(step)] == [3, 4, 6, 8, 9]


def test_a_steady_step_is_of_three_windows_that_agree() -> None:
    assert steady_step_s([]) is None
    assert steady_step_s([1.0, 3.0, 2.0]) == 2.0
    steps = [2.0] * 10 + [1.0] * 10 + [1.005] * 10 + [0.999] * 10
    assert steady_step_s(steps) == pytest.approx(1.00133, abs=1e-4)
    assert steady_step_s(steps[:39]) == 1.005
