"""Runs that make their steps in turns; threads stand in for ranks."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

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
from xcloud.record.summary import read_summary

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
