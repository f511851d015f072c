"""Features used together: rows of settings drawn from all of them run as one process would, go
on from a checkpoint as if nothing had happened, or are refused by the settings' names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.combinations import (
    FIRST,
    NAMES,
    OF_FEATURES,
    SAVED,
    STEPS,
    Row,
    contexts,
    covering_rows,
    experiment,
    interrupted,
    losses,
    random_rows,
    refusal,
    run,
    state,
    whole,
)
from tests.nightly import first_daily
from xcloud.pipeline.batch_plan import BatchPlan

AVERAGES_ALL = ("pipeline", "data_parallel", "hybrid")


def has_draws(row: Row) -> bool:
    """Noise that the machine draws, choices by measured times, clouds that begin again with what
    the first one merged: no two runs are alike."""
    if row["defences"] in ("gaussian", "max_norm") or row["strategy"] == "elastic":
        return True
    return any(row[name] in factor.draws for name, factor in OF_FEATURES.items())


def check(row: Row, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    job, first, second = experiment(row), tmp_path / "first", tmp_path / "second"
    run(job, first, patch)
    told = losses(first)
    assert {step for step, _ in told} == set(range(1, STEPS + 1))
    saved = state(first, STEPS)
    assert saved and all(v.isfinite().all() for v in saved.values() if v.is_floating_point())

    interrupted(first, second)
    run(job, second, patch)
    again = losses(second)
    assert {step for step, _ in again} == set(range(SAVED + 1, STEPS + 1))
    if not has_draws(row):
        assert again == {key: loss for key, loss in told.items() if key[0] > SAVED}
        other = state(second, STEPS)
        assert saved.keys() == other.keys()
        different = [key for key in saved if not torch.equal(saved[key], other[key])]
        assert not different

    plain = row["compression"] == "none" and row["strategy"] in AVERAGES_ALL
    plain &= type(job.batch_plan(40)) is BatchPlan  # one process deals samples to no lanes
    if plain and not has_draws(row):
        alone = tmp_path / "alone"
        run(whole(row), alone, patch)
        for (step, _), loss in told.items():
            assert loss == pytest.approx(losses(alone)[step, 0], rel=2e-5)


@pytest.mark.parametrize(
    "row",
    first_daily(list(random_rows(3, 6)), count=2),
    ids=lambda row: " ".join(row.values()),
)
def test_a_row_of_any_settings_equals_its_reference(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(row, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_stage_that_is_sharded_over_ranks_equals_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(
        {**FIRST, "clouds": "lanes", "stages": "sharded", "schedule": "1f1b"},
        tmp_path,
        monkeypatch,
    )


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_pairs_of_settings_equal_their_reference_or_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, refused = covering_rows()
    wrong = []
    for number, row in enumerate(rows):
        try:
            check(row, tmp_path / str(number), monkeypatch)
        except Exception as error:
            named = {factor: level for factor, level in row.items() if level != FIRST[factor]}
            wrong.append(f"{named}: {error!r:.300}")
    assert not wrong, f"{len(wrong)} of {len(rows)} rows:\n" + "\n".join(wrong)
    assert refused


@pytest.mark.slow
@pytest.mark.nightly
def test_a_pair_that_cannot_be_is_refused_by_the_names_of_both() -> None:
    _, refused = covering_rows()
    assert refused and not [pair for pair in refused if not is_named(pair)]


def is_named(pair: Row) -> bool:
    """Whether a refusal names both factors of the pair; or, where a third stands between
    them, all name it and one of them."""
    refused = (
        {factor for factor, pattern in NAMES.items() if re.search(pattern, refusal(row))}
        for row in contexts(pair)
        if not refusal({**row, **{factor: FIRST[factor] for factor in pair}})
    )
    found = []
    for named in refused:
        if pair.keys() <= named:
            return True
        found.append(named)
    return all(len(named) > 1 and named & pair.keys() for named in found)
