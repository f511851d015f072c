import sys

import pytest
import torch

from tests.channels import InProcessLink
from tests.nightly import each_once
from tests.pipelines import BORDER, CPU, ToyStage, in_threads, pipelines, samples
from tests.runs import one_at_a_time
from xcloud.base.errors import FrameError, LinkTimeout
from xcloud.comm.channel import PLAIN, Codecs, Message, ReceiveChannel, SendChannel
from xcloud.comm.compression import ChannelId
from xcloud.comm.compressor import Chain
from xcloud.comm.precision import Cast
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import Batch, Stage, StageOutput
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.batch_plan import cut
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.pipeline import InFlight, Pipeline
from xcloud.pipeline.schedule import GPipe, Schedule

IDS = torch.arange(12)
IDENTITY = ChannelId(7, 0, "forward", 0, 1)
LOCAL = ClusterLayout({"local": Cloud(1, [0, 1])}, "free")
LAYOUTS = {
    "two clouds": ClusterLayout({"a": Cloud(), "b": Cloud()}),
    "2x2": ClusterLayout({"a": Cloud(2), "b": Cloud(2)}),
    "2 feeding 1": ClusterLayout({"a": Cloud(2), "b": Cloud(1)}),
    "1 feeding 2": ClusterLayout({"a": Cloud(1), "b": Cloud(2)}),
    "2 feeding 3": ClusterLayout({"a": Cloud(2), "b": Cloud(3)}),
    "one cloud": ClusterLayout({"all": Cloud(2, [0, 1], one_stage_per_rank=True)}, "free"),
}
SCHEDULES = [
    GPipe(4),
    OneForwardOneBackward(4),
    OneForwardOneBackward(4, 3),
    ZeroBubble(4),
    ZeroBubble(4, 3, 1),
]


def step(ranks: list[Pipeline], schedule: Schedule, number: int = 1) -> dict[int, dict]:
    """One step of all ranks. Returns stage -> parameter name -> gradient summed over lanes."""
    pieces = dict(enumerate(cut(IDS, schedule.num_micro_batches)))
    batches = {i: samples(ids) for i, ids in pieces.items()}
    losses = in_threads(
        [lambda r=rank: r.step(schedule, batches, number, weight=12.0) for rank in ranks]
    )
    gradients: dict[int, dict] = {-1: {"loss": sum(losses)}}
    for rank in ranks:
        for stage, module in rank.stages.items():
            for name, parameter in module.named_parameters():
                total = gradients.setdefault(stage, {})
                total[name] = total.get(name, 0) + parameter.grad
    return gradients


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_two_ranks_are_bit_equal_to_one_process(schedule: Schedule) -> None:
    one = step(pipelines(LOCAL), schedule)
    two = step(pipelines(LAYOUTS["two clouds"]), schedule)

    for stage in one:
        for name in one[stage]:
            assert torch.equal(one[stage][name], two[stage][name]), (stage, name)


@pytest.mark.parametrize(("layout", "schedule"), each_once(LAYOUTS.values(), SCHEDULES, count=12))
def test_any_number_of_ranks_gives_the_gradients_of_one_process(
    layout: ClusterLayout, schedule: Schedule
) -> None:
    one = step(pipelines(LOCAL), schedule)
    many = step(pipelines(layout), schedule)

    for stage in one:
        for name in one[stage]:
            # Lanes add their shares in another order than one process does.
            torch.testing.assert_close(many[stage][name], one[stage][name], rtol=1e-5, atol=1e-5)


def test_weights_that_wait_get_the_bits_of_1f1b() -> None:
    """With lanes, in rank 0 and in the middle, interleaved, and over two passes."""
    layouts = [
        ClusterLayout({name: Cloud() for name in "abcd"}),
        ClusterLayout({"a": Cloud(2), "b": Cloud(1), "c": Cloud(3)}),
        ClusterLayout({"a": Cloud(1, [0, 2]), "b": Cloud(1, [1, 3])}),
        ClusterLayout({"a": Cloud(2, [0, 2]), "b": Cloud(1, [1, 3])}),
        ClusterLayout({"a": Cloud(1, [0, 1, 2])}, "free"),
    ]
    for layout in layouts:
        found = []
        for schedule in (OneForwardOneBackward(6, 3), ZeroBubble(6, 3), ZeroBubble(6)):
            ranks = pipelines(layout)
            step(ranks, schedule)
            found.append(step(ranks, schedule, number=2))
        for stage in found[0]:
            for name in found[0][stage]:
                assert all(torch.equal(one[stage][name], found[0][stage][name]) for one in found)


def test_the_gradient_leaves_before_those_of_the_weights_are_computed() -> None:
    (rank,) = pipelines(LOCAL)
    weight = rank.stages[1].layer.weight
    sender = rank.ports[0].backward_out[0]
    done: list[object] = []
    seen = []

    class Spy:
        def send(self, *message: object, known: object) -> object:
            seen.append((len(done), weight.grad is None))
            return sender.send(*message, known=known)

    rank.ports[0].backward_out[0] = Spy()
    batches = {i: samples(ids) for i, ids in enumerate(cut(IDS, 4))}
    rank.step(ZeroBubble(4), batches, 1, 12.0, after_micro_batch=done.append)

    assert seen[0] == (0, True)
    assert weight.grad is not None
    # Stage 0 is done with its backward, stage 1 with its weights,.
    assert done == [0, 1, 0, 1, 0, 1, 0, 1]


def test_a_gradient_that_came_back_goes_on_as_torch_takes_it_and_imports_no_sympy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sympy takes half a second of CPU in the first update of a run, also of one that restarts."""
    weight = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    gradients = [torch.randn(2, 4), torch.randn(2, 4)]
    inputs = torch.randn(2, 3)

    def outputs() -> list[torch.Tensor]:
        hidden = inputs @ weight.float()
        return [hidden.sin(), hidden * hidden]

    torch.autograd.backward(outputs(), gradients)
    expected, weight.grad = weight.grad, None
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    InFlight({}, None, None, None, weights=None).backward(outputs(), gradients)
    assert expected is not None and weight.grad is not None
    assert torch.equal(weight.grad, expected)


def test_gradients_are_those_of_the_whole_batch_at_once() -> None:
    whole = pipelines(LOCAL)[0]
    batch = samples(IDS)
    sent = whole.stages[0](None, batch).send
    loss = whole.stages[1](sent, batch).loss / 12.0
    loss.backward()
    expected = {s: m.layer.weight.grad.clone() for s, m in whole.stages.items()}

    found = step(pipelines(LAYOUTS["2x2"]), GPipe(4))

    for stage in (0, 1):
        torch.testing.assert_close(found[stage]["layer.weight"], expected[stage])
    torch.testing.assert_close(found[-1]["loss"], loss.detach())


def test_an_owner_of_both_ends_sends_out_and_takes_back() -> None:
    """Text and labels with one owner, the middle elsewhere (U-shape)."""
    three = ClusterLayout({"local": Cloud(1, [0, 1, 2])}, "free")
    u_shape = ClusterLayout({"owner": Cloud(1, [0, 2]), "other": Cloud(1, [1])})
    for schedule in SCHEDULES:
        one = step(pipelines(three), schedule)
        two = step(pipelines(u_shape), schedule)
        for stage in one:
            for name in one[stage]:
                assert torch.equal(one[stage][name], two[stage][name])


def test_both_directions_are_compressed() -> None:
    plain = step(pipelines(LAYOUTS["two clouds"]), GPipe(4))
    forward = step(pipelines(LAYOUTS["two clouds"], forward=Chain(h=Cast("bfloat16"))), GPipe(4))
    backward = step(pipelines(LAYOUTS["two clouds"], backward=Chain(h=Cast("bfloat16"))), GPipe(4))

    assert not torch.equal(forward[1]["layer.weight"], plain[1]["layer.weight"])
    # A compressed gradient changes what the first stage learns, and nothing in the last.
    assert torch.equal(backward[1]["layer.weight"], plain[1]["layer.weight"])
    assert not torch.equal(backward[0]["layer.weight"], plain[0]["layer.weight"])


def test_evaluation_goes_through_the_same_boundary() -> None:
    ranks = pipelines(LAYOUTS["2 feeding 1"])
    pieces = list(IDS.split(5))

    found = in_threads([lambda r=rank: r.predict(pieces, samples, 9) for rank in ranks])

    assert found[0] == found[1] == {}
    assert found[2] == {i: [i % 4 + 1] for i in range(12)}


class Dropping(ToyStage):
    """Answers with what is left of its rows."""

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        if self.is_last:
            return super().forward(received, batch)
        sent = super().forward(received, batch).send
        assert sent is not None
        dropped = torch.nn.functional.dropout(sent["hidden"], 0.5, self.training)
        return StageOutput(send={**sent, "hidden": dropped})

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        assert received is not None
        rows = received["hidden"].split(received["counts"].tolist())
        rows = [torch.nn.functional.dropout(of, 0.5, self.training) for of in rows]
        return [(1e6 * of).long().flatten().tolist() for of in rows]


def test_nothing_is_dropped_in_an_evaluation_and_training_drops_again() -> None:
    """In no stage, whatever the step."""
    stages = {stage: Dropping(stage, 2) for stage in range(2)}
    found = []
    for step in (3, 4):
        ranks = pipelines(LAYOUTS["two clouds"], stages=stages)
        calls = [lambda r=rank, s=step: r.predict([IDS], samples, s) for rank in ranks]
        found.append(in_threads(calls)[1])
        assert all(stage.training for stage in stages.values())
    assert found[0] == found[1]
    assert all(0 not in values for values in found[0].values())


def test_a_step_that_is_out_of_order_is_a_clear_error() -> None:
    link = InProcessLink("rank 1 of cloud 'b'")
    link.send(MessageKey(Kind.ACTIVATION, 3, 0), ())

    with pytest.raises(
        FrameError, match=r"expected activation of step 4.*got activation of step 3"
    ):
        link.recv(MessageKey(Kind.ACTIVATION, 4, 0), 1.0)


def test_a_silent_peer_is_a_timeout_with_its_name() -> None:
    with pytest.raises(LinkTimeout, match="rank 1 of cloud 'b'"):
        InProcessLink("rank 1 of cloud 'b'").recv(MessageKey(Kind.ACTIVATION, 4, 0), 0.01)


def test_a_message_of_another_shape_than_promised_is_refused() -> None:
    link, clock = InProcessLink(), StepClock()
    plain = lambda: Codecs([(None, PLAIN)])  # noqa: E731
    key = MessageKey(Kind.ACTIVATION, 1, 0)
    counts = torch.tensor([1, 2], dtype=torch.int16)
    channel = ReceiveChannel(link, BORDER.fields, plain, clock, IDENTITY, CPU, 1.0, 8)

    link.send(key, (counts, torch.zeros(4, 8)))
    with pytest.raises(FrameError, match="'hidden'"):
        channel.recv(key, {"ids": torch.arange(2)})

    link.send(key, (counts, torch.zeros(3, 8), torch.zeros(1)))
    with pytest.raises(FrameError, match="1 tensors too many"):
        channel.recv(key, {"ids": torch.arange(2)})


def test_raw_bytes_are_the_fp32_size_of_floating_fields() -> None:
    link, clock = InProcessLink(), StepClock()
    channel = SendChannel(link, BORDER.fields, lambda: Codecs([(None, PLAIN)]), clock, IDENTITY)
    counts = torch.tensor([1, 2], dtype=torch.int16)
    message, two = {"counts": counts, "hidden": torch.zeros(3, 8)}, {"ids": torch.arange(2)}

    channel.send(MessageKey(Kind.ACTIVATION, 1, 0), message, two)
    channel.send(MessageKey(Kind.EVALUATION, 1, 0), message, two)

    assert channel.raw_bytes == 3 * 8 * 4


def test_a_stage_that_lacks_a_method_is_named() -> None:
    class Bare(Stage):
        def forward(self, received: object, batch: object) -> StageOutput:
            return StageOutput()

    with pytest.raises(TypeError, match="Bare has no predict, and is a last stage"):
        Bare().predict({}, {})
    with pytest.raises(TypeError, match="Bare has no take_over for its boundary's `start`"):
        Bare().take_over(())
    with pytest.raises(TypeError, match=r"gpipe m=1 has 'weights' actions, and no `splits`"):
        GPipe(1).splits(Bare())
    with pytest.raises(TypeError, match=r"abstract class Stage .*forward"):
        Stage()  # type: ignore[abstract]


def test_dropout_differs_by_stage_micro_batch_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of one width must not drop the same places."""
    seeds: list[int] = []
    ranks = pipelines(LAYOUTS["two clouds"])
    for rank in ranks:
        for module in rank.stages.values():
            module.register_forward_pre_hook(
                lambda *given: seeds.append(torch.default_generator.initial_seed())
            )
    # torch's generator is one for all threads.
    monkeypatch.setattr(Pipeline, "_forward", one_at_a_time(Pipeline._forward))
    for number in (1, 2):
        step(ranks, GPipe(4), number)
    assert len(seeds) == len({*seeds}) == 2 * 2 * 4
