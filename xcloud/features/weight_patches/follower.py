"""A follower: it brings the weights of all stages to the newest step, and a folder after them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError, SealError
from xcloud.base.run_folder import LOCK_FILE
from xcloud.contracts.architecture import tensors_of
from xcloud.contracts.model import BuildContext
from xcloud.features.weight_patches.codec import Bits, tensor_of
from xcloud.features.weight_patches.objects import StageWeights, check_no_folder, decode
from xcloud.features.weight_patches.store import (
    At,
    PatchRoute,
    PatchStore,
    Stored,
    WeightObject,
    best_route,
    steps_of_all,
)
from xcloud.record.files import read_json, replace_text

FOLLOWED_FILE = "followed.json"
"""Of the folder: run, attempt and step of its weights; step is null until they are there."""


class News(NamedTuple):
    """What a look has brought. num_bytes: that were read for it."""

    attempt: int
    step: int
    num_bytes: int
    num_patches: int
    num_snapshots: int
    is_last: bool


def joined(stages: Mapping[int, StageWeights]) -> dict[str, Bits]:
    """Return the weights of all stages by name. Raises DataError where two of them differ."""
    parts = (weights.tensors for _, weights in sorted(stages.items()))
    return tensors_of(parts, are_equal=np.array_equal)


class Follower:
    """The weights of a run as far as they have been followed.

    run: its name.
    weights: the weights of each stage; empty as long as there are none.
    problems: what is wrong with objects that are there, in words. Such an object is not read
        again; another way around it, such as a later snapshot, is waited for.
    is_behind: the last look found newer weights that nothing leads to.
    last_step: of the run, after which no object comes; None: nobody knows.
    """

    def __init__(
        self, store: PatchStore, run: str, num_stages: int, last_step: int | None = None
    ) -> None:
        self._store = store
        self._run = run
        self._num_stages = num_stages
        self._last_step = last_step
        self.weights: dict[int, StageWeights] = {}
        self._refused: set[WeightObject] = set()
        self._other_runs: set[int] = set()  # their attempts, which lie in the same place
        self.problems: list[str] = []
        self.is_behind = False

    @property
    def has_lost_the_end(self) -> bool:
        """Return whether the last weights of the run are refused: nothing leads to them later."""
        attempt = max((at for at, _ in self._at().values()), default=0)
        # Of an earlier attempt they do not count: a resumed run writes its last step again.
        last = [one for one in self._refused if one.step == self._last_step]
        return any(one.attempt >= attempt for one in last)

    def look(self) -> News | None:
        """Bring all stages to the newest step that they can have; None if there is nothing new.

        Where an object is refused, or is listed and not there, all stages stay where they are or
        take another way.
        """
        # Listed and gone: the writer has deleted it since. Unlike a refused one it may be named
        # again.
        missing = set[WeightObject]()
        # Each turn takes at least one object out of the way, so it ends.
        while True:
            listed = {
                one: stored
                for one, stored in self._store.listed().items()
                if one.attempt not in self._other_runs
            }
            left_out = self._refused | missing
            there = {one: stored for one, stored in listed.items() if one not in left_out}
            route = best_route(there, self._at(), self._num_stages)
            if route is None:
                self.note_gap(listed)
                return None
            # Taken over for all stages at once or not at all: a folder never has stages of two
            # steps.
            if (found := self._taken(route, there, missing)) is not None:
                self.weights = found
                self.is_behind = False
                return self._news(route, there)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all stages, by name, which share the follower's memory."""
        return {name: tensor_of(bits) for name, bits in joined(self.weights).items()}

    def _at(self) -> dict[int, At]:
        return {
            stage: (weights.head.attempt, weights.head.step)
            for stage, weights in self.weights.items()
        }

    def _taken(
        self, route: PatchRoute, there: Mapping[WeightObject, Stored], missing: set[WeightObject]
    ) -> dict[int, StageWeights] | None:
        """Return the weights at the end of a route; None if an object on it is refused, or is not
        there any more though it was listed, and then is put into `missing`."""
        found: dict[int, StageWeights] = {}
        for stage, objects in route.objects.items():
            weights = self.weights.get(stage)
            for one in objects:
                try:
                    data = self._store.get(there[one])
                    if data is None:
                        missing.add(one)
                        return None
                    # An object that fails leaves `weights` of this stage where they were: decoding
                    # copies.
                    weights = decode(data, before=weights)
                    self._check(one, weights)
                except (DataError, SealError) as error:
                    if one.attempt not in self._other_runs:
                        self._refused.add(one)
                    self.problems.append(f"{one.in_words} is refused: {error}")
                    return None
            assert weights is not None, "a stage that is not there begins with a snapshot"
            found[stage] = weights
        try:
            joined(found)
            check_no_folder({name for one in found.values() for name in one.files})
        except DataError as error:
            # Which stage is wrong nobody can tell, so none of them moves to these weights.
            self._refused |= {way[-1] for way in route.objects.values() if way}
            self.problems.append(f"the stages of step {route.step} are refused: {error}")
            return None
        return found

    def _check(self, one: WeightObject, weights: StageWeights) -> None:
        """Raise DataError unless an object is what its name says, of this run."""
        head = weights.head
        # Names are the bucket's, heads the writer's: without this an old object could be put under
        # a newer name.
        if WeightObject(head.attempt, head.step, head.base, stage=head.stage) != one:
            raise DataError(f"by its head it is another one (step {head.step}, {head.stage})")
        if head.run != self._run:
            # An attempt is of one run. Of another run, a newer one would hide this run's weights,
            # and its last step would look like the end of this one.
            self._other_runs.add(one.attempt)
            raise DataError(f"it is of the run {head.run!r:.200}, not of {self._run!r}")

    def _news(self, route: PatchRoute, there: Mapping[WeightObject, Stored]) -> News:
        objects = [one for way in route.objects.values() for one in way]
        num_snapshots = sum(one.base is None for one in objects)
        return News(
            route.attempt,
            route.step,
            num_bytes=sum(there[one].num_bytes for one in objects),
            num_patches=len(objects) - num_snapshots,
            num_snapshots=num_snapshots,
            is_last=all(weights.head.is_last for weights in self.weights.values()),
        )

    def note_gap(self, there: Mapping[WeightObject, Stored]) -> None:
        """Note whether there are newer weights that nothing leads to."""
        attempt = max((one.attempt for one in there), default=0)
        by_stage = [
            [one for one in there if (one.attempt, one.stage) == (attempt, stage)]
            for stage in range(self._num_stages)
        ]
        steps = steps_of_all(by_stage)
        here = min(self._at().values(), default=(attempt, 0))
        self.is_behind = bool(steps) and here < (attempt, steps[0])
        if self.is_behind:
            text = f"nothing leads from step {here[1]} to step {steps[0]}: patches are missing"
            if text not in self.problems:
                self.problems.append(text)


class FollowedFolder:
    """A folder of transformers or peft that has the newest weights, in BF16.

    model: joins the stages (CausalLM). task: reads the tokenizers.

    Raises ConfigError for a folder with other files, or of another run.
    """

    def __init__(self, path: Path, run: str, model: Any, task: Any) -> None:
        self._path = path
        self._run = run
        self._model = model
        self._task = task
        self._is_made = False
        about = read_json(path / FOLLOWED_FILE)
        others = path.is_dir() and {file.name for file in path.iterdir()} - {LOCK_FILE}
        if others and not about:
            raise ConfigError(
                f"{path} holds files of something else: give --as a folder that is empty or new"
            )
        if about and about.get("run") != run:
            raise ConfigError(
                f"{path} has the weights of the run {about.get('run')!r}, not of {run!r}: give "
                "--as another folder"
            )

    def update(self, follower: Follower, news: News, context: BuildContext) -> None:
        """Bring the folder to the follower's weights. The file of weights is replaced as a whole,
        so whoever opens it has the weights of one step; what stands beside it is written once."""
        # What transformers reads as the dtype of the file's tensors.
        of_last = follower.weights[max(follower.weights)].architecture
        architecture = {**of_last, "config": {**of_last["config"], "dtype": "bfloat16"}}
        file, tensors = self._model.joined(follower.tensors(), architecture)
        if not self._is_made:
            # Of two stages that have a file of one name the first counts, where texts are read.
            stages = [one for _, one in sorted(follower.weights.items(), reverse=True)]
            files = {name: content for one in stages for name, content in one.files.items()}
            self._write_beside(architecture, files, context)
            self._is_made = True
        # In the same folder, as os.replace is atomic within one file system only.
        draft = self._path / f".{file}.{os.getpid()}"
        try:
            save_file(tensors, draft, {"format": "pt"})
            os.replace(draft, self._path / file)
        except SafetensorError as error:
            raise DataError(f"{self._path / file} cannot be written: {error}") from error
        finally:
            draft.unlink(missing_ok=True)
        # After the weights: a crash in between leaves newer weights than the note says, never
        # older ones.
        self._note(news.attempt, news.step)

    def _write_beside(
        self, architecture: dict[str, Any], files: Mapping[str, bytes], context: BuildContext
    ) -> None:
        """Write all that stands beside the weights: config, tokenizers, a base of the run's
        own."""
        self._path.mkdir(parents=True, exist_ok=True)
        # First the mark that the folder is a follower's, so that one that was interrupted here can
        # begin again.
        if not (self._path / FOLLOWED_FILE).exists():
            self._note(None, None)
        folders = self._model.write_beside(architecture, context, self._path)
        with tempfile.TemporaryDirectory() as made:
            for name, content in files.items():
                path = Path(made, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            text = self._task.saved_text(Path(made))
        for folder in folders:
            text.save(folder)

    def _note(self, attempt: int | None, step: int | None) -> None:
        about = {"run": self._run, "attempt": attempt, "step": step}
        replace_text(self._path / FOLLOWED_FILE, text=json.dumps(about) + "\n")
