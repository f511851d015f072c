"""The compression follows the line: what is predicted, when it is believed, and that both ends of
every boundary switch at the same step. Ranks are threads, their links are in memory."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.channels import same_state, stored
from tests.configs import build
from tests.nightly import first_daily
from tests.pipelines import in_threads
from tests.plan_pieces import BOTH_WAYS, WAYS
from tests.trainers import LAYOUTS, Rank, ranks
from xcloud.base.errors import ConfigError
from xcloud.comm.channel import Boundary, BoundaryField
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phase, Phased, Selectable, Selection
from xcloud.comm.compressor import Chain
from xcloud.comm.memory import DeltaCache
from xcloud.comm.precision import BlockInt
from xcloud.comm.state import MEMORY, State
from xcloud.comm.transform import Transform
from xcloud.feature_list import FIGURES
from xcloud.features.autopilot.feature import schedules_of
from xcloud.features.autopilot.pilot import (
    KINDS,
    MAX_ROWS,
    RunPilot,
    codec_costs,
    forecast_of,
    line_bandwidth,
)
from xcloud.features.autopilot.rule import Forecast, Measured, Rule
from xcloud.features.autopilot.settings import Autopilot
from xcloud.features.checkpoints.resume import is_marked
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Kind, TensorSpec
from xcloud.net.link_profile import LinkProfile, line_bytes
from xcloud.pipeline.line_meter import LineMeter
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, max_kept
from xcloud.pipeline.pinned_batches import PinnedBatchPlan
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.pipeline.settings import Optimizer, Training
from xcloud.record.summary import RunStatistics, feed_log
from xcloud.simulator.costs import Direction

TWO = ClusterLayout({"a": Cloud(), "b": Cloud()})
NONE = Compression()
INT4 = Compression(Chain(int4=BlockInt(4)), Chain(int4=BlockInt(4)))
TRAINING = Training(12, batch_size=8, optimizer=Optimizer(0.1, 1))


class Scripted(RunPilot):
    """Decides as it is told, whatever it measures. choices: by the step after which."""

    choices: Mapping[int, int]

    def decide(self, step: int, measured: Mapping[int, Tensor]) -> int | None:
        assert len(measured) == len({0, *measured}), "rank 0 hears every leader"
        return self.choices.get(step)


def piloted(
    layout: ClusterLayout,
    compression: Selectable,
    kind: type[RunPilot],
    schedules: Sequence[Schedule] = (GPipe(2),),
    **more: Any,
) -> list[Rank]:
    settings = Autopilot({"int4": INT4}, every=1, confirm=2, dwell=3)
    made = ranks(layout, TRAINING, compression, schedules[0], **more)
    job: Any = SimpleNamespace(
        autopilot=settings, compression=compression, schedules=schedules, cluster=layout
    )
    for rank in made:
        rank.hooks.append(kind(job, rank.wiring, rank.trainer, rank.reporter, None))
    return made


def train(made: Sequence[Rank], first: int, last: int) -> list[list[tuple[float | None, ...]]]:
    def one(rank: Rank) -> list[tuple[float | None, ...]]:
        found = []
        for step in range(first, last + 1):
            report = rank.update(step)
            found.append((report.loss, report.grad_norm))
        return found

    return in_threads([lambda r=rank: one(r) for rank in made])


@pytest.mark.parametrize("name", first_daily(["lanes", "three clouds"], 1))
def test_both_ends_of_every_boundary_switch_at_the_same_step(name: str) -> None:
    phases = {"a": Phase(3, NONE), "b": Phase(7, INT4), "c": Phase(None, NONE)}
    expected = train(ranks(LAYOUTS[name], TRAINING, Phased(**phases)), 1, 12)
    made = piloted(LAYOUTS[name], Selectable({"none": NONE, "int4": INT4}), Scripted)
    for rank in made:
        rank.hook(RunPilot).choices = {3: 1, 7: 0}

    assert train(made, 1, 12) == expected
    plain = ranks(LAYOUTS[name], TRAINING, NONE)
    assert train(plain, 1, 12) != expected
    assert {rank.wiring.boundaries.shared(Selection).since_step for rank in made} == {8}


@pytest.mark.parametrize(
    "learning",
    [
        Compression(INT4.forward, INT4.backward, forward_memory=DeltaCache()),
        Compression(Transform(1.0), Transform(1.0)),
    ],
    ids=["delta", "transform"],
)
def test_a_run_goes_on_bit_for_bit_given_the_same_decisions_and_memories_rest_meanwhile(
    learning: Compression,
) -> None:
    plan = PinnedBatchPlan(40, 8, 1, [0, 0])
    switched = Selectable({"learning": learning, "none": NONE})

    def job() -> list[Rank]:
        made = piloted(TWO, switched, Scripted, plan=plan)
        for rank in made:
            rank.hook(RunPilot).choices = {3: 1, 6: 0, 10: 1}
        return made

    def states(made: Sequence[Rank]) -> list[tuple[State, State]]:
        return [
            (stored(rank.state_dict()), stored(rank.hook(RunPilot).state_dict())) for rank in made
        ]

    original, restored = job(), job()
    train(original, 1, 4)
    for rank, (state, of_pilot) in zip(restored, states(original), strict=True):
        rank.load_state_dict(state)
        assert all(is_marked(key, MEMORY) for key in of_pilot)  # another cluster begins again
        rank.hook(RunPilot).load_state_dict(of_pilot)
    expected = train(original, 5, 12)

    assert train(restored, 5, 12) == expected
    for one, other in zip(states(original), states(restored), strict=True):
        assert all(same_state([a], [b]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", first_daily(["three clouds", "lanes"], 1))
def test_losses_are_those_of_any_number_of_micro_batches(name: str) -> None:
    fixed = train(ranks(LAYOUTS[name], TRAINING, NONE), 1, 12)
    schedules = [GPipe(2), GPipe(8), OneForwardOneBackward(4, 3)]
    compressions = Selectable({"none": NONE, "int4": INT4})

    def job() -> list[Rank]:
        made = piloted(LAYOUTS[name], compressions, Scripted, schedules)
        for rank in made:
            rank.hook(RunPilot).choices = {2: 2, 5: 4, 9: 0}
        return made

    made, restored = job(), job()
    found = train(made, 1, 7)
    assert {rank.trainer.schedule for rank in made} == {schedules[2]}
    for rank, other in zip(made, restored, strict=True):
        other.load_state_dict(stored(rank.state_dict()))
        other.hook(RunPilot).load_state_dict(stored(rank.hook(RunPilot).state_dict()))
    rest = train(restored, 8, 12)

    assert train(made, 8, 12) == rest, "a run goes on with the schedule of its checkpoint"
    for one, first, second in zip(fixed, found, rest, strict=True):
        for a, b in zip(one, [*first, *second], strict=True):
            assert [x or 0.0 for x in b] == pytest.approx([x or 0.0 for x in a], rel=1e-5)
    links = [stats for rank in made for stats in rank.wiring.ends.records]
    forward = sum(one.num_messages[Kind.ACTIVATION] for one in links)
    boundaries = 2
    assert forward == boundaries * (2 * 2 + 3 * 8 + 4 * 4 + 3 * 2)


def test_only_schedules_within_the_memory_of_the_run_are_chosen_from() -> None:
    def found(own: Schedule, **more: Any) -> list[Schedule]:
        return schedules_of(Autopilot({}, **more), own, 2)

    textbook = OneForwardOneBackward(8)
    assert found(GPipe(4), micro_batches=[2, 4, 8]) == [GPipe(4), GPipe(2), GPipe(8)]
    assert found(textbook, in_flight=[2, 3]) == [textbook, OneForwardOneBackward(8, 3)]
    assert found(textbook, micro_batches=[4, 16], in_flight=[4]) == [
        textbook, OneForwardOneBackward(8, 4), OneForwardOneBackward(4),
        OneForwardOneBackward(16), OneForwardOneBackward(16, 4),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="2 of 1f1b m=8 in flight=p"):
        found(textbook, micro_batches=[2])
    with pytest.raises(ConfigError, match="gpipe m=4 has no num_in_flight"):
        found(GPipe(4), in_flight=[2])


class OnALine(RunPilot):
    """As if every byte had taken its time on a line of so many bits per second."""

    bits_per_s: float = 0.0

    def measured(self) -> Tensor:
        for channel in self._wiring.boundaries.wan_sends:
            stats, kind = channel.link.record, KINDS[channel.identity.direction]
            new = stats.num_bytes[kind] - getattr(channel, "seen", 0)
            channel.seen = stats.num_bytes[kind]  # type: ignore[attr-defined]
            stats.line_s[kind] += 8 * new / self.bits_per_s
        return super().measured()


def test_it_compresses_on_a_slow_line_says_why_and_leaves_a_fast_one_alone() -> None:
    switched = Selectable({"none+none": NONE, "int4+int4": INT4})
    layout = replace(TWO, wan="free")  # of a real one every message would be timed
    slow, fast = (piloted(layout, switched, OnALine) for _ in range(2))
    for made, rate in ((slow, 100.0), (fast, 1e15)):
        for rank in made:
            rank.hook(RunPilot).bits_per_s = rate
            rank.hook(RunPilot).forecast = Forecast([GPipe(2)], TWO, 1, WAYS)
        train(made, 1, 8)
        made[0].reporter.flush()
    events = [json.loads(line) for line in b"".join(slow[0].told).splitlines()]

    (event,) = [event for event in events if event["event"] == "autopilot"]
    # Looks from the second update on, of which two must agree.
    assert (event["step"], event["choice"], event["before"]) == (3, "int4+int4", "none+none")
    assert "a to b 0.0 Mbit/s, b to a 0.0 Mbit/s" in event["reason"]
    assert {rank.wiring.boundaries.shared(Selection).choice for rank in slow} == {1}
    assert {rank.wiring.boundaries.shared(Selection).choice for rank in fast} == {0}
    assert not any(b"autopilot" in line for line in fast[0].told)
    sent = [rank.wiring.ends.records for rank in (slow[0], fast[0])]
    few, many = (sum(one.num_bytes[Kind.ACTIVATION] for one in links) for links in sent)
    assert few < 0.8 * many

    statistics = RunStatistics(2, FIGURES)
    for one in events:
        statistics.feed(one)
    assert statistics.summary(name="s", status="failed", commit="c")["autopilot"] == [
        {"step": 3, "choice": "int4+int4", "before": "none+none"}
    ]
    for step, is_kept in ((2, False), (3, True)):  # of which checkpoint the run goes on
        resumed = RunStatistics(2, FIGURES)
        resume = {"event": "resume", "step": step, "rank": 0, "t": 0.0}
        feed_log(resumed, [*events, resume])
        assert is_kept == bool(resumed.events("autopilot"))


def test_a_real_line_is_timed_where_its_messages_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineMeter, "busy_s", lambda meter, sent_at_s, arrived_at_s: 0.5)
    made = piloted(TWO, Selectable({"none": NONE, "int4": INT4}), Scripted)
    for rank in made:
        rank.hook(RunPilot).choices = {}
    train(made, 1, 3)
    one, other = (rank.hook(RunPilot).measured() for rank in made)
    for sender, receiver, row in ((one, other, 1), (other, one, 2)):  # forward, backward
        num_bytes, messages, line_s, _ = sender[row].tolist()
        assert (messages, line_s) == (6, 0) and num_bytes > 0, "counted where they are sent"
        *sums, delay_s = receiver[row].tolist()
        assert sums == [0, 0, 3.0] and delay_s > 0, "timed where they arrive"
    kept = made[0].hook(RunPilot).children()[MEMORY]
    assert [*kept] == ["switches", "in force", "rule", "forecast"], "a resumed run decides alike"


def test_the_codecs_of_all_choices_are_measured_before_the_first_step() -> None:
    job = build("+exp=abnet_iwslt", "autopilot=on", "compression=none", "cluster/wan=line_8m")
    compression = job.compression
    assert isinstance(compression, Selectable)
    transform = "transform(1)+transform(3.2), averaging int4"
    assert list(compression.choices) == ["none+none", "int8+int8", "int4+int4", transform]
    assert job.labels.compression == f"autopilot(none+none, int8+int8, int4+int4, {transform})"
    small = build(
        "+exp=abnet_iwslt", "autopilot=on", "compression=int8", "cluster/wan=line_8m",
        "training.batch_size=8",
    )  # fmt: skip
    assert list(small.compression.choices) == ["int8+int8", "int4+int4", transform], (
        "each is there once"
    )
    int8, int4, transformed = forecast_of(small, torch.device("cpu")).codecs  # type: ignore[arg-type]
    for way in BOTH_WAYS:
        assert 0.4 < int4[way].num_bytes / int8[way].num_bytes < 0.6
        assert transformed[way].num_bytes < int4[way].num_bytes
    assert min(way.compress_s for way in [*int8.values(), *int4.values()]) > 0


def test_a_step_before_the_last_switch_has_the_choice_of_then() -> None:
    switches = Selection()
    switches.switch(2, 5)
    switches.switch(1, 9)
    assert [switches.at(step) for step in (8, 9, 12)] == [2, 1, 1]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["cluster/wan=real", "cluster.clouds.cloud_a.num_ranks=2"], "2 ranks share it"),
        (["strategy=data_parallel", "cluster/wan=line_8m"], "makes 2 of it"),
        (["plan=show"], "plan= prices one compression"),
        (["compression=phased_example"], "changes with boundary or phase"),
        (["autopilot.worth=0.9"], "autopilot.worth"),
        (["autopilot.micro_batches=[0]"], r"autopilot.micro_batches\[0\] must be"),
        (["autopilot.micro_batches=[64]", "training.batch_size=32"], "may choose gpipe m=64, but"),
        (["autopilot.in_flight=[2]"], "in_flight"),
        (
            [
                "autopilot.micro_batches=[8]",
                "cluster.clouds.cloud_a.num_ranks=2",
                "compression=delta_int4",
                "cluster/wan=line_8m",
            ],
            "stay with its ranks",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("+exp=abnet_iwslt", "autopilot=on", *overrides)
    with pytest.raises(ConfigError, match="are empty"):
        Autopilot({})


CACHED = [
    *("+exp=bert_split_sst2", "data=glue_small", "recipe=lowrank_small"),
    *("model.split.freeze_bottom=true", "training.activation_cache_mb=10"),
]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (CACHED, ["training.activation_cache_mb=10 keeps", "changes during the run"]),
        (["+exp=lora_clm", "schedule=two_buffered"], ["schedule=two.buffered", "autopilot"]),
        (
            ["+exp=dpo_reviews"],
            ["task=preferences asks the model of the start",
             r"compression changes during the run \(autopilot.*take one compression"],
        ),
    ],
)  # fmt: skip
def test_what_needs_one_compression_for_all_of_a_run_refuses_it(
    overrides: list[str], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        build(*overrides, "autopilot=on").check()
    assert [one for one in said if not re.search(one, str(raised.value), re.DOTALL)] == []


def test_a_run_that_chooses_its_compression_names_no_command_to_try_its_model(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    for stage in range(2):
        (tmp_path / "model" / f"stage{stage}.safetensors").touch()
    for choice, is_told in (("off", True), ("on", False)):
        job = build("+exp=lora_clm", "profile=demo", f"autopilot={choice}")
        assert (job.next_command(tmp_path) is not None) == is_told


def test_one_way_jobs_have_nothing_to_choose() -> None:
    with pytest.raises(ConfigError, match="a one-way job has none"):
        build("+exp=electra_multilingual", "autopilot=on")


def test_a_line_that_was_measured_takes_as_long_when_it_is_simulated() -> None:
    """Packets have headers on it, which both count once."""
    line = LinkProfile(1e8)
    for num_bytes in (200, 15_000, 1_000_000):
        found = LinkProfile(line_bandwidth(8.0 * num_bytes, 8.0, 8 * line.line_s(num_bytes)))
        assert found.line_s(num_bytes) == pytest.approx(line.line_s(num_bytes))
    assert line_bandwidth(8.0, 1.0, 0.0) == 1e15


def test_codecs_are_timed_on_no_more_rows_than_tell_their_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = BoundaryField("counts", (), torch.int64)
    boundary = Boundary((counts, BoundaryField("hidden", (8,), torch.float32, "counted")), 8192)
    timed: list[tuple[TensorSpec, bool]] = []
    monkeypatch.setattr(
        "xcloud.features.autopilot.pilot.time_codec",
        lambda codec, specs, device, is_gradient: (
            timed.extend((spec, is_gradient) for spec in specs) or Direction(1)
        ),
    )
    assert len(list(codec_costs(boundary, INT4, 16, torch.device("cpu")))) == 2
    assert [(spec.shape, is_gradient) for spec, is_gradient in timed] == [
        ((MAX_ROWS, 8), False),
        ((MAX_ROWS, 8), True),
    ]


FOUR_BITS = Compression(Chain(int4=BlockInt(4)), Chain(int4=BlockInt(4)))
TWO_CLOUDS = ClusterLayout({"a": Cloud(), "b": Cloud()})


def measured(bits_per_s: float, num_bytes: float = 1e6, step_s: float = 10.0) -> Measured:
    lines = dict.fromkeys([("a", "b"), ("b", "a")], LinkProfile(min(bits_per_s, 1e15)))
    return Measured(step_s, [0.3, 0.3], dict.fromkeys(BOTH_WAYS, num_bytes), lines)


def test_a_choice_is_predicted_to_save_the_bytes_it_does_not_send_and_to_cost_its_codecs() -> None:
    forecast = Forecast([GPipe(1)], TWO_CLOUDS, 1, WAYS)
    plain_s, int4_s = forecast.step_s(measured(8e6), in_force=0)

    less = line_bytes(1_000_000) - line_bytes(250_000)
    assert plain_s == 10.0, "that in force is as measured"
    assert int4_s == pytest.approx(10.0 - 2 * 8 * less / 8e6 + 2 * 1e6 * 3e-8)
    # Seen from the other side, with what its messages then take.
    assert forecast.step_s(measured(8e6, 0.25e6, int4_s), 1)[0] == pytest.approx(10.0)
    free_s = forecast.step_s(measured(float("inf")), 0)
    assert free_s[1] == pytest.approx(10.06), "on a free line only the codecs count"


def test_work_that_covers_the_line_is_no_reason_to_compress() -> None:
    forecast = Forecast([GPipe(8)], TWO_CLOUDS, 1, WAYS)
    plain_s, int4_s = forecast.step_s(measured(1e12, step_s=1.0), 0)
    assert int4_s > plain_s


def test_a_switch_is_worth_it_confirmed_and_lasting() -> None:
    rule = Rule(Autopilot({"int4": FOUR_BITS}, every=1, worth=1.1, confirm=3, dwell=10))
    assert [rule.choose(20 + i, 0, 0, [1.0, 0.95]) for i in range(5)] == [None] * 5, "too little"
    assert [rule.choose(30 + i, 0, 0, [1.0, 0.9]) for i in range(3)] == [None, None, 1]
    assert [rule.choose(2 + i, 0, 0, [1.0, 0.1]) for i in range(2)] == [None, 1], "much: sooner"
    looks = [rule.choose(33 + i, 1, 33, [0.5, 1.0]) for i in range(10)]
    assert looks == [None] * 9 + [0], "and it stays for ten updates"
    noise = [rule.choose(60 + i, 0, 43, [1.0, 0.5 + 0.6 * (i % 2)]) for i in range(30)]
    assert noise == [None] * 30, "never two in a row"
    rule = Rule(Autopilot({"int4": FOUR_BITS}, worth=1.1, confirm=3))
    both = [rule.choose(90 + i, 0, 43, [1.0, 0.5 + 0.1 * (i % 2), 0.55]) for i in range(2)]
    assert both == [None, 2], "two that are better by turns confirm each other"
    rule, again = (Rule(Autopilot({"int4": FOUR_BITS}, confirm=2)) for _ in range(2))
    assert rule.choose(2, 0, 0, [1.0, 0.5]) is None
    again.load_state_dict(stored(rule.state_dict()))
    assert again.choose(4, 0, 0, [1.0, 0.5]) == 1
    with pytest.raises(ValueError, match="float64 'gained'"):
        again.load_state_dict({"gained": torch.zeros(2)})


def switches(num_updates: int, better: Callable[[int, int], int]) -> list[int]:
    """After which updates. better: the choice that looks better, by update and choice in force."""
    rule = Rule(Autopilot({"int4": FOUR_BITS}, every=1, confirm=2, dwell=10))
    in_force, found = 0, [0]
    for step in range(1, num_updates):
        predicted = [1.0, 1.0]
        predicted[better(step, in_force)] = 0.5
        if (choice := rule.choose(step, in_force, found[-1], predicted)) is not None:
            in_force = choice
            found.append(step + 1)
    return found[1:]


def test_choices_that_call_for_each_other_take_turns_ever_less_often() -> None:
    calling = switches(1000, lambda step, in_force: 1 - in_force)
    lasted = [after - before for before, after in pairwise(calling)]
    assert lasted == [10, 20, 40, 80, 160, 320]
    line = switches(1000, lambda step, in_force: step // 50 % 2)
    assert line == [52 + 50 * i for i in range(19)], "a line that does change is followed"


@pytest.mark.parametrize("seed", range(12))
def test_the_rule_never_flaps_whatever_is_predicted(seed: int) -> None:
    """Predictions at random, of three choices: a switch goes to what looks best, is worth it, was
    confirmed, and lasts; a return lasts longer than what it returns from."""
    draw = random.Random(seed)
    confirm, dwell, worth = draw.choice([2, 3, 5]), draw.choice([1, 6, 15]), 1.1
    rule = Rule(Autopilot({"int4": FOUR_BITS}, every=1, worth=worth, confirm=confirm, dwell=dwell))
    in_force, before, since, must_last = 0, -1, 0, dwell
    looks, switches = list[list[float]](), 0
    spread = draw.choice([0.05, 0.3, 0.8])
    for step in range(1, 600):
        looks.append([1 + spread * draw.uniform(-1, 1) for _ in range(3)])
        choice = rule.choose(step, in_force, since, looks[-1])
        if choice is None:
            continue
        switches += 1
        assert choice != in_force and looks[-1][choice] == min(looks[-1])
        for look in looks[-2:]:  # one look is never enough
            assert look[in_force] > worth * look[choice]
        lasted = step + 1 - since
        assert not since or lasted >= must_last
        returns_soon = choice == before and lasted < 2 * must_last
        must_last = 2 * must_last if returns_soon else dwell
        in_force, before, since = choice, in_force, step + 1
    if spread == 0.05:
        assert not switches, "hardly ever is a choice a tenth faster twice in a row"


@pytest.mark.parametrize("seed", range(6))
def test_what_is_faster_for_good_is_in_force_soon_and_stays(seed: int) -> None:
    draw = random.Random(seed)
    confirm, dwell, gain = draw.randint(1, 6), draw.randint(1, 20), draw.uniform(1.06, 4.0)
    rule = Rule(Autopilot({"int4": FOUR_BITS}, every=1, confirm=confirm, dwell=dwell))
    predicted = [1.0, 1.0, 1.0]
    best = draw.choice([1, 2])
    predicted[best] = 1 / gain
    taken = [step for step in range(1, 50) if rule.choose(step, 0, 0, predicted) is not None]
    assert taken and taken[0] <= confirm and (taken[0] >= 2 or confirm == 1)
    stays = [rule.choose(step, best, taken[0] + 1, predicted) for step in range(taken[0] + 1, 200)]
    assert stays == [None] * len(stays)


@pytest.mark.parametrize("seed", range(8))
def test_a_forecast_keeps_what_was_measured_and_only_ranks_by_what_differs(seed: int) -> None:
    """Whatever is measured: the choice in force takes as long as it did, equal choices as long as
    each other, and a slower line makes smaller messages look better, never worse."""
    draw = random.Random(seed)
    ways = [*WAYS, WAYS[1]]
    forecast = Forecast(
        [GPipe(2), OneForwardOneBackward(4)], TWO_CLOUDS, draw.choice([1, 2]), ways
    )
    gains, in_force = list[float](), draw.randrange(6)
    for rate in sorted(10 ** draw.uniform(5, 9) for _ in range(5)):
        step_s = draw.uniform(5e3, 9e3)
        seen = measured(rate, 1e6 if in_force % 3 == 0 else 0.25e6, step_s)
        found = forecast.step_s(seen, in_force)
        assert found[in_force] == pytest.approx(step_s) and len(found) == 6
        assert found[1] == pytest.approx(found[2]) and found[4] == pytest.approx(found[5])
        assert min(found) >= 0
        gains.append(found[0] - found[1])
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("own", [GPipe(4), OneForwardOneBackward(8), OneForwardOneBackward(6, 3)])
def test_no_choice_keeps_more_activations_than_the_run_does(own: Schedule) -> None:
    settings = Autopilot({}, micro_batches=[8, 12, 16, 24])
    for num_stages in (2, 3, 4):
        for found in schedules_of(settings, own, num_stages):
            for stage in range(num_stages):
                kept = [
                    max_kept(s.actions(stage, num_stages), 1, 1 / s.num_micro_batches, 0.0)
                    for s in (found, own)
                ]
                if isinstance(own, GPipe) or stage == 0:
                    assert kept[0] <= kept[1] + 1e-9


def test_other_numbers_of_micro_batches_are_predicted_from_what_they_took() -> None:
    forecast = Forecast([GPipe(1), GPipe(4)], TWO_CLOUDS, 1, WAYS)
    free = measured(float("inf"))
    own_s, _, four_s, _ = forecast.step_s(free, 0)
    assert (own_s, four_s) == (10.0, pytest.approx(10 - 0.6 + 0.6 * 5 / 8)), "work overlaps"
    # Small micro-batches were slower than their share, as is seen once they are in force.
    dear = replace(free, compute_s=[0.6, 0.6])
    back_s, _, four_s, _ = forecast.step_s(dear, 2)
    assert (back_s, four_s) == (pytest.approx(10 - 1.2 * 5 / 8 + 0.6), 10.0)
    again = Forecast([GPipe(1), GPipe(4)], TWO_CLOUDS, 1, WAYS)
    again.load_state_dict(stored(forecast.state_dict()))
    assert again.step_s(free, 0) == forecast.step_s(free, 0)
    assert again.step_s(free, 0)[2] == pytest.approx(10 - 0.6 + 1.2 * 5 / 8)
    # Of one message a micro-batch the line carries as many bytes, and latency counts in each.
    slow = Forecast([GPipe(1), GPipe(4)], TWO_CLOUDS, 1, [WAYS[0]])
    line_s = 8 * line_bytes(1_000_000) / 8e6
    one_s, four_s = slow.step_s(measured(8e6, step_s=3.0), 0)
    assert four_s == pytest.approx(one_s - 0.6 - 2 * line_s + 0.15 + 2 * line_s, abs=0.2)


@pytest.mark.parametrize(
    ("seen", "now", "then", "seconds"),
    [
        ({4: 2.0}, 4, 8, 2.0),  # one alone tells nothing of more
        ({4: 2.0, 8: 3.0}, 4, 8, 3.0),  # seen is seen
        ({4: 2.0, 8: 3.0}, 8, 16, 5.0),  # a quarter of a second for each more
        ({4: 2.0, 8: 3.0}, 8, 2, 1.5),
        ({4: 2.0, 8: 1.0}, 8, 16, 1.0),  # more take no less
    ],
)
def test_computing_grows_with_micro_batches_as_far_as_was_seen(
    seen: dict[int, float], now: int, then: int, seconds: float
) -> None:
    forecast = object.__new__(Forecast)
    forecast._compute_s = {count: [value] for count, value in seen.items()}
    assert forecast._computing_s(0, now, then) == pytest.approx(seconds)
