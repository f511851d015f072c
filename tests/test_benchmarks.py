"""The benchmarks cost_over_scale and soak compute these figures; they run nothing here."""

from __future__ import annotations

import random

import pytest

from benchmarks.cost_over_scale import per_unit
from benchmarks.sleeping_job import LINE, Job
from benchmarks.sleeping_model import SAMPLE_BYTES, STAGE_BYTES, Usage
from benchmarks.soak import growth, line_through
from benchmarks.step_profile import by_group, largest
from xcloud.net.link_profile import LinkProfile
from xcloud.simulator.formulas import step_of_overlapped_transfers


def test_the_ideal_of_a_pipeline_of_equal_stages_is_formula_2() -> None:
    p, m, b, own_s = 3, 8, 8, 5e-3
    transfer_s = LinkProfile(1e8).sent_at(0.0, b * SAMPLE_BYTES)

    # From the second step on a stage begins while the message that ends the last one travels.
    found = Job((1,) * p, m, m * b).predicted()

    formula_s = step_of_overlapped_transfers(
        p, m, b * own_s, 2 * b * own_s, transfer_s, LINE["latency_s"]
    )
    assert found.step_s == pytest.approx(formula_s, rel=1e-3)
    weights = 4 * STAGE_BYTES  # with gradients and two moments
    in_flight = m * b * SAMPLE_BYTES  # kept for the backward; as much may queue at each boundary
    assert list(found.memory.values()) == [weights + n * in_flight for n in (2, 3, 2)]


def test_replicas_share_the_work_and_one_rank_of_two_has_half_of_the_micro_batches() -> None:
    whole = Job((1, 1), 4, 64, strategy="data_parallel").predicted()

    assert whole.step_s == pytest.approx(2 * 3 * 5e-3 * 32, rel=0.05)  # two stages each
    assert Job((2, 2), 16, 128).predicted().step_s == pytest.approx(
        Job((1, 1), 8, 64).predicted().step_s, rel=0.02
    )


def test_a_straight_line_is_found_again() -> None:
    assert per_unit([(1, 5.0), (2, 7.0), (4, 11.0)]) == pytest.approx((3.0, 2.0))
    assert per_unit([(3, 5.0)]) == (5.0, 0.0)


def test_a_step_lasts_from_its_first_forward_to_that_of_the_next() -> None:
    begin_s = [0.0, 1.0, 10.0, 11.0, 14.0, 15.0, 18.0, 19.0]
    usage = Usage(0, begin_s, [0.0] * 8, 8, 8)

    assert usage.step_s(forwards=2, warm_up=1) == 4.0
    assert usage.cpu_of_step_s(forwards=2, warm_up=1) == 0.0


def test_what_runs_in_c_counts_for_whoever_calls_it() -> None:
    ours, copy = ("/x/xcloud/net/frame.py", 9, "encode"), ("~", 0, "<method 'copy_'>")
    network = ("/y/torch/nn/functional.py", 3, "linear")
    model = ("/x/xcloud/models/causal.py", 5, "forward")
    stats = {
        ours: (1, 1, 1.0, 3.0, {}),
        model: (1, 1, 4.0, 9.0, {}),
        network: (1, 1, 0.5, 5.5, {}),
        copy: (3, 3, 7.0, 7.0, {ours: (1, 1, 2.0, 2.0), network: (2, 2, 5.0, 5.0)}),
    }

    assert by_group(stats) == {"torch": 5.5, "model and data": 4.0, "frames and links": 3.0}
    assert largest(stats, 3) == [("net/frame.py encode", 3.0)]


def test_a_leak_is_told_from_noise_and_from_a_warm_up() -> None:
    noise = random.Random(0)
    steps = range(0, 100_000, 500)
    warm = [(step, 200 + min(30.0, step / 500) + noise.gauss(0, 3), 0.0) for step in steps]
    leaking = [(step, mb + 30 * step / 1e5, 0.0) for step, mb, _ in warm]

    assert growth(warm, 100_000)["flat"] is True
    found = growth(leaking, 100_000)
    assert found["flat"] is False and 20 < found["mb_per_100000_steps"] < 40
    assert growth(warm[:3], 100_000)["flat"] is None
    assert line_through([0, 1, 2], [1.0, 3.0, 5.0]) == (2.0, 0.0)
