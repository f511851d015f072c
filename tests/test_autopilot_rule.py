"""What the autopilot predicts of a choice, and when it believes it."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.channels import stored
from tests.plan_pieces import BOTH_WAYS, WAYS
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain
from xcloud.comm.precision import BlockInt
from xcloud.features.autopilot.rule import Forecast, Measured, Rule
from xcloud.features.autopilot.settings import Autopilot
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile, line_bytes
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, max_kept
from xcloud.pipeline.schedule import GPipe, Schedule

INT4 = Compression(Chain(int4=BlockInt(4)), Chain(int4=BlockInt(4)))
TWO = ClusterLayout({"a": Cloud(), "b": Cloud()})


def measured(bits_per_s: float, num_bytes: float = 1e6, step_s: float = 10.0) -> Measured:
    lines = dict.fromkeys([("a", "b"), ("b", "a")], LinkProfile(min(bits_per_s, 1e15)))
    return Measured(step_s, [0.3, 0.3], dict.fromkeys(BOTH_WAYS, num_bytes), lines)


def test_a_choice_is_predicted_to_save_the_bytes_it_does_not_send_and_to_cost_its_codecs() -> None:
    forecast = Forecast([GPipe(1)], TWO, 1, WAYS)
    plain_s, int4_s = forecast.step_s(measured(8e6), in_force=0)

    less = line_bytes(1_000_000) - line_bytes(250_000)
    assert plain_s == 10.0, "that in force is as measured"
    assert int4_s == pytest.approx(10.0 - 2 * 8 * less / 8e6 + 2 * 1e6 * 3e-8)
    # Seen from the other side, with what its messages then take.
    assert forecast.step_s(measured(8e6, 0.25e6, int4_s), 1)[0] == pytest.approx(10.0)
    free_s = forecast.step_s(measured(float("inf")), 0)
    assert free_s[1] == pytest.approx(10.06), "on a free line only the codecs count"


def test_work_that_covers_the_line_is_no_reason_to_compress() -> None:
    forecast = Forecast([GPipe(8)], TWO, 1, WAYS)
    plain_s, int4_s = forecast.step_s(measured(1e12, step_s=1.0), 0)
    assert int4_s > plain_s


def test_a_switch_is_worth_it_confirmed_and_lasting() -> None:
    rule = Rule(Autopilot({"int4": INT4}, every=1, worth=1.1, confirm=3, dwell=10))
    assert [rule.choose(20 + i, 0, 0, [1.0, 0.95]) for i in range(5)] == [None] * 5, "too little"
    assert [rule.choose(30 + i, 0, 0, [1.0, 0.9]) for i in range(3)] == [None, None, 1]
    assert [rule.choose(2 + i, 0, 0, [1.0, 0.1]) for i in range(2)] == [None, 1], "much: sooner"
    looks = [rule.choose(33 + i, 1, 33, [0.5, 1.0]) for i in range(10)]
    assert looks == [None] * 9 + [0], "and it stays for ten updates"
    noise = [rule.choose(60 + i, 0, 43, [1.0, 0.5 + 0.6 * (i % 2)]) for i in range(30)]
    assert noise == [None] * 30, "never two in a row"
    rule = Rule(Autopilot({"int4": INT4}, worth=1.1, confirm=3))
    both = [rule.choose(90 + i, 0, 43, [1.0, 0.5 + 0.1 * (i % 2), 0.55]) for i in range(2)]
    assert both == [None, 2], "two that are better by turns confirm each other"
    rule, again = (Rule(Autopilot({"int4": INT4}, confirm=2)) for _ in range(2))
    assert rule.choose(2, 0, 0, [1.0, 0.5]) is None
    again.load_state_dict(stored(rule.state_dict()))
    assert again.choose(4, 0, 0, [1.0, 0.5]) == 1
    with pytest.raises(ValueError, match="float64 'gained'"):
        again.load_state_dict({"gained": torch.zeros(2)})


def switches(num_updates: int, better: Callable[[int, int], int]) -> list[int]:
    """After which updates. better: the choice that looks better, by update and choice in force."""
    rule = Rule(Autopilot({"int4": INT4}, every=1, confirm=2, dwell=10))
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
    rule = Rule(Autopilot({"int4": INT4}, every=1, worth=worth, confirm=confirm, dwell=dwell))
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
    rule = Rule(Autopilot({"int4": INT4}, every=1, confirm=confirm, dwell=dwell))
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
    forecast = Forecast([GPipe(2), OneForwardOneBackward(4)], TWO, draw.choice([1, 2]), ways)
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
        for found in settings.schedules(own, num_stages):
            for stage in range(num_stages):
                kept = [
                    max_kept(s.actions(stage, num_stages), 1, 1 / s.num_micro_batches, 0.0)
                    for s in (found, own)
                ]
                if isinstance(own, GPipe) or stage == 0:
                    assert kept[0] <= kept[1] + 1e-9


def test_other_numbers_of_micro_batches_are_predicted_from_what_they_took() -> None:
    forecast = Forecast([GPipe(1), GPipe(4)], TWO, 1, WAYS)
    free = measured(float("inf"))
    own_s, _, four_s, _ = forecast.step_s(free, 0)
    assert (own_s, four_s) == (10.0, pytest.approx(10 - 0.6 + 0.6 * 5 / 8)), "work overlaps"
    # Small micro-batches were slower than their share, as is seen once they are in force.
    dear = replace(free, compute_s=[0.6, 0.6])
    back_s, _, four_s, _ = forecast.step_s(dear, 2)
    assert (back_s, four_s) == (pytest.approx(10 - 1.2 * 5 / 8 + 0.6), 10.0)
    again = Forecast([GPipe(1), GPipe(4)], TWO, 1, WAYS)
    again.load_state_dict(stored(forecast.state_dict()))
    assert again.step_s(free, 0) == forecast.step_s(free, 0)
    assert again.step_s(free, 0)[2] == pytest.approx(10 - 0.6 + 1.2 * 5 / 8)
    # Of one message a micro-batch the line carries as many bytes, and latency counts in each.
    slow = Forecast([GPipe(1), GPipe(4)], TWO, 1, [WAYS[0]])
    line_s = 8 * line_bytes(1_000_000) / 8e6
    one_s, four_s = slow.step_s(measured(8e6, step_s=3.0), 0)
    assert four_s == pytest.approx(one_s - 0.6 - 2 * line_s + 0.15 + 2 * line_s, abs=0.2)
