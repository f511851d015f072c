"""The hook of a rank that writes the weights of its stages for followers."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xcloud.base.errors import LinkError
from xcloud.contracts.model import Stage, TaskData
from xcloud.features.weight_patches.codec import Bits, bits_of
from xcloud.features.weight_patches.objects import Files, encode
from xcloud.features.weight_patches.store import PatchStore, Stored, WeightObject
from xcloud.net.frame import Kind
from xcloud.net.link import LinkRecord
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.record.reporter import Reporter

_BYTES = torch.empty(0, dtype=torch.uint8)
CARRIES = {True: ("all weights in BF16",), False: ("changed weights in BF16",)}


class WriteTiming(NamedTuple):
    """When a rank writes. every: updates between two objects. whole_every: objects between two
    snapshots. last_step: of the run."""

    every: int
    whole_every: int
    last_step: int


@dataclass
class WrittenStage:
    """What a rank remembers of what it has written of one stage, in this attempt.

    weights: the last ones that are there; None: the next object is a snapshot.
    kept: the objects that are there, the oldest first.
    """

    stage: int
    module: Stage
    weights: Mapping[str, Bits] | None = None
    step: int = 0
    num_patches: int = 0
    kept: list[tuple[WeightObject, Stored]] = field(default_factory=list)


class PatchWriter(Hook):
    """Copies the weights of its stages between two updates, and writes them in a thread.

    about: run and attempt, of every head.
    record: counts what leaves, for the audit.

    An object that cannot be written is told and left out; the next one is then a snapshot.
    """

    def __init__(
        self,
        stages: Sequence[WrittenStage],
        plan: WriteTiming,
        store: PatchStore,
        about: Mapping[str, Any],
        data: TaskData,
        reporter: Reporter,
        record: LinkRecord,
    ) -> None:
        self._stages = stages
        self._plan = plan
        self._store = store
        self._about = dict(about)
        self._data = data
        self._reporter = reporter
        self._record = record
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._told: list[tuple[str, dict[str, Any]]] = []

    def after_update(self, step: int, report: StepReport) -> None:
        if step % self._plan.every == 0 or step == self._plan.last_step:
            with report.clock.paused():
                self.write(step)

    def write(self, step: int) -> None:
        """Copy the weights, and begin to write them. Waits for the objects before."""
        since_s = time.monotonic()
        # One object under way at most: with a slow bucket training waits here (`pause_s`).
        self.settle()
        # A copy in BF16 on the host: the next update changes the parameters while the thread
        # codes.
        weights = [
            {name: bits_of(tensor) for name, tensor in one.module.exported().items()}
            for one in self._stages
        ]
        pause_s = time.monotonic() - since_s

        def work() -> None:
            try:
                for one, tensors in zip(self._stages, weights, strict=True):
                    self._write(one, tensors, step=step, pause_s=pause_s)
            except Exception as error:  # a thread that dies in silence writes nothing more
                self._failure = error

        self._thread = threading.Thread(target=work, name="weights", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until everything is written that was begun, and tell of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure
        for name, fields in self._told:
            self._reporter.event(name, **fields)
        self._told.clear()

    def _write(
        self, one: WrittenStage, tensors: Mapping[str, Bits], step: int, pause_s: float
    ) -> None:
        is_first = not one.kept
        try:
            # A patch also where a snapshot is due: followers on the way need the step's patch,
            # others the snapshot.
            if one.weights is not None:
                self._put(one, tensors, step=step, base=one.step, pause_s=pause_s)
                one.num_patches += 1
            if one.weights is None or one.num_patches >= self._plan.whole_every:
                self._put(one, tensors, step=step, base=None, pause_s=pause_s)
                one.num_patches = 0
                self._delete_old(one, has_just_begun=is_first)
            one.weights = tensors
            one.step = step
        except (LinkError, OSError, MemoryError) as error:
            # Followers cannot have these weights, so no patch may build on them.
            one.weights = None
            text = f"step {step}: the weights of stage {one.stage} were not written for followers"
            self._told.append(("note", {"text": f"{text} ({error}); the next are a snapshot"}))

    def _put(
        self,
        one: WrittenStage,
        tensors: Mapping[str, Bits],
        step: int,
        base: int | None,
        pause_s: float,
    ) -> None:
        since_s = time.monotonic()
        is_whole = base is None
        data = encode(
            tensors,
            before=None if is_whole else one.weights,
            architecture=one.module.architecture,
            files=self._files() if is_whole else {},
            **self._about,
            stage=one.stage,
            step=step,
            base=base,
            is_last=step == self._plan.last_step,
        )
        made = WeightObject(self._about["attempt"], step, base, stage=one.stage)
        stored = self._store.put(made, data)
        one.kept.append((made, stored))
        self._record.note(Kind.STORED, (_BYTES,), CARRIES[is_whole], stored.num_bytes)
        written = {
            "step": step,
            "stage": one.stage,
            "num_bytes": stored.num_bytes,
            "is_whole": int(is_whole),
            "num_values": sum(bits.size for bits in tensors.values()),
            "pause_s": round(pause_s, 4),
            "write_s": round(time.monotonic() - since_s, 3),
        }
        self._told.append(("weights_written", written))

    def _files(self) -> Files:
        """Return the tokenizers of this side, by their names below a folder."""
        with tempfile.TemporaryDirectory() as folder:
            self._data.save_tokenizers(Path(folder))
            paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}

    def _delete_old(self, one: WrittenStage, has_just_begun: bool) -> None:
        """Delete what a new snapshot supersedes. What leads from the one before to the new one
        stays, for followers that are on that way.

        has_just_begun: earlier attempts may have left something.
        """
        attempt = self._about["attempt"]
        # Single pieces, too: an attempt that was ended amid an object left it without the rest.
        if has_just_begun:
            self._store.delete(
                [
                    name
                    for made, _, name, _ in self._store.pieces()
                    if made.stage == one.stage and made.attempt != attempt
                ]
            )
        snapshots = [number for number, (made, _) in enumerate(one.kept) if made.base is None]
        # The last snapshot but one and all behind it stay.
        begin = snapshots[-2] if len(snapshots) > 1 else 0
        for _, stored in one.kept[:begin]:
            self._store.delete(stored.pieces)
        one.kept = one.kept[begin:]
