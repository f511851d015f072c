"""Orders of micro-batches, and gradients of weights that are computed after the others."""

import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.causal_models import batch_of, build, loss_of, saved, where, words
from tests.translation_models import batch_of as pairs_of
from tests.translation_models import build as build_parts
from tests.translation_models import context, run_joined, texts
from xcloud.base.errors import ConfigError
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.models.transformer import Transformer
from xcloud.pipeline.one_forward_one_backward import (
    DeferredWeights,
    OneForwardOneBackward,
    ZeroBubble,
    can_wait,
)
from xcloud.pipeline.schedule import (
    Action,
    GPipe,
    Schedule,
    ideal_ticks,
    max_in_flight,
    rank_actions,
    split_backwards,
)
from xcloud.rank.reports import SavedTensors

SCHEDULES = [
    GPipe(1),
    GPipe(5),
    OneForwardOneBackward(1),
    OneForwardOneBackward(6),
    OneForwardOneBackward(6, 4),
    OneForwardOneBackward(6, 99),
    OneForwardOneBackward(6, 1),
    ZeroBubble(1),
    ZeroBubble(6),
    ZeroBubble(6, 4),
    ZeroBubble(6, 99),
    ZeroBubble(6, 3, 1),
    ZeroBubble(6, 1, 99),
]
# The example of docs/add-a-schedule.md, as a newcomer would copy it.
PAGE = Path(__file__).parents[2] / "docs" / "add-a-schedule.md"
exec(textwrap.dedent(PAGE.read_text().split("```python\n")[1].split("```")[0]), globals())
SCHEDULES.append(OneAtATime(6))  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_every_micro_batch_goes_forward_then_backward_once(
    schedule: Schedule, num_stages: int
) -> None:
    for stage in range(num_stages):
        actions = schedule.actions(stage, num_stages)
        for i in range(schedule.num_micro_batches):
            forward = actions.index(Action("forward", stage, i))
            backward = actions.index(Action("backward", stage, i))
            assert forward < backward
            if split_backwards(actions):
                assert backward < actions.index(Action("weights", stage, i))
        num_kinds = 3 if split_backwards(actions) else 2
        assert len(actions) == num_kinds * schedule.num_micro_batches
        for kind in ("forward", "backward", "weights"):
            order = [a.micro_batch for a in actions if a.kind == kind]
            assert order == sorted(order)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_no_schedule_waits_for_itself(schedule: Schedule, num_stages: int) -> None:
    found = [action for tick in ideal_ticks(schedule, num_stages) for action in tick]

    each = [schedule.actions(stage, num_stages) for stage in range(num_stages)]
    assert sorted(found) == sorted(action for actions in each for action in actions)
    assert len(set(found)) == len(found)


def test_textbook_1f1b_for_four_stages() -> None:
    order = OneForwardOneBackward(8).actions(1, 4)

    assert "".join(f"{a.kind[0]}{a.micro_batch}" for a in order) == (
        "f0f1f2b0f3b1f4b2f5b3f6b4f7b5b6b7"
    )


def test_zero_bubble_for_four_stages_is_zb_h1() -> None:
    """Qi et al., figure 3: the first stage as under 1F1B, the last one puts off three."""
    orders = ["".join(f"{a.kind[0]}{a.micro_batch}" for a in ZeroBubble(8).actions(stage, 4))
              for stage in range(4)]  # fmt: skip

    assert orders[0] == "f0f1f2f3b0f4b1f5b2f6b3f7b4b5b6b7"
    assert orders[2] == "f0f1b0f2b1f3b2w0f4b3w1f5b4w2f6b5w3f7b6w4b7w5w6w7"
    assert orders[3] == "f0b0f1b1f2b2f3b3w0f4b4w1f5b5w2f6b6w3f7b7w4w5w6w7"


@pytest.mark.parametrize(("num_in_flight", "num_in_memory"), [(None, None), (6, None), (6, 2)])
def test_zero_bubble_keeps_no_more_than_it_may(
    num_in_flight: int | None, num_in_memory: int | None
) -> None:
    """From forward to weights: as many as stage 0, or, where asked, as the stage under 1F1B."""
    for stage in range(1, 4):
        own = OneForwardOneBackward(12, num_in_flight).actions(stage, 4)
        actions = ZeroBubble(12, num_in_flight, num_in_memory).actions(stage, 4)
        (under_way,) = max_in_flight(own, lambda i: None).values()

        assert max_in_flight(actions, lambda i: None) == {None: under_way}, "links as in 1F1B"
        kept = most = 0
        for action in actions:
            kept += {"forward": 1, "backward": 0, "weights": -1}[action.kind]
            most = max(most, kept)
        assert most == max(under_way, num_in_memory or num_in_flight or 4)


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    class BackwardFirst(GPipe):
        def actions(self, stage: int, num_stages: int) -> list[Action]:
            return super().actions(stage, num_stages)[::-1]

    with pytest.raises(ValueError, match="2 stages deadlocks"):
        rank_actions(BackwardFirst(2), [0, 1], 2, {0: (0, 1), 1: (0, 1)})


def test_lanes_take_their_own_micro_batches() -> None:
    actions = rank_actions(GPipe(5), [1], 2, {1: (1, 2)})

    assert [a.micro_batch for a in actions] == [1, 3, 1, 3]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_rank_with_several_stages_respects_every_dependency(schedule: Schedule) -> None:
    both = rank_actions(schedule, [0, 1, 2], 3, {s: (0, 1) for s in range(3)})
    position = {action: i for i, action in enumerate(both)}

    for action, at in position.items():
        if action.kind == "forward" and action.stage > 0:
            assert position[action._replace(stage=action.stage - 1)] < at
        if action.kind == "backward" and action.stage < 2:
            assert position[action._replace(stage=action.stage + 1)] < at
        if action.kind == "weights":
            assert position[action._replace(kind="backward")] < at
    for stage in range(3):
        assert [a for a in both if a.stage == stage] == schedule.actions(stage, 3)


@pytest.mark.parametrize("value", [0, -1, "lots", 2.5, True])
def test_a_bad_number_of_micro_batches_dies_at_once(value: object) -> None:
    for kind in (GPipe, OneForwardOneBackward, ZeroBubble):
        with pytest.raises(ConfigError, match="num_micro_batches"):
            kind(value)


Gradients = dict[str, Tensor]


def gradients(module: nn.Module) -> Gradients:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def both(
    module: nn.Module, run: Callable[[], Tensor], passes: int = 2
) -> tuple[Gradients, Gradients, Gradients]:
    """Gradients of a plain backward; of a split one, and what it had before the weights.
    passes: added up, as micro-batches are."""
    found = []
    for defers in (False, True):
        module.zero_grad()
        waiting = []
        for number in range(passes):
            deferred = DeferredWeights(can_wait(module))
            torch.manual_seed(number)  # of dropout
            with deferred if defers else nullcontext():
                loss = run()
                loss.backward()
            waiting.append(deferred)
        found.append(gradients(module))
        for deferred in waiting:
            deferred.compute()
    before, after = found[1], gradients(module)
    return found[0], after, before


def check_equal(plain: Gradients, split: Gradients) -> None:
    assert plain.keys() == split.keys()
    assert all(torch.equal(plain[name], split[name]) for name in plain)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_causal_model_gets_the_same_bits_and_its_matrices_late(
    tmp_path: Path, kind: str
) -> None:
    """gpt2 multiplies by addmm, and its words are tied to the head."""
    saved(kind, tmp_path, tie_word_embeddings=kind == "gpt2")
    (stage,) = build(CausalLM(str(tmp_path)), 1, where(tmp_path))
    batch = batch_of([words(9)], [words(5, 1), words(4, 2)])

    plain, split, before = both(stage.train(), lambda: loss_of([stage], batch))

    check_equal(plain, split)
    late = plain.keys() - before.keys()
    blocks = {name for name in plain if ".layers." in name or ".h." in name}
    matrices = {name for name in blocks if plain[name].ndim == 2}
    assert matrices <= late <= blocks


@pytest.mark.parametrize("checkpointing", [False, True])
def test_of_a_frozen_base_only_the_adapters_wait(tmp_path: Path, checkpointing: bool) -> None:
    saved("llama", tmp_path)
    lora = Lora(r=2, dropout=0.1)
    model = CausalLM(str(tmp_path), lora=lora, activation_checkpointing=checkpointing)
    (stage,) = build(model, 1, where(tmp_path))
    batch = batch_of([words(9)], [words(5, 1)])

    plain, split, before = both(stage.train(), lambda: loss_of([stage], batch))

    check_equal(plain, split)
    assert plain and all(".lora_" in name for name in plain)
    # Nothing below the first block is trained, so no gradient goes back beyond its adapters.
    assert all(".layers.0." in name and "lora_A" in name for name in before)


def test_a_translation_model_with_a_tied_head_gets_the_same_bits(tmp_path: Path) -> None:
    model = Transformer(16, 2, 2, 2, 32)
    stages = nn.ModuleList(build_parts(model, 2, context(tmp_path)))
    batch = pairs_of(texts(6), texts(6, seed=1))

    plain, split, before = both(stages.train(), lambda: run_joined([*stages], batch))

    check_equal(plain, split)
    assert len(before) < len(plain)


def test_under_autocast_sums_are_those_of_autocast() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))
    x = torch.randn(3, 5, 8, requires_grad=True)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = net(x)
        assert found.requires_grad and net[0](x).dtype == torch.float32
        return found.square().sum()

    plain, split, before = both(net, run)

    check_equal(plain, split)
    assert before.keys() == {"3.weight", "3.bias"}
    assert split["0.weight"].dtype == torch.float32


class Shapes(nn.Module):
    """What else may come: one matrix used twice, a matrix made of another, a single row, an
    expanded gradient, a bias without a trained weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.single = nn.Linear(6, 6), nn.Linear(6, 6)
        self.biased = nn.Linear(6, 6)
        self.biased.weight.requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(torch.tanh(self.twice(x)).transpose(0, 1))
        y = torch.nn.functional.linear(y, weight=self.narrow[:6])
        return self.biased(y).sum() + self.single(x[0, 0]).sum()


def test_other_uses_of_linear_layers_get_the_same_bits() -> None:
    net, x = Shapes(), torch.randn(3, 5, 6, requires_grad=True)

    plain, split, before = both(net, lambda: net(x))

    check_equal(plain, split)
    assert plain.keys() - before.keys() == {"twice.weight", "twice.bias"}


def test_nothing_is_put_off_where_nothing_is_differentiated() -> None:
    net = nn.Linear(4, 4)
    deferred = DeferredWeights(can_wait(net))
    with deferred, torch.no_grad():
        found = net(torch.randn(2, 4, requires_grad=True))
    deferred.compute()
    assert not found.requires_grad and net.weight.grad is None


def test_what_waits_counts_as_activations_until_it_is_computed() -> None:
    net, kb = nn.Linear(256, 256, bias=False), 1024
    saved_bytes = SavedTensors()
    with saved_bytes:
        deferred = DeferredWeights(can_wait(net))
        with deferred:
            # tanh keeps its output, the layer its input: 1 kB each.
            loss = torch.tanh(net(torch.ones(1, 256, requires_grad=True))).sum()
            assert saved_bytes.num_bytes == 2 * kb
            loss.backward()
        assert saved_bytes.num_bytes == 2 * kb, "input and output gradient of the layer"
        deferred.compute()
        assert not saved_bytes.num_bytes
    assert saved_bytes.peak_bytes <= 3 * kb
