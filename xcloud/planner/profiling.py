"""Measure a job's work on this machine, in one process: stages, optimizer, fetching, codecs.

Stages are built as ranks build them and run on a few micro-batches of the training data; a model
of equal blocks is cut behind the first and before the last of them, and the blocks between are the
difference. This process reads all fields of the data, as all clouds of a run on one machine do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from xcloud.cluster.layout import ClusterLayout
from xcloud.comm.boundary import Boundary, Message
from xcloud.comm.compression import Compression, Phased
from xcloud.contracts.model import Batch, FreelyCut, SplitModel, Stage
from xcloud.contracts.task import TaskData
from xcloud.job.experiment import Experiment
from xcloud.parallel.exchange import FlatBuffer
from xcloud.parallel.schedule import GPipe
from xcloud.parallel.split_backward import DeferredWeights, can_wait
from xcloud.parallel.strategy import Strategy
from xcloud.plan.profile import BoundaryCodec, CompressorCosts, Curve, Piece, Profile
from xcloud.plan.stopwatch import MOST_TIMES, Stopwatch
from xcloud.planner.codec_profiling import around_averaging_s, averaging_codec, boundary_codec
from xcloud.planner.profile_key import Candidates, device_of, threads_of, what_is_measured
from xcloud.planner.reference import reference_s
from xcloud.rank.loading import context_of
from xcloud.training.memory_meter import SavedTensors, bytes_of
from xcloud.training.settings import autocast_for

BUDGET_S = 0.4  # for the runs of a size, beyond the first two
QUANTITIES = 6  # of a stage and a size; see _Measuring._run_often


def measure(
    job: Experiment,
    candidates: Candidates,
    sizes: Sequence[int],
    report: Callable[[str], None],
) -> Profile:
    """job: with a pipeline's cluster. sizes: of micro-batches, in samples."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_of(job.cluster))
    try:
        with torch.random.fork_rng(devices=[]):
            return _Measuring(job, candidates, sizes, report).profile()
    finally:
        torch.set_num_threads(before)


@dataclass
class _Built:
    """A model's stages as measured. costs: by stage, a row of numbers (see _Measuring._build).
    messages, gradients: by boundary and size."""

    boundaries: list[Boundary]
    costs: list[list[float]]
    messages: dict[tuple[int, int], Message]
    gradients: dict[tuple[int, int], Message]
    trained: dict[str, nn.Parameter]


class _Measuring:
    def __init__(
        self,
        job: Experiment,
        candidates: Candidates,
        sizes: Sequence[int],
        report: Callable[[str], None],
    ) -> None:
        self.job, self.candidates, self.sizes, self.report = job, candidates, sizes, report
        self.device = device_of(job)
        self.watch = Stopwatch(self.device)
        p = range(job.cluster.num_stages)
        fields = frozenset[str]().union(*(job.model.fields(s, len(p)) for s in p))
        self.data: TaskData = job.task.load(fields, job.seed)
        self.ids = job.batch_plan(self.data.num_samples("train")).ids(1)
        self.autocast: Callable[[], AbstractContextManager[object]] = autocast_for(
            job.training.precision, self.device
        )

    def profile(self) -> Profile:
        model, length = self.job.model, self.job.task.max_length
        threads = threads_of(self.job.cluster)
        before_s = reference_s(self.device, threads)
        num_blocks = model.num_blocks(length) if isinstance(model, FreelyCut) else 0
        if num_blocks >= 2:
            assert isinstance(model, FreelyCut)
            first = self._build(model.with_block_counts([1, num_blocks - 1]), 2)
            pieces, kinds = self._of_blocks(model, num_blocks, first)
        else:
            first = self._build(model, self.job.cluster.num_stages)
            kinds = [(first, number) for number in range(len(first.boundaries))]
            pieces = [
                self._piece(f"stage {stage}", row, stage if stage < len(kinds) else None, 0)
                for stage, row in enumerate(first.costs)
            ]
        self.report("measuring compressors")
        compressors = {
            name: CompressorCosts(
                found.label,
                tuple(self._boundary(built, boundary, found) for built, boundary in kinds),
                averaging_codec(first.trained, found, self.watch),
            )
            for name, found in self.candidates.items()
        }
        fetch = [(b, self.watch.median_s(partial(self._batch, b, 0))) for b in self.sizes]
        around_gradients_s, around_changes_s = around_averaging_s(first.trained, self.watch)
        return Profile(
            tuple(pieces),
            compressors,
            what_is_measured(self.job, self.candidates, self.sizes),
            time.time(),
            Curve(fetch),
            tokens_per_sample=self._tokens(),
            around_gradients_s=around_gradients_s,
            around_changes_s=around_changes_s,
            reference_s=(before_s + reference_s(self.device, threads)) / 2,
            train_samples=self.data.num_samples("train"),
        )

    # Pieces.

    def _of_blocks(
        self, model: FreelyCut, num_blocks: int, first: _Built
    ) -> tuple[list[Piece], list[tuple[_Built, int]]]:
        """Pieces of one block each, the first with what stands before it, the last with what
        stands behind; and of each kind of boundary a place where it was met."""
        between = num_blocks - 2
        last = first
        each = [0.0] * len(first.costs[0])
        if between:
            last = self._build(model.with_block_counts([num_blocks - 1, 1]), 2)  # type: ignore[arg-type]
            (front, rest), (most, head) = first.costs, last.costs
            each = [
                max(0.0, (long - short + whole - end) / (2 * between))
                for short, long, whole, end in zip(front, most, rest, head, strict=True)
            ]
        kinds: list[tuple[_Built, int]] = []
        keys: list[tuple[object, bool]] = []
        numbers = []
        for count in range(1, num_blocks):
            cut = model.with_block_counts([count, num_blocks - count])
            boundary = cut.boundary(0, 2, self.job.task.max_length)  # type: ignore[attr-defined]
            key = boundary.fields, boundary.gradient_returns
            if key not in keys:
                keys.append(key)
                met = first if first.boundaries[0].gradient_returns == key[1] else last
                kinds.append((met, 0))
            numbers.append(keys.index(key))
        rows = [first.costs[0], *[each] * between, last.costs[1]]
        # Differences of optimizers would be mostly noise, and each takes its time by the byte.
        measured = [*first.costs, *last.costs]
        per_byte_s = sum(row[-1] for row in measured) / max(1.0, sum(row[-2] for row in measured))
        for row in rows:
            row[-1] = per_byte_s * row[-2]
        pieces = [
            self._piece(f"block {i}", row, boundary, 1)
            for i, (row, boundary) in enumerate(zip(rows, [*numbers, None], strict=True))
        ]
        return pieces, kinds

    def _piece(self, name: str, row: Sequence[float], boundary: int | None, blocks: int) -> Piece:
        n = len(self.sizes)
        forward, backward, kept, weights, put_off, splitting = (
            Curve([(float(b), max(0.0, v)) for b, v in zip(self.sizes, part, strict=True)])
            for part in (row[k * n : (k + 1) * n] for k in range(QUANTITIES))
        )
        parameters, trained, optimizer_s = row[QUANTITIES * n :]
        return Piece(
            name, forward, backward, boundary, round(parameters), round(trained), kept,
            max(0.0, optimizer_s), blocks, weights, put_off, splitting,
        )  # fmt: skip

    def _build(self, model: SplitModel, num_stages: int) -> _Built:
        job, length = self.job, self.job.task.max_length
        self.report(f"measuring {num_stages} stages of {model.describe()}")
        context = context_of(job, self.data, self.device, self.report)
        stages = [
            model.build_stage(stage, num_stages, context).to(self.device)
            for stage in range(num_stages)
        ]
        boundaries = [model.boundary(stage, num_stages, length) for stage in range(num_stages - 1)]
        for stage, boundary in enumerate(boundaries):
            if boundary.start:
                handed = tuple(tensor.detach() for tensor in stages[stage].hand_over())
                stages[stage + 1].take_over(handed)
        found = _Built(boundaries, [[] for _ in stages], {}, {}, {})
        for module in stages:
            module.train()
        runs = {b: self._run_often(stages, boundaries, b, found) for b in self.sizes}
        for stage, module in enumerate(stages):
            trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
            found.trained |= {f"{stage}.{name}": p for name, p in trained.items()}
            row = found.costs[stage]
            for quantity in range(QUANTITIES):
                row += [runs[b][stage][quantity] for b in self.sizes]
            row += [
                float(bytes_of([*module.parameters(), *module.buffers()])),
                float(bytes_of(trained.values())),
                self._optimizer_s([*trained.values()]),
            ]
        return found

    def _run_often(
        self, stages: Sequence[Stage], boundaries: Sequence[Boundary], b: int, found: _Built
    ) -> list[list[float]]:
        """QUANTITIES of each stage: forward and backward seconds (medians), bytes kept, the part
        of the backward that can be put off, bytes kept for that, and how much longer a forward
        and the two parts of its backward take."""
        _, kept = self._run(stages, boundaries, b, 0, found, counts=True)
        started_s = time.perf_counter()
        self._run(stages, boundaries, b, 1, found)
        again = BUDGET_S / max(1e-6, time.perf_counter() - started_s)
        num_times = max(1, min(MOST_TIMES, int(again)))
        times = [self._run(stages, boundaries, b, 2 + i, found)[0] for i in range(num_times)]
        _, put_off = self._run(stages, boundaries, b, 0, found, counts=True, defers=True)
        split = [
            self._run(stages, boundaries, b, 2 + i, found, defers=True)[0]
            for i in range(max(1, num_times // 2))
        ]
        rows = []
        for s in range(len(stages)):
            forward_s, backward_s = (
                statistics.median(run[s][way] for run in times) for way in (0, 1)
            )
            share = statistics.median(run[s][2] / max(1e-9, sum(run[s][1:])) for run in split)
            longer_s = statistics.median(sum(run[s]) for run in split) - forward_s - backward_s
            rows.append(
                [forward_s, backward_s, float(kept[s]), share * backward_s, float(put_off[s]),
                 longer_s]
            )  # fmt: skip
        return rows

    def _run(
        self, stages: Sequence[Stage], boundaries: Sequence[Boundary], b: int, turn: int,
        found: _Built, counts: bool = False, defers: bool = False,
    ) -> tuple[list[list[float]], list[int]]:  # fmt: skip
        """One micro-batch, as the pipeline runs it: seconds of forward, backward and what was put
        off, and, if it counts, bytes kept for the backward, or for what was put off. Between a
        forward and its backward a rank computes other micro-batches, so both begin cold."""
        batch = self._batch(b, turn)
        seconds, kept = [[0.0, 0.0, 0.0] for _ in stages], [0] * len(stages)
        weights = [DeferredWeights(can_wait(module) if defers else ()) for module in stages]
        saved = [SavedTensors() for _ in stages]
        inputs: list[Message | None] = [None]
        outputs: list[Message] = []
        loss = torch.zeros((), device=self.device)
        for s, module in enumerate(stages):
            received = inputs[s]
            if received is not None and boundaries[s - 1].gradient_returns:
                for value in received.values():
                    if value.is_floating_point():
                        value.requires_grad_()
            fields = self.job.model.fields(s, len(stages)) | {"ids"}
            visible = {name: value for name, value in batch.items() if name in fields}
            self.watch.cool()
            started_s = self.watch.now_s()
            with self.autocast(), weights[s], saved[s] if counts else nullcontext():
                output = module(received, visible)
            seconds[s][0] = self.watch.now_s() - started_s
            kept[s] = 0 if defers else saved[s].peak_bytes
            if output.send is not None:
                outputs.append(output.send)
                inputs.append({name: t.detach().clone() for name, t in output.send.items()})
                found.messages[s, b] = inputs[-1]  # type: ignore[assignment]
            if output.loss is not None:
                loss = output.loss
            del output
        for s in reversed(range(len(stages))):
            pairs: list[tuple[Tensor, Tensor | None]]
            if s == len(stages) - 1:
                pairs = [(loss / b, None)]
                del loss
            else:
                if not boundaries[s].gradient_returns:
                    break
                made, given = outputs.pop(), found.gradients[s, b]
                pairs = [(made[f.name], given[f.name]) for f in boundaries[s].gradient_fields]
                del made
            needed = [pair for pair in pairs if pair[0].requires_grad]
            self.watch.cool()
            started_s = self.watch.now_s()
            with weights[s], saved[s] if counts else nullcontext():
                if needed:
                    torch.autograd.backward([p[0] for p in needed], [p[1] for p in needed])
            del pairs, needed  # letting go of the graph takes its time in the pipeline, too
            seconds[s][1] = self.watch.now_s() - started_s
            if defers:
                kept[s] = saved[s].num_bytes
                started_s = self.watch.now_s()
                weights[s].compute()
                seconds[s][2] = self.watch.now_s() - started_s
            received = inputs[s]
            if s and received is not None:
                message: Message = {}
                for entry in boundaries[s - 1].gradient_fields:
                    value = received[entry.name]
                    given_back = value.grad
                    message[entry.name] = (
                        torch.zeros_like(value) if given_back is None else given_back
                    )
                found.gradients[s - 1, b] = message
        return seconds, kept

    def _optimizer_s(self, trained: list[nn.Parameter]) -> float:
        if not trained:
            return 0.0
        settings = self.job.training.optimizer
        optimizer = settings.build(trained)
        # A rate of 0 leaves the weights as they are.
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        buffer = FlatBuffer(trained)

        def update() -> None:
            """As the trainer makes it."""
            buffer.zero()
            if settings.clip_norm:
                buffer.squared_norm()
                buffer.scale(1.0)
            optimizer.step()

        took_s = self.watch.median_s(update, cold=True)
        for parameter in trained:
            parameter.grad = None
        return took_s

    def _boundary(
        self, built: _Built, number: int, compression: Compression | Phased
    ) -> BoundaryCodec:  # fmt: skip
        messages, gradients = (
            {b: found[number, b] for b in self.sizes if (number, b) in found}
            for found in (built.messages, built.gradients)
        )
        last = compression.at(self.job.max_steps)  # of phases the last one
        return boundary_codec(built.boundaries[number], last, messages, gradients, self.watch)

    # Little things.

    def _batch(self, b: int, turn: int) -> Batch:
        """Samples `turn * b` on, of the first batch."""
        picked = self.ids[(torch.arange(b) + turn * b) % len(self.ids)]
        batch = self.data.batch("train", picked)
        return {n: t if n == "ids" else t.to(self.device) for n, t in batch.items()}

    def _tokens(self) -> float:
        """Of a sample, as the loss counts them."""
        return float(self.data.weight(self.ids)) / len(self.ids)


def as_pipeline(job: Experiment, cluster: ClusterLayout, micro_batches: int) -> Experiment:
    """The job over these clouds, as they are, with a schedule that suits any number of ranks."""
    schedule = GPipe(max(micro_batches, cluster.min_micro_batches()))
    return replace(job, cluster=cluster, strategy=Strategy(), schedule=schedule, plan=None)
