"""A toy split model and its pipelines in threads of one process, for tests without networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link import InProcessLink
from xcloud.comm.border import Border, BorderField, Message
from xcloud.comm.chain import Chain
from xcloud.comm.channel import Codec, Codecs, ReceiveChannel, SendChannel
from xcloud.comm.compressor import Compressor
from xcloud.comm.draws import ChannelId
from xcloud.comm.memory import Memory, NoMemory
from xcloud.comm.step_clock import StepClock
from xcloud.parallel.pipeline import BorderPorts, Pipeline
from xcloud.parallel.stage import Batch, Stage, StageOutput

D = 8
CPU = torch.device("cpu")
BORDER = Border(
    (
        BorderField("counts", (), torch.int16),
        BorderField("hidden", (D,), torch.float32, "counted"),
    ),
    max_rows_per_sample=5,
)


class ToyStage(Stage):
    """Stage 0 embeds "x" [B, D] once per row, the last one compares with "y" [B, D]."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stage)
            self.layer = nn.Linear(D, D)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        if self.is_first:
            counts = (batch["ids"] % 4 + 1).to(torch.int16)
            rows = batch["x"].repeat_interleave(counts.long(), 0)
        else:
            assert received is not None
            counts, rows = received["counts"], received["hidden"]
        hidden = torch.tanh(self.layer(rows))
        if not self.is_last:
            return StageOutput(send={"counts": counts, "hidden": hidden})
        target = batch["y"].repeat_interleave(counts.long(), 0)
        return StageOutput(loss=((hidden - target) ** 2).sum())

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        assert received is not None
        return [[int(n)] for n in received["counts"]]


def samples(ids: Tensor) -> Batch:
    """x and y of a sample depend on its id alone."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(2, 100, D, generator=generator)
    return {"ids": ids, "x": table[0, ids], "y": table[1, ids]}


def pipelines(
    layout: ClusterLayout,
    forward: Compressor | None = None,
    backward: Compressor | None = None,
    border: Border = BORDER,
    record_from: int | None = None,
    *,
    borders: Mapping[int, Border] | None = None,
    stages: Mapping[int, Stage] | None = None,
    memory: Memory | None = None,
) -> list[Pipeline]:
    """One pipeline per rank, joined by in-process links. record_from: as of StepClock.
    stages, with the borders behind them: instead of the toy's (one border for all).
    memory: of both directions.
    """
    num_stages = layout.num_stages
    ports: list[dict[int, BorderPorts]] = [{} for _ in range(layout.num_ranks)]
    clocks = [StepClock(record_from) for _ in range(layout.num_ranks)]
    for stage in range(num_stages - 1):
        border = borders[stage] if borders is not None else border
        before, behind = layout.ranks_of(stage), layout.ranks_of(stage + 1)
        for rank in {*before, *behind}:
            ports[rank][stage] = BorderPorts(border)
        for a, b in {
            (layout.owner(stage, i), layout.owner(stage + 1, i))
            for i in range(len(before) * len(behind))
        }:
            if a == b:
                continue
            down, up = InProcessLink(), InProcessLink()

            def codecs(compressor: Compressor | None) -> Codecs:
                return Codecs([(None, Codec(compressor or Chain(), memory or NoMemory()))])

            there, back = (
                ChannelId(7, stage, "forward", a, b),
                ChannelId(7, stage, "backward", b, a),
            )
            ports[a][stage].forward_out[b] = SendChannel(
                down, border.fields, lambda: codecs(forward), clocks[a], there
            )
            ports[b][stage].forward_in[a] = ReceiveChannel(
                down, border.fields, lambda: codecs(forward), clocks[b], there, CPU, 20
            )
            ports[b][stage].backward_out[a] = SendChannel(
                up, border.gradient_fields, lambda: codecs(backward), clocks[b], back
            )
            ports[a][stage].backward_in[b] = ReceiveChannel(
                up, border.gradient_fields, lambda: codecs(backward), clocks[a], back, CPU, 20
            )
    made = []
    for rank in range(layout.num_ranks):
        held = layout.placement(rank).stages
        lanes = {s: (layout.ranks_of(s).index(rank), len(layout.ranks_of(s))) for s in held}
        modules = {s: stages[s] if stages else ToyStage(s, num_stages) for s in held}
        made.append(
            Pipeline(
                rank, modules, num_stages, ports[rank], layout.owner, lanes, CPU, 7, clocks[rank]
            )
        )
    return made


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all at once, as ranks do; the first failure is raised."""
    results: list[Any] = [RuntimeError("did not end")] * len(calls)

    def work(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
