"""Figures that benchmarks compute, against sums that can be done by hand; faults and turns that
they give to runs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.chaos import draw
from benchmarks.chaos_record import Fault, Outcome, print_table, read_record, report
from benchmarks.cost_over_scale import per_unit
from benchmarks.in_turns import (
    ADDRESS,
    STEPS_PER_TURN,
    InterleavedClient,
    InterleavingServer,
    StepRatio,
    Turns,
    combinations,
    timed,
)
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
from xcloud.record.summary import read_summary
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


@pytest.mark.slow
@pytest.mark.nightly
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


ROOT = Path(__file__).parents[2]


def test_the_faults_of_a_seed_are_always_the_same() -> None:
    jobs = ["u-shape", "one-way"]
    drawn = draw(20, 3, 5, jobs)
    assert drawn == draw(20, 3, 5, jobs) != draw(20, 3, 6, jobs)
    assert drawn[3].job == "one-way" and all(len(one.faults) == 3 for one in drawn)

    few = draw(20, 2, 5, jobs, ["kill rank", "NaN"], ["launcher"])
    assert {one.form for one in few} == {"launcher"}
    assert {fault.kind for one in few[::2] for fault in one.faults} == {"kill rank", "NaN"}
    assert {fault.kind for one in few[1::2] for fault in one.faults} == {"kill rank"}


def test_faults_that_were_injected_are_counted_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [
        Fault("kill rank", "step", "recovered", noticed_s=2.0, steps_lost=3, restarts=1),
        Fault("kill rank", "step", "missed"),
        Fault("kill rank", "end", "hang", noticed_s=4.0),
    ]
    outcome = Outcome(1, 0, "a", "launcher", faults, "hang")

    told = report([outcome])

    assert told["faults"] == 2
    assert told["runs"] == {"hang": 1}
    assert told["kinds"]["kill rank (launcher)"] == {
        "faults": 2, "recovered": 1, "hang": 1, "went_on_without_restart": 1,
        "noticed_s_median": 3.0, "noticed_s_most": 4.0, "steps_lost_mean": 3,
    }  # fmt: skip
    record = tmp_path / "record.jsonl"
    record.write_text(json.dumps(asdict(outcome)) + "\n")
    assert read_record([record]) == [outcome]
    print_table([outcome])
    assert "| kill rank (launcher) | 2 | 1 | 0 | 1 | 3.0, 4.0 | 3 |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)  # some 40 faults: half a minute, minutes on a machine that is busy
@pytest.mark.skipif(sys.platform != "linux", reason="forks its ranks, reads /proc")
def test_runs_with_a_fault_come_to_the_same_weights_or_say_why_not(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    words = [
        "--runs", "2", "--each", "20", "--seed", "4", "--at-once", "2", "--forms", "launcher",
        "--jobs", "int4, delta memory", "one-way", "--kinds", "kill rank", "kill all ranks",
        "kill launcher", "SIGTERM", "pause rank", "pause launcher", "truncated checkpoint",
        "all checkpoints damaged", "--record", str(record),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *words], cwd=ROOT, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = report(read_record([record]))
    assert told["runs"] == {"equal": 2}
    assert told["faults"] >= 30


NUM_STEPS = 32


def test_noise_that_hits_a_whole_round_leaves_the_ratio_alone() -> None:
    noise = {number: 1.0 + 3 * (number % 3 == 0) for number in range(1, 21)}
    reference = {number: 0.2 * noise[number] for number in noise}
    own = {number: (0.1 + 0.001 * number) * noise[number] for number in noise}

    found = StepRatio.of(own, reference)

    assert found is not None and found.rounds == 20
    assert found.ratio == pytest.approx((0.1 + 0.0105) / 0.2)
    # Of 20 values the 6th and the 15th bound the median with 95.9 %, the 7th and 14th with 88 %.
    assert (found.low, found.high) == (pytest.approx(0.106 / 0.2), pytest.approx(0.115 / 0.2))


def test_six_rounds_in_common_are_the_fewest() -> None:
    six = {number: 1.0 + number for number in range(6)}
    assert StepRatio.of(six, {**six, 9: 1.0}) == StepRatio(1.0, 1.0, 1.0, 6)
    assert StepRatio.of(six, {number: 1.0 for number in range(1, 9)}) is None


def joined(run_dir: Path, rank: int, num_ranks: int) -> InterleavedClient:
    job = SimpleNamespace(cluster=SimpleNamespace(num_ranks=num_ranks))
    return Turns().join(SimpleNamespace(run_dir=run_dir, rank=rank, job=job))


def steps(turns: InterleavedClient, step_s: float, log: list[tuple[str, int]], who: str) -> None:
    for step in range(NUM_STEPS):
        turns.before_update(step)
        log.append((who, step))
        time.sleep(0.0005)
        log.append((who, step))
        own_s = step_s * (100 if step % STEPS_PER_TURN == 0 else 1)
        turns.note(own_s, own_s)  # all ranks begin at once
    turns.finish()
    turns.close(is_finished=True)


def test_one_point_at_a_time_makes_its_steps_and_the_first_of_a_turn_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, int]] = []
    with InterleavingServer() as server, ThreadPoolExecutor(4) as pool:
        monkeypatch.setenv(ADDRESS, server.address)
        ranks = {
            name: [
                pool.submit(steps, joined(tmp_path / name, rank, 2), step_s, log, name)
                for rank, step_s in enumerate(both)
            ]
            for name, both in {"a": (0.1, 0.3), "b": (0.2, 0.1)}.items()
        }
        made: dict[str, list[float | None]] = {"a": [], "b": []}
        for _ in range(NUM_STEPS // STEPS_PER_TURN):
            for name, seconds in made.items():
                over = lambda name=name: all(rank.done() for rank in ranks[name])  # noqa: E731
                seconds.append(server.turn(tmp_path / name, over))
        server.close()  # ends need no turn

    assert made["a"] == pytest.approx([3 * 0.3] * 8) and made["b"] == pytest.approx([3 * 0.2] * 8)
    # Two entries for a step of each of its two ranks, and then the other's.
    turns = [log[i : i + 4 * STEPS_PER_TURN] for i in range(0, len(log), 4 * STEPS_PER_TURN)]
    assert all(len({who for who, _ in turn}) == 1 for turn in turns)
    assert len(log) == 2 * 2 * 2 * NUM_STEPS


def test_a_turn_in_which_ranks_were_started_again_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InterleavingServer() as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv(ADDRESS, server.address)

        def lose_one() -> None:
            lost = joined(tmp_path, 0, 1)
            lost.before_update(0)
            lost.close(is_finished=False)
            steps(joined(tmp_path, 0, 1), 0.1, [], "again")

        lone = pool.submit(lose_one)
        assert server.turn(tmp_path, lone.done) is None
        assert server.turn(tmp_path, lone.done) == pytest.approx(0.3)
        server.close()


def test_values_with_commas_are_combined_and_runs_named_by_what_differs() -> None:
    words = ["+exp=toy", "compression=none,int8", "model.blocks=[1,2]", "seed=1,2"]
    runs = combinations(words)
    assert list(runs.values()) == [
        ["+exp=toy", f"compression={c}", "model.blocks=[1,2]", f"seed={s}"]
        for c in ("none", "int8") for s in (1, 2)
    ]  # fmt: skip
    assert {frozenset(name.split()) for name in runs} == {
        frozenset({f"compression={c}", f"seed={s}"}) for c in ("none", "int8") for s in (1, 2)
    }


@pytest.mark.slow
@pytest.mark.nightly
def test_two_runs_take_turns_as_processes(tmp_path: Path) -> None:
    words = ["--config-dir", "tests/conf", "+exp=toy", f"training.max_steps={NUM_STEPS}"]
    runs = {c: [*words, f"compression={c}"] for c in ("none", "int8")}
    rounds = timed(runs, tmp_path)
    found = StepRatio.of(rounds["int8"], rounds["none"])
    assert found is not None and found.rounds == NUM_STEPS // STEPS_PER_TURN - 1
    assert all(read_summary(tmp_path / str(n))["status"] == "finished" for n in range(2))
    text = "".join(path.read_text() for path in tmp_path.glob("*/events.jsonl"))
    events = [json.loads(line) for line in text.splitlines()]
    of_rank_0 = [event for event in events if "step_s" in event and event["rank"] == 0]
    began_s = min(event["t"] - event["step_s"] for event in of_rank_0)
    span_s = max(event["t"] for event in of_rank_0) - began_s
    assert sum(event["step_s"] for event in of_rank_0) < span_s + 0.1, "two at once"
