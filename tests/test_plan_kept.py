"""Predicted steps of runs whose clouds keep rows of frozen parts."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan_pieces import COMPRESSORS, EIGHT, codec
from xcloud.features.activation_cache.price import over_epochs
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.schedule import GPipe
from xcloud.planner.plan_report import Report, print_plans, write_plan
from xcloud.planner.search import Space, search
from xcloud.record.timeline import predicted_of
from xcloud.show.tables import epochs_text
from xcloud.simulator.costs import AveragingCodec, BoundaryCodec, CompressorCosts
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan
from xcloud.simulator.pricing import OverEpochs, Pricer

TWO = ClusterLayout({"a": Cloud(), "b": Cloud()}, LinkProfile(100e6, 0.01))
FROZEN = BoundaryCodec(codec(1e6).forward)


def pricer(costs: CompressorCosts, layout: ClusterLayout = TWO) -> Pricer:
    ways = [Strategy(), Strategy("data_parallel", None, GradientAveraging())]
    arranged = {way.name: Arranged(way, way.arrange(layout)) for way in ways}
    return Pricer(replace(EIGHT, compressors={NO_COMPRESSION: costs}), arranged, 16)


def test_kept_rows_make_steps_of_later_epochs_shorter_by_what_fits() -> None:
    """EIGHT in two halves, the first one frozen: of 16 samples it computes 0.64 s, the other half
    1.92 s; 1 MB of each sample crosses, 0.08 s on the line."""
    costs = CompressorCosts("none", [FROZEN], AveragingCodec(32_000))
    slow = replace(TWO, wan=LinkProfile(4e6, 0.01))
    priced = pricer(costs, slow)
    plan = Plan("pipeline", (4, 8), GPipe(4), NO_COMPRESSION)

    def found(megabytes: int, num_steps: int = 50) -> OverEpochs:
        told = over_epochs(priced, plan, megabytes * 10**6, 200, num_steps)
        assert told is not None
        return told

    nothing, half, all_kept = found(0), found(100), found(200)
    assert [one.kept_share for one in (nothing, half, all_kept)] == [0.0, 0.5, 1.0]
    first_s = priced.step_s(plan)
    assert nothing.first_epoch_s == all_kept.first_epoch_s == first_s
    assert nothing.later_epochs_s == pytest.approx(first_s)
    # The line is what bounds it: 16 samples of 2 s each, of which half cross; and then none.
    assert first_s > 32 and 16 < half.later_epochs_s < first_s - 15
    assert all_kept.later_epochs_s == pytest.approx(1.92, abs=0.05)
    assert half.first_epoch_share == 0.25
    assert half.mean_s == pytest.approx(0.25 * first_s + 0.75 * half.later_epochs_s)
    short = found(200, num_steps=5)
    assert short.mean_s == first_s and short.at_the_end is priced
    assert all_kept.at_the_end.step_s(plan) == all_kept.later_epochs_s
    whole = Plan("data_parallel", (8,), GPipe(4), NO_COMPRESSION)
    assert over_epochs(priced, whole, 1, 200, 50) is None
    assert over_epochs(pricer(COMPRESSORS[NO_COMPRESSION]), plan, 1, 200, 50) is None


def test_a_plan_that_keeps_rows_is_told_by_its_average_over_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = pricer(CompressorCosts("none", [FROZEN]))
    plan = Plan("pipeline", (4, 8), GPipe(4), NO_COMPRESSION)
    space = Space(plan, {"pipeline": [plan.ends]}, [4], [NO_COMPRESSION], ["schedule"])
    ranked = search(priced, space, 1)
    epochs = over_epochs(priced, ranked.best[0].plan, 10**9, 200, 50)
    assert epochs is not None
    report = Report(priced, space, ranked, 0.1, over_epochs={ranked.best[0].plan: epochs})

    print_plans(report)
    write_plan(tmp_path, report, ranked.best[0])

    text = epochs_text(epochs.as_table())
    said = capsys.readouterr().out
    assert f"on average over the run, {text}" in said and "plan 1: " in said
    assert "in later ones with 100% of the samples kept" in text
    assert "program" not in said, "it was not measured"
    told = predicted_of(tmp_path)
    assert told["predicted_step_time_s"] == pytest.approx(epochs.mean_s, abs=1e-6)
    assert told["predicted_over_epochs"]["later_epochs_s"] < told["predicted_step_time_s"]
