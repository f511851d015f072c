"""What a plan says of an exchange between replicas, beside one that is made."""

from collections.abc import Callable, Mapping
from itertools import permutations

import pytest
import torch

from tests.replicas import connected, exchange
from xcloud.comm.compressor import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.averaging import Terms, averager_for
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.merging import Median, weighted_sum
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.schedule import GPipe
from xcloud.simulator.costs import FREE, AveragingCodec
from xcloud.simulator.formulas import PieceWork, exchange_of, memory_of
from xcloud.simulator.plan import Arranged, Plan

SHAPES = {"weight": torch.Size((12, 10)), "bias": torch.Size((37,))}
TENSORS = [torch.ones(shape) for shape in SHAPES.values()]
NUM_VALUES = 157


def test_what_is_planned_of_an_exchange_is_what_it_sends_and_encodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked = {"encode": 0, "decode": 0}  # values, of all replicas

    def new_codec(shapes: Mapping[str, torch.Size]) -> TensorCodec:
        return TensorCodec(shapes, lambda name, shape: Chain(), 7, True)

    def counted(name: str) -> Callable[..., object]:
        own = getattr(TensorCodec, name)

        def count(codec: TensorCodec, *given: object, **named: object) -> object:
            worked[name] += codec.raw_bytes // 4
            return own(codec, *given, **named)

        return count

    for name in worked:
        monkeypatch.setattr(TensorCodec, name, counted(name))
    for num_replicas, merge in ((2, None), (3, None), (5, None), (3, Median()), (5, Median())):
        worked |= {"encode": 0, "decode": 0}
        layout = ClusterLayout({f"c{i}": Cloud(1, (0, 1), replica=i) for i in range(num_replicas)})
        links = connected(num_replicas)
        exchange(
            [averager_for(own, SHAPES, new_codec, Terms(merge or weighted_sum)) for own in links],
            1,
            [TENSORS] * num_replicas,
        )

        lines = dict.fromkeys((f"{a}-{b}" for a, b in permutations(layout.clouds, 2)), FREE)
        costs = AveragingCodec(4 * NUM_VALUES, NUM_VALUES, NUM_VALUES)  # a second for each value
        averaging = GradientAveraging(merge=merge)
        planned = exchange_of(layout, averaging, costs, [1.0], lines)

        of_one = planned.bytes_per_step
        sent = sum(size for pair, size in of_one.items() if pair.startswith("c0-"))
        rounds = 1 if num_replicas == 2 or merge is not None else 2
        weights = 8 * (num_replicas - 1) * rounds
        assert sum(own.num_bytes for own in links) / num_replicas == pytest.approx(sent + weights)
        assert sum(worked.values()) / num_replicas == pytest.approx(planned.codec_s)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_contributions_that_a_robust_merge_looks_at_are_counted_in_memory(
    num_ranks: int,
) -> None:
    """Each of three replicas decodes all of them; the ranks of a cloud share a stage out."""
    clouds = {f"c{i}": Cloud(num_ranks, (0,), replica=i) for i in range(3)}
    work = PieceWork(*[0.0] * len(PieceWork._fields))._replace(trained_bytes=600)
    plan = Plan("data_parallel", (1,), schedule=GPipe(6), compression="none")
    memory = {}
    for merge in (None, Median()):
        strategy = Strategy("data_parallel", None, averaging=GradientAveraging(merge=merge))
        arranged = Arranged(strategy, ClusterLayout(clouds))
        memory[merge] = memory_of(plan, arranged, works=[work], messages={})["c0"]

    mean, robust = memory.values()
    assert robust - mean == 3 * 600 / num_ranks
