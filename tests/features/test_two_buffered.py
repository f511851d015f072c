"""Updates that overlap: what they compute is a plain loop whose gradients are one update old."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.channels import same_state, stored
from tests.configs import build
from tests.nightly import each_once, first_daily
from tests.pipelines import D, ToyStage, samples
from tests.trainers import LAYOUTS, Rank, ranks, update
from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain
from xcloud.comm.memory import DeltaCache, ErrorFeedback
from xcloud.comm.precision import BlockInt
from xcloud.contracts.model import StageOutput
from xcloud.features.checkpoints.resume import changes
from xcloud.features.two_buffered.schedule import TwoBuffered
from xcloud.job.strategy import ModelPlacement
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.batch_plan import BatchPlan, cut
from xcloud.pipeline.control import Signal
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.pipeline.muon import Muon
from xcloud.pipeline.pipeline import random_seed
from xcloud.pipeline.schedule import GPipe, Schedule, max_in_flight, rank_actions
from xcloud.pipeline.settings import Optimizer, Training
from xcloud.simulator.costs import Costs
from xcloud.simulator.prediction import Simulator

STEPS = 7
ADAMW = Optimizer(0.05, 2, clip_norm=0.7)
MUON = Muon(0.05, 2)
INT4 = Chain(int4=BlockInt(4, block=8))


class BlockStage(ToyStage):
    """A toy stage with a matrix that Muon moves, and a layer that is not trained.

    dropout: for one process only, since threads share torch's generator.
    """

    def __init__(self, stage: int, num_stages: int, dropout: float = 0.0) -> None:
        super().__init__(stage, num_stages)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(50 + stage)
            fixed = nn.Linear(D, D).requires_grad_(False)
            self.blocks = nn.ModuleList([nn.Linear(D, D, bias=False), fixed])
        self.layer = nn.Sequential(self.layer, nn.Dropout(dropout), *self.blocks)


def training(**changes: Any) -> Training:
    return Training(**{"max_steps": STEPS, "batch_size": 8, "optimizer": ADAMW} | changes)


def weights(job: list[Rank]) -> dict[int, Tensor]:
    """The trained values of every stage, from the first rank that holds it."""
    found: dict[int, Tensor] = {}
    for rank in job:
        for stage, module in rank.trainer.pipeline.stages.items():
            values = [p.detach().flatten() for p in module.parameters() if p.requires_grad]
            found.setdefault(stage, torch.cat(values))
    return found


def run(job: list[Rank], steps: range) -> list[list[StepReport | str]]:
    return [update(job, step) for step in steps]


def plain_loop(
    settings: Training, m: int, predict: bool, toy: Callable[[int, int], ToyStage] = BlockStage
) -> dict[int, Tensor]:
    """The same updates by one module, one loop and no pipeline."""
    stages = nn.ModuleList([toy(stage, 3) for stage in range(3)])
    stages.train()
    optimizers = [settings.optimizer.build(stage) for stage in stages]
    trained = [p for p in stages.parameters() if p.requires_grad]
    now = [p.detach().clone() for p in trained]
    used_next = [[w.clone() for w in now], [w.clone() for w in now]]  # by batches k and k+1
    plan = BatchPlan(40, settings.batch_size, 1)
    for step in range(1, settings.max_steps + 1):
        used = copy.deepcopy(stages)
        values = used_next.pop(0)
        copies = [p for p in used.parameters() if p.requires_grad]
        for p, value in zip(copies, values, strict=True):
            p.data = value.clone()
        ids = plan.ids(step)
        for i, piece in enumerate(cut(ids, m)):
            batch = samples(piece)
            message = None
            for number, stage in enumerate(used):
                torch.manual_seed(random_seed(7, step, i, number))
                output: StageOutput = stage(message, batch)
                message = output.send
            assert output.loss is not None
            (output.loss / float(settings.batch_size)).backward()
        norm = torch.cat([p.grad.flatten() for p in copies if p.grad is not None]).norm()
        clip = settings.optimizer.clip_norm
        scale = min(1.0, clip / float(norm)) if clip else 1.0
        for p, own in zip(trained, copies, strict=True):
            assert own.grad is not None
            p.grad = own.grad * scale
        before = [p.detach().clone() for p in trained]
        rate = settings.optimizer.learning_rate_at(step, settings.max_steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        after = [p.detach().clone() for p in trained]
        pairs = zip(before, after, strict=True)
        used_next.append([2 * a - b if predict else a for b, a in pairs])
    return {
        number: torch.cat([p.detach().flatten() for p in stage.parameters() if p.requires_grad])
        for number, stage in enumerate(stages)
    }


@pytest.mark.parametrize(("optimizer", "m"), each_once([ADAMW, MUON], [1, 2, 4], count=2))
def test_the_weights_are_those_of_a_plain_loop_with_gradients_one_update_old(
    m: int, optimizer: Optimizer
) -> None:
    """Within rounding: the plain loop adds the gradients of a micro-batch over stages at once."""
    for predict in (True, False):
        settings = training(optimizer=optimizer)
        expected = plain_loop(settings, m, predict)
        schedule = TwoBuffered(m, predict=predict)
        for name in ("one process", "three clouds", "lanes"):
            if name == "lanes" and m == 1:
                continue
            job = ranks(LAYOUTS[name], settings, schedule=schedule, toy=BlockStage)
            run(job, range(1, STEPS + 1))
            for stage, value in weights(job).items():
                torch.testing.assert_close(value, expected[stage], rtol=2e-5, atol=2e-6)


def test_dropout_is_that_of_the_micro_batchs_own_update() -> None:
    dropping = partial(BlockStage, dropout=0.3)
    job = ranks(LAYOUTS["one process"], training(), schedule=TwoBuffered(2), toy=dropping)
    run(job, range(1, STEPS + 1))
    expected = plain_loop(training(), 2, predict=True, toy=dropping)
    for stage, value in weights(job).items():
        torch.testing.assert_close(value, expected[stage], rtol=2e-5, atol=2e-6)


def test_without_clipping_the_bits_are_those_of_the_plain_loop() -> None:
    """With clipping the loop here computes the norm otherwise."""
    settings = training(optimizer=Optimizer(0.05, 2))
    expected = plain_loop(settings, 2, predict=True)
    job = ranks(LAYOUTS["three clouds"], settings, schedule=TwoBuffered(2), toy=BlockStage)
    run(job, range(1, STEPS + 1))
    for stage, value in weights(job).items():
        assert torch.equal(value, expected[stage]), stage


def test_the_bits_are_those_of_one_process_wherever_the_stages_are() -> None:
    found = []
    for name in ("one process", "three clouds"):
        job = ranks(LAYOUTS[name], training(), schedule=TwoBuffered(4), toy=BlockStage)
        run(job, range(1, STEPS + 1))
        found.append(weights(job))
    for stage, value in found[0].items():
        assert torch.equal(value, found[1][stage]), stage


def test_a_gradient_is_one_update_old() -> None:
    """With a rate of 0 in the second update the third one's gradient is the second's place."""
    late = ranks(LAYOUTS["three clouds"], training(), schedule=TwoBuffered(2), toy=BlockStage)
    prompt = ranks(LAYOUTS["three clouds"], training(), toy=BlockStage)
    for job in (late, prompt):
        run(job, range(1, 2))
    assert all(torch.equal(v, weights(prompt)[s]) for s, v in weights(late).items())
    for job in (late, prompt):
        run(job, range(2, 3))
    assert not any(torch.equal(v, weights(prompt)[s]) for s, v in weights(late).items())


@pytest.mark.parametrize("compression", first_daily(["none", "int4", "memory"], count=1))
def test_evaluations_and_checkpoints_in_the_middle_change_no_bit(compression: str) -> None:
    """Before both the next update does not begin early; its gradients are as old."""
    codecs = {
        "none": Compression(),
        "int4": Compression(INT4, INT4),
        "memory": Compression(INT4, INT4, DeltaCache(), ErrorFeedback()),
    }[compression]

    def made(**changes: Any) -> list[Rank]:
        return ranks(
            LAYOUTS["three clouds"], training(**changes), compression=codecs,
            schedule=TwoBuffered(4), toy=BlockStage,
        )  # fmt: skip

    whole, evaluated, resumed = made(), made(evaluate_every=2), made(evaluate_every=2)
    run(whole, range(1, STEPS + 1))
    run(evaluated, range(1, 5))
    states = [stored(rank.state_dict()) for rank in evaluated]
    run(evaluated, range(5, STEPS + 1))
    for rank, state in zip(resumed, states, strict=True):
        rank.load_state_dict(state)
    run(resumed, range(5, STEPS + 1))

    for job in (evaluated, resumed):
        for stage, value in weights(whole).items():
            assert torch.equal(value, weights(job)[stage]), stage
    assert any(".copy 1." in key for key in states[0])


def test_each_copy_of_the_weights_matters_to_a_resumed_run() -> None:
    def made() -> list[Rank]:
        layout = LAYOUTS["one process"]
        settings = training(evaluate_every=2)
        return ranks(layout, settings, schedule=TwoBuffered(2), toy=BlockStage)

    whole = made()
    run(whole, range(1, 3))
    state = stored(whole[0].state_dict())
    run(whole, range(3, 6))
    for number in (0, 1):
        other = made()
        spoiled = dict(state)
        for key, value in state.items():
            if f".copy {number}." in key and isinstance(value, Tensor):
                spoiled[key] = value + 0.1
        other[0].load_state_dict(spoiled)
        run(other, range(3, 6))
        assert not same_state([other[0].state_dict()], [whole[0].state_dict()])


class Asking(Hook):
    def __init__(self, at: int, signal: Signal) -> None:
        self.at, self.asked = at, signal

    def signal(self, step: int) -> Signal:
        return self.asked if step == self.at else Signal.GO_ON


@pytest.mark.parametrize(
    ("at", "signal"), each_once([3, 4], [Signal.STOP, Signal.CHECKPOINT], count=2)
)
def test_a_stop_or_a_checkpoint_comes_with_the_next_update_that_nothing_follows(
    signal: Signal, at: int
) -> None:
    settings = training(evaluate_every=4)
    job = ranks(LAYOUTS["three clouds"], settings, schedule=TwoBuffered(2), toy=BlockStage)
    for rank in job:
        rank.hooks.append(Asking(at, signal))
    told = [{report.signal for report in update(job, step)} for step in range(1, 7)]  # type: ignore[union-attr]

    # Step 4 is evaluated, so nothing is under way then; step 3 has begun step 4.
    assert told == [{Signal.GO_ON}] * 3 + [{signal}] + [{Signal.GO_ON}] * 2


def test_a_skipped_update_leaves_the_weights_and_training_goes_on() -> None:
    settings = training(on_divergence="skip")
    job = ranks(LAYOUTS["three clouds"], settings, schedule=TwoBuffered(2), toy=BlockStage)
    run(job, range(1, 3))
    before = weights(job)
    handles = [
        spoil_copy(rank, stage=1) for rank in job if 1 in rank.trainer.pipeline.stages
    ]  # of the batches that are computed from now on: 4 and later
    reports = [update(job, 3), update(job, 4)]
    for handle in (h for pair in handles for h in pair):
        handle.remove()
    skipped = [{report.skipped is not None for report in r} for r in reports]  # type: ignore[union-attr]
    assert {True} in skipped
    run(job, range(5, 8))

    assert all(value.isfinite().all() for value in weights(job).values())
    assert not any(torch.equal(value, before[stage]) for stage, value in weights(job).items())


def spoil_copy(rank: Rank, stage: int) -> list[Any]:
    copies = rank.trainer.pipeline.copies  # type: ignore[attr-defined]
    biases = [next(p for p in c.modules[stage].parameters() if p.ndim == 1) for c in copies]
    return [b.register_hook(lambda g: torch.full_like(g, torch.nan)) for b in biases]


@pytest.mark.parametrize("num_stages", range(1, 6))
@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_a_window_has_each_action_once_and_waits_for_nothing_later(
    num_stages: int, m: int
) -> None:
    schedule = TwoBuffered(m)
    stages = list(range(num_stages))
    turns = dict.fromkeys(stages, (0, 1))
    order = rank_actions(schedule, stages, num_stages, turns)  # raises where it deadlocks
    for stage in stages:
        own = [a for a in order if a.stage == stage]
        assert own == schedule.window(stage, num_stages)
        assert sorted(a.micro_batch for a in own if a.kind == "forward") == list(range(m, 2 * m))
        ahead = schedule.num_ahead(stage, num_stages)
        backwards = [a.micro_batch for a in own if a.kind == "backward"]
        assert backwards == list(range(ahead, ahead + m))
        bound = max_in_flight(schedule.actions(stage, num_stages), link=lambda i: 0)[0]
        flying = m - ahead
        for action in own:
            flying += 1 if action.kind == "forward" else -1
            assert flying <= bound
    assert [schedule.num_ahead(s, num_stages) for s in (0, num_stages - 1)] == [
        0, m if num_stages > 1 else 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["training.accumulate_steps=2"], "training.accumulate_steps=2 makes several passes"),
        (["strategy=data_parallel"], "strategy=data_parallel"),
        (["strategy=local_updates"], "strategy=local_updates"),
        (["cluster.clouds.cloud_b.shard=true", "cluster.clouds.cloud_b.num_ranks=2"], "shard"),
        (["training.on_divergence=skip", "compression=delta_int4"], "training.on_divergence=skip"),
        (["security/meter=attack"], "security.meter"),
        (["model.lora=null", "model.embeddings=tie"], "model.embeddings=tie"),
    ],
)  # fmt: skip
def test_what_it_cannot_run_with_is_refused_by_name(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build("+exp=lora_clm", "schedule=two_buffered", *words)
    said = str(raised.value)
    assert named in said and ("schedule=two_buffered" in said or "schedule=two buffered" in said)


def predicted_s(schedule: Schedule, num_stages: int, round_trip_s: float) -> float:
    """The step of equal stages: 8 micro-batches of 1 s forward and 2 s backward."""
    layout = ClusterLayout(
        {name: Cloud() for name in "abcde"[:num_stages]},
        LinkProfile(bandwidth_bits_per_s=1e12, latency_s=round_trip_s / 2),
    )
    costs = Costs([1.0] * num_stages, [2.0] * num_stages)
    return Simulator(schedule, layout, agrees=True, num_steps=6).run(costs).step_s


def test_the_simulated_step_does_not_feel_a_round_trip_that_an_update_hides() -> None:
    """An update computes 24 s; the gradients of 6 of 8 micro-batches may be under way."""
    for trip_s in (0.0, 5.0, 17.9):
        assert predicted_s(TwoBuffered(8), 2, trip_s) == pytest.approx(24.0, rel=1e-3)
        assert predicted_s(GPipe(8), 2, trip_s) == pytest.approx(27.0 + trip_s, rel=1e-3)
    assert predicted_s(TwoBuffered(8), 2, 19.0) > 24.5


def test_a_run_does_not_resume_with_gradients_of_another_age() -> None:
    nobody, key = ModelPlacement(), "schedule.predict"
    for saved, now in (({}, {key: "true"}), ({key: "true"}, {}), ({key: "true"}, {key: "false"})):
        assert changes(saved, now, before=nobody, after=nobody).refused
