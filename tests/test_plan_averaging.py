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
from xcloud.layout import Cloud, ClusterLayout
from xcloud.simulator.costs import FREE, AveragingCodec
from xcloud.simulator.formulas import exchange_of

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
