"""Figures that benchmarks compute, against sums that can be done by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.cost_over_scale import per_unit
from benchmarks.one_way_prediction import (
    Inside,
    SimulatedCloud,
    SimulatedJob,
    scale_consumer,
    simulate_one_way,
)
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


FREE = LinkProfile(1e12)
JOB = SimulatedJob(
    SimulatedCloud(1, 0.1), [SimulatedCloud(1, 0.05), SimulatedCloud(1, 0.05)], FREE, 1000, 2, 8
)


def test_a_fast_producer_leaves_the_consumer_its_own_pace() -> None:
    found = simulate_one_way(JOB)

    assert found.step_s == pytest.approx(0.2)
    assert found.batches_per_s == pytest.approx(10)
    assert found.bound == "consumer" and found.consumer_waits_s == pytest.approx(0)


def test_a_slow_producer_sets_the_pace_by_its_share() -> None:
    slow = replace(JOB, producers=[SimulatedCloud(1, 0.05), SimulatedCloud(1, 0.3)])
    assert simulate_one_way(slow).step_s == pytest.approx(0.3)
    assert simulate_one_way(slow).bound == "producer 1"

    two_ranks = replace(JOB, producers=[SimulatedCloud(1, 0.05), SimulatedCloud(2, 0.3)])
    assert simulate_one_way(two_ranks).step_s == pytest.approx(0.2, rel=0.02)


def test_a_narrow_link_sets_the_pace_by_its_bytes() -> None:
    narrow = LinkProfile(1e5)
    found = simulate_one_way(replace(JOB, link=narrow, payload_bytes=10_000))

    assert found.step_s == pytest.approx(narrow.line_s(10_000))
    assert found.bound.startswith("link of producer")


def test_latency_costs_nothing_once_run_ahead_covers_it() -> None:
    far = replace(JOB, link=LinkProfile(1e12, 0.5))  # a round trip of five steps

    assert simulate_one_way(far).step_s == pytest.approx(0.2)
    short = simulate_one_way(replace(far, run_ahead=2))
    assert short.bound == "run-ahead"
    # Two steps under way, each comes back after a round trip and the making of its batch.
    assert short.step_s > 0.5


def test_the_all_reduce_of_a_ring() -> None:
    inside = Inside(8e9, 1e-3, ranks_per_machine=2, machine_bits_per_s=8e10)

    assert inside.all_reduce_s(1e9, 4) == pytest.approx(2 * 3 / 4 + 6e-3)
    assert inside.all_reduce_s(1e9, 2) == pytest.approx(0.1 + 2e-3)


def test_scaling_is_bound_by_the_all_reduce_or_by_too_few_producers() -> None:
    inside = Inside(8e9, ranks_per_machine=8, machine_bits_per_s=8e12)
    consumer = SimulatedCloud(8, 1.0, gradient_bytes=4e8, inside=inside)
    job = SimulatedJob(consumer, [SimulatedCloud(64, 0.3)], FREE, 1000, 8, 8)

    eight, sixty_four = scale_consumer(job, [8, 64])
    assert eight.speed_up == 1 and sixty_four.prediction.bound == "consumer"
    assert sixty_four.efficiency == pytest.approx(1 / (1 + 2 * 63 / 64 * 0.4), rel=0.01)

    few = replace(job, producers=[SimulatedCloud(8, 0.3)])
    bound = scale_consumer(few, [8, 64])[1]
    assert bound.prediction.bound == "producer 0"
    assert bound.prediction.batches_per_s == pytest.approx(8 / 0.3, rel=0.01)
