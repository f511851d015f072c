"""Weights for followers: the codec, objects, the way to the newest step, and a folder that is what
the run's export would be."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.causal_models import SMALL, build, saved, where
from tests.configs import build as build_job
from tests.configs import composed
from tests.line_links import Proxy
from tests.nightly import each_once, first_daily
from tests.owners import Owners, address, keys_of
from tests.runs import command, free_port, read
from tests.vllm_server import VllmServer
from xcloud import use
from xcloud.base.errors import ConfigError, DataError, LinkClosed
from xcloud.features.checkpoints.resume import check_can_go_on
from xcloud.features.weight_patches import command as command_module
from xcloud.features.weight_patches import feature as feature_module
from xcloud.features.weight_patches import store as store_module
from xcloud.features.weight_patches.codec import (
    Bits,
    ValueChanges,
    bits_of,
    decode_changes,
    encode_changes,
    tensor_of,
)
from xcloud.features.weight_patches.command import follow
from xcloud.features.weight_patches.figures import WEIGHTS
from xcloud.features.weight_patches.follower import FollowedFolder, Follower
from xcloud.features.weight_patches.objects import decode, encode
from xcloud.features.weight_patches.store import (
    PatchStore,
    Stored,
    WeightObject,
    best_route,
    opening,
    plain,
    sealing,
)
from xcloud.features.weight_patches.writer import PatchWriter, WriteTiming, WrittenStage
from xcloud.job.config import EXPERIMENT_FILE, Settings
from xcloud.launch.local import run
from xcloud.line.mailbox import ObjectStore
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.net.link import LinkRecord

RUN = "toy s1"
ABOUT = {"run": RUN, "attempt": 1, "stage": 0, "is_last": False}


# --- the codec


def drawn(*shape: int, seed: int = 0) -> Bits:
    return bits_of(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (70, 41), (9000,)])
def test_values_come_back_to_the_bit(shape: tuple[int, ...], share: float) -> None:
    draw = np.random.default_rng(round(1000 * share) + len(shape))
    for _ in range(5):
        before = draw.integers(0, 1 << 16, shape, dtype=np.uint16)
        is_moved = draw.random(shape) < share
        now = np.where(is_moved, draw.integers(0, 1 << 16, shape), before).astype(np.uint16)
        kept = before.copy()

        changes = encode_changes(before, now)

        assert np.array_equal(decode_changes(before, changes), now)
        assert np.array_equal(before, kept), "the values before are not touched"
        assert changes.num_changed == int((now != before).sum())


def test_a_small_update_of_a_model_takes_little_more_than_its_entropy() -> None:
    weights = 0.02 * torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    before = bits_of(weights)
    now = bits_of(weights + 1e-6 * torch.sign(torch.randn(200_000)))

    changes = encode_changes(before, now)

    share = changes.num_changed / now.size
    entropy_bits = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    assert 0.02 < share < 0.08
    assert 8 * len(changes.gaps) < 1.05 * now.size * entropy_bits
    assert len(changes.differences) < 0.4 * changes.num_changed, "most moved by one step"


def test_rounding_is_that_of_bf16_and_the_live_weights_are_copied() -> None:
    weights = torch.tensor([1.00390625, -0.0, float("inf"), 3.0], dtype=torch.bfloat16)
    bits = bits_of(weights)
    weights.zero_()
    assert tensor_of(bits).tolist() == [1.0, 0.0, float("inf"), 3.0]
    assert bits[1] == 0x8000


@pytest.mark.parametrize("seed", range(60))
def test_damaged_changes_are_refused_or_harmless(seed: int) -> None:
    draw = random.Random(seed)
    before = drawn(40, 17)
    now = before.copy()
    now.reshape(-1)[:: draw.randint(1, 300)] += np.uint16(draw.randint(1, 900))
    honest = encode_changes(before, now)
    count = honest.num_changed
    parts = [bytearray(honest.gaps), bytearray(honest.differences)]
    damaged = draw.choice(parts)
    match draw.randrange(4):
        case 0:
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        case 1:
            del damaged[draw.randrange(len(damaged)) :]
        case 2:
            damaged += bytes(draw.randint(1, 9))
        case 3:
            count = draw.choice([0, count + 1, 680, 681, 1 << 40])
    try:
        found = decode_changes(before, ValueChanges(count, *map(bytes, parts)))
    except DataError:
        return
    assert found.shape == before.shape


def test_a_few_bytes_that_would_unpack_to_gigabytes_are_refused() -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = bomb.compress(bytes(1 << 24)) + bomb.flush()
    assert len(data) < 20_000
    with pytest.raises(DataError, match="no string of at most 1 bytes"):
        decode_changes(drawn(300), ValueChanges(0, data, differences=data))


# --- objects


def weights_of(**tensors: Bits) -> dict[str, Bits]:
    return dict(tensors)


def test_a_snapshot_and_a_patch_give_the_weights_with_what_stands_beside_them() -> None:
    first = weights_of(a=drawn(4, 6), b=drawn(50, seed=2))
    second = weights_of(a=first["a"], b=drawn(50, seed=3))
    whole = encode(first, None, {"lora": False}, {"t/x.json": b"{}"}, step=2, base=None, **ABOUT)
    patch = encode(second, first, {"lora": False}, {}, step=4, base=2, **ABOUT)

    before = decode(whole, before=None)
    found = decode(patch, before=before)

    assert found.head.step == 4 and found.architecture == {"lora": False}
    assert found.files == {"t/x.json": b"{}"}
    assert found.tensors.keys() == second.keys()
    assert all(np.array_equal(found.tensors[name], second[name]) for name in second)
    assert all(np.array_equal(before.tensors[name], first[name]) for name in first)


def test_other_weights_than_the_digest_says_are_refused() -> None:
    first = weights_of(a=drawn(300))
    now = first["a"].copy()
    now[7] ^= 1
    patch = encode({"a": now}, first, {}, {}, step=4, base=2, **ABOUT)
    other = first["a"].copy()
    other[200] ^= 1
    before = decode(encode({"a": other}, None, {}, {}, step=2, base=None, **ABOUT), before=None)
    with pytest.raises(DataError, match="have another digest than it says"):
        decode(patch, before=before)


def test_a_patch_of_another_step_or_of_other_tensors_is_refused() -> None:
    first = weights_of(a=drawn(9))
    patch = encode(first, first, {}, {}, step=4, base=2, **ABOUT)
    with pytest.raises(DataError, match="changes the weights of step 2, and here is none"):
        decode(patch, before=None)
    for tensors, said in (({"b": drawn(9)}, "other tensors"), ({"a": drawn(8)}, "before it was")):
        before = decode(encode(tensors, None, {}, {}, step=2, base=None, **ABOUT), before=None)
        with pytest.raises(DataError, match=said):
            decode(patch, before=before)


def with_head(data: bytes, change: Any) -> bytes:
    size = int.from_bytes(data[4:8], "little")
    head = json.loads(data[8 : 8 + size])
    change(head)
    text = json.dumps(head).encode()
    return data[:4] + len(text).to_bytes(4, "little") + text + data[8 + size :]


HOSTILE: dict[str, tuple[Any, str]] = {
    "a huge tensor": (lambda h: h["tensors"][0].update(shape=[1 << 40]), r"in 600 bytes"),
    "huge data": (lambda h: h["tensors"][0].update(value_bytes=1 << 60), "bytes of data, its he"),
    "changes without a base": (lambda h: h["tensors"][0].update(num_changed=1 << 50), "snapshot"),
    "a negative size": (lambda h: h["tensors"][0].update(gap_bytes=-8), "greater than or equal"),
    "a path": (lambda h: h.update(files={"../x": 2}), "no plain name"),
    "a file of a name that no disk takes": (
        lambda h: h.update(files={"é" * 200: 2}),
        "no plain name",
    ),
    "a file that is a folder": (
        lambda h: h.update(files={"x/y": 1, "x": 1}),
        "folder of another",
    ),
    "a shape that numpy cannot have": (
        lambda h: h["tensors"].insert(
            0, {**h["tensors"][0], "name": "b", "value_bytes": 0, "shape": [0, 1 << 62]}
        ),
        "larger than any tensor",
    ),
    "a file at the root": (lambda h: h.update(files={"/etc/x": 2}), "no plain name"),
    "two of a name": (
        lambda h: (h["tensors"].append({**h["tensors"][0], "shape": [0], "value_bytes": 0}),),
        "two tensors of one name",
    ),
    "more than is known": (lambda h: h.update(more=1), "Extra inputs"),
    "a text as a step": (lambda h: h.update(step="2"), "valid integer"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_head_is_refused_in_words(name: str) -> None:
    change, said = HOSTILE[name]
    data = encode({"a": drawn(300)}, None, {}, {"x": b"ab"}, step=2, base=None, **ABOUT)
    assert decode(with_head(data, lambda head: None), before=None) is not None, "as it was: taken"
    with pytest.raises(DataError, match=said):
        decode(with_head(data, change), before=None)


def test_no_stage_replaces_a_tensor_of_another_and_a_later_step_is_taken(tmp_path: Path) -> None:
    store = PatchStore(ObjectStore(str(tmp_path)), protect=plain)

    def write(step: int, stage: int, **tensors: Bits) -> None:
        about = {**ABOUT, "stage": stage, "step": step, "base": None}
        made = WeightObject(1, step, None, stage=stage)
        store.put(made, encode(tensors, None, {}, {}, **about))

    follower = Follower(store, run=RUN, num_stages=2)
    for step, shared in ((2, drawn(7, seed=3)), (4, drawn(7, seed=4))):
        write(step, 0, a=drawn(7), shared=drawn(7, seed=4))
        write(step, 1, b=drawn(7), shared=shared)
        news = follower.look()
        if step == 2:
            assert news is None and "'shared'" in follower.problems[0]
    assert news is not None and news.step == 4  # both have the same of a tied tensor
    assert [*follower.tensors()] == ["a", "shared", "b"]


@pytest.mark.parametrize("seed", range(80))
def test_a_damaged_object_is_refused(seed: int) -> None:
    draw = random.Random(seed)
    first = weights_of(a=drawn(40), b=drawn(7, seed=5))
    whole = encode(first, None, {}, {}, step=2, base=None, **ABOUT)
    now = {"a": drawn(40, seed=1), "b": first["b"]}
    patch = encode(now, first, {}, {}, step=4, base=2, **ABOUT)
    before = decode(whole, before=None)
    damaged = bytearray(draw.choice([whole, patch]))
    if draw.random() < 0.3:
        del damaged[draw.randrange(len(damaged)) :]
    else:
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    try:
        found = decode(bytes(damaged), before=before)
    except DataError:
        return
    # What the digest does not cover may differ: numbers of the head, which its name has, too.
    assert any(
        all(np.array_equal(found.tensors[n], bits) for n, bits in tensors.items())
        for tensors in (first, now)
    )


# --- the way to the newest step


def there(*objects: tuple[int, int | None, int], attempt: int = 1) -> dict[WeightObject, Stored]:
    """step, base and stage of each; a snapshot has ten times the bytes of a patch."""
    return {
        WeightObject(attempt, step, base, stage): Stored((), 100 if base is None else 10)
        for step, base, stage in objects
    }


def steps(way: list[WeightObject]) -> list[tuple[int, int | None]]:
    return [(one.step, one.base) for one in way]


def test_a_current_follower_takes_patches_and_a_late_one_the_newest_snapshot() -> None:
    objects = there((1, None, 0), (2, 1, 0), (3, 2, 0), (3, None, 0), (4, 3, 0))
    late = best_route(objects, {}, num_stages=1)
    current = best_route(objects, {0: (1, 2)}, num_stages=1)
    assert late is not None and steps(late.objects[0]) == [(3, None), (4, 3)]
    assert current is not None and steps(current.objects[0]) == [(3, 2), (4, 3)]
    assert best_route(objects, {0: (1, 4)}, num_stages=1) is None


def test_a_snapshot_is_taken_where_patches_would_take_more_bytes() -> None:
    patches = [(step, step - 1, 0) for step in range(2, 20)]
    found = best_route(there((19, None, 0), *patches), {0: (1, 1)}, num_stages=1)
    assert found is not None and steps(found.objects[0]) == [(19, None)]


def test_all_stages_go_to_the_newest_step_that_each_can_have() -> None:
    objects = there((1, None, 0), (2, 1, 0), (3, 2, 0), (1, None, 1), (2, 1, 1))
    found = best_route(objects, {}, num_stages=2)
    assert found is not None and found.step == 2
    assert best_route(objects, {0: (1, 2), 1: (1, 2)}, num_stages=2) is None


def test_after_a_gap_only_a_snapshot_leads_on() -> None:
    gap = there((1, None, 0), (3, 2, 0), (4, 3, 0))
    assert best_route(gap, {0: (1, 1)}, num_stages=1) is None
    healed = gap | there((4, None, 0))
    found = best_route(healed, {0: (1, 1)}, num_stages=1)
    assert found is not None and steps(found.objects[0]) == [(4, None)]


def test_the_newest_attempt_counts_even_if_it_is_at_an_earlier_step() -> None:
    objects = there((9, None, 0)) | there((6, None, 0), attempt=2)
    found = best_route(objects, {0: (1, 9)}, num_stages=1)
    assert found is not None and (found.attempt, found.step) == (2, 6)


# --- a writer and a follower


class Module(torch.nn.Module):
    """A stage of a matrix and a row."""

    architecture: Mapping[str, Any] = {"max_length": 8}

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = 0.02 * torch.randn(30, 20, generator=torch.Generator().manual_seed(seed))
        self.seed = seed

    def exported(self) -> dict[str, Tensor]:
        return {f"w{self.seed}": self.weight, f"b{self.seed}": self.weight[0]}

    def train_a_little(self, by: float = 1e-5) -> None:
        self.weight += by * torch.sign(torch.randn(30, 20))


class Log:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})


class Trainer:
    """The ranks of a run that writes: one for each stage."""

    def __init__(
        self,
        url: Path,
        modules: list[Any],
        attempt: int = 1,
        protects: Sequence[Any] = (plain, plain),
        whole_every: int = 3,
        last_step: int = 99,
        data: Any = None,
    ) -> None:
        self.modules = modules
        self.log = Log()
        self.records = [LinkRecord(to="followers") for _ in modules]
        no_tokenizer = SimpleNamespace(save_tokenizers=lambda folder: None)
        self.writers = [
            PatchWriter(
                [WrittenStage(stage, module)],
                plan=WriteTiming(2, whole_every, last_step),
                store=PatchStore(ObjectStore(str(url)), protects[stage]),
                about={"run": RUN, "attempt": attempt},
                data=data or no_tokenizer,
                reporter=self.log,  # type: ignore[arg-type]
                record=record,
            )
            for (stage, module), record in zip(enumerate(modules), self.records, strict=True)
        ]

    def train(self, *steps: int) -> None:
        for step in steps:
            for module in self.modules:
                module.train_a_little()
            for writer in self.writers:
                writer.write(step)
                writer.settle()


def following(url: Path, num_stages: int, protect: Any = plain) -> Follower:
    return Follower(PatchStore(ObjectStore(str(url), writes=False), protect), RUN, num_stages)


def agree(follower: Follower, modules: list[Any]) -> bool:
    found = follower.tensors()
    expected = {k: v.bfloat16() for module in modules for k, v in module.exported().items()}
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path, [Module(0), Module(1)])


def files(url: Path) -> list[Path]:
    return sorted((url / "patches").iterdir())


def test_a_follower_has_the_weights_of_every_step_to_the_bit(
    trainer: Trainer, tmp_path: Path
) -> None:
    follower = following(tmp_path, 2)
    assert follower.look() is None and not follower.is_behind
    for step in range(2, 20, 2):
        trainer.train(step)
        news = follower.look()
        assert news is not None and news.step == step
        assert (news.num_snapshots, news.num_patches) == ((2, 0) if step == 2 else (0, 2))
        assert agree(follower, trainer.modules)
        assert follower.look() is None
    assert not follower.problems


def test_a_late_follower_takes_a_snapshot_and_old_objects_are_deleted(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.train(*range(2, 62, 2))
    follower = following(tmp_path, 2)
    news = follower.look()
    assert news is not None and news.step == 60 and news.num_snapshots == 2
    assert agree(follower, trainer.modules)
    of_a_stage = [file for file in files(tmp_path) if file.name.split("-")[3] == "0000"]
    assert len([file for file in of_a_stage if "whole" in file.name]) == 2
    assert len(of_a_stage) <= 2 * (1 + 3)


def test_damage_is_told_and_the_next_snapshot_leads_on(trainer: Trainer, tmp_path: Path) -> None:
    follower = following(tmp_path, 2)
    trainer.train(2)
    follower.look()
    kept = [module.weight.bfloat16() for module in trainer.modules]
    trainer.train(4)
    patch = next(f for f in files(tmp_path) if "whole" not in f.name and "-0001-0000" in f.name)
    patch.write_bytes(patch.read_bytes()[:-3])

    assert follower.look() is None and follower.is_behind
    assert "the patch from step 2 to step 4 of stage 1 is refused" in follower.problems[0]
    assert "nothing leads from step 2 to step 4" in follower.problems[1]
    assert all(torch.equal(follower.tensors()[f"w{n}"], kept[n]) for n in range(2))

    trainer.train(6, 8)  # with the third patch comes a snapshot
    news = follower.look()
    assert news is not None and news.step == 8 and not follower.is_behind
    assert agree(follower, trainer.modules)


def test_a_follower_is_behind_if_one_stage_is(trainer: Trainer, tmp_path: Path) -> None:
    """Though the other one has the newest step."""
    follower = following(tmp_path, 2)
    trainer.train(2, 4)
    follower.look()
    older = follower.weights[1]
    follower.weights[1] = replace(older, head=older.head.model_copy(update={"step": 2}))
    follower.note_gap(PatchStore(ObjectStore(str(tmp_path)), plain).listed())
    assert follower.is_behind


def test_an_object_that_is_listed_and_not_there_is_asked_for_once_a_look(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = following(tmp_path, 2)
    trainer.train(2)
    asked: list[str] = []

    def get(self: ObjectStore, name: str, max_bytes: int) -> None:
        asked.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "get", get)
        assert follower.look() is None
    assert 1 <= len(asked) == len({*asked}) <= 2
    assert follower.look() is not None


def test_following_ends_where_the_last_weights_of_the_run_are_refused(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module, "END_WITHIN_S", 0.2)
    store = PatchStore(ObjectStore(str(tmp_path), writes=False), plain)
    follower = Follower(store, RUN, 2, last_step=4)
    folder: Any = SimpleNamespace(update=lambda *given: None)
    context: Any = None
    arguments: Any = SimpleNamespace(once=False, reload=None)
    trainer.train(2)
    follower.look()
    trainer.train(4)
    patch = next(f for f in files(tmp_path) if "whole" not in f.name and "-0001-0000" in f.name)
    patch.write_bytes(patch.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"the run's last weights are refused: .*step 4"):
        command_module.keep_current(follower, folder, arguments, context, url="here")


def test_a_patch_that_is_missing_is_told_and_the_next_snapshot_is_waited_for(
    trainer: Trainer, tmp_path: Path
) -> None:
    follower = following(tmp_path, 2)
    trainer.train(2)
    follower.look()
    trainer.train(4)
    next(file for file in files(tmp_path) if "whole" not in file.name).unlink()
    trainer.train(6)
    assert follower.look() is None and follower.is_behind
    assert follower.problems == ["nothing leads from step 2 to step 6: patches are missing"]
    trainer.train(8)
    news = follower.look()
    assert news is not None and news.step == 8 and agree(follower, trainer.modules)


def test_a_resumed_run_begins_with_a_snapshot_and_leaves_nothing_of_the_attempt_before(
    trainer: Trainer, tmp_path: Path
) -> None:
    follower = following(tmp_path, 2)
    trainer.train(2, 4, 6)
    follower.look()
    resumed = Trainer(tmp_path, [Module(0), Module(1)], attempt=2)
    resumed.train(4)
    news = follower.look()
    assert news is not None and (news.attempt, news.step, news.num_snapshots) == (2, 4, 2)
    assert agree(follower, resumed.modules)
    assert {int(file.name.split("-")[0]) for file in files(tmp_path)} == {2}


def test_what_cannot_be_written_is_told_and_the_next_object_is_a_snapshot(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(self: ObjectStore, name: str, data: bytes) -> None:
        raise LinkClosed("the mailbox cannot be reached")

    follower = following(tmp_path, 2)
    trainer.train(2)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", put)
        trainer.train(4)
    assert "step 4: the weights of stage 0 were not written" in str(trainer.log.events)
    trainer.train(6)
    news = follower.look()
    assert news is not None and news.step == 6 and agree(follower, trainer.modules)


def test_an_object_in_several_pieces_is_read_once_all_are_there(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PIECE_BYTES", 500)
    follower = following(tmp_path, 2)
    trainer.train(2)
    pieces = files(tmp_path)
    last = pieces[-1]
    content = last.read_bytes()
    last.unlink()
    assert len(pieces) > 4 and follower.look() is None
    last.write_bytes(content)
    assert follower.look() is not None and agree(follower, trainer.modules)


def leave(url: Path, attempt: int, number: int = 0, count: int = 1, **changes: Any) -> None:
    """Write a snapshot of step 8 of both stages, as another attempt or run would have left it."""
    keep = changes.pop("keep", 1.0)
    for stage in range(2):
        tensors = {name: bits_of(t) for name, t in Module(stage).exported().items()}
        about = {"run": RUN, "attempt": attempt, "step": 8, "base": None, "is_last": True}
        data = encode(tensors, None, Module.architecture, {}, stage=stage, **about | changes)
        name = WeightObject(attempt, step=8, base=None, stage=stage).name(number, count)
        (url / "patches").mkdir(exist_ok=True)
        (url / "patches" / name).write_bytes(data[: int(len(data) * keep)])


LEFT = {
    "a later step of the attempt before": ({"attempt": 1}, ""),
    "an object that was cut short": ({"attempt": 2, "keep": 0.9}, "bytes of data, its head says"),
    "an empty one": ({"attempt": 2, "keep": 0.0}, "does not begin as an object with weights does"),
    "one of two pieces": ({"attempt": 2, "count": 2}, ""),
    "a piece of a number that is not there": ({"attempt": 2, "number": 5}, ""),
    "an earlier run of another name": ({"attempt": 1, "run": "other s1"}, ""),
    "another run, by a clock ahead": (
        {"attempt": 9, "run": "other s1"},
        "it is of the run 'other",
    ),
    "another step under this name": ({"attempt": 2, "step": 4}, "by its head it is another one"),
    "a patch under a snapshot's name": (
        {"attempt": 2, "base": 2},
        "it changes the weights of step 2",
    ),
}


@pytest.mark.parametrize(("left", "said"), LEFT.values(), ids=LEFT)
def test_what_lies_in_the_folder_besides_is_never_taken_for_weights_of_the_run(
    left: dict[str, Any], said: str, tmp_path: Path
) -> None:
    resumed = Trainer(tmp_path, [Module(2), Module(3)], attempt=2)
    resumed.train(4, 6)
    leave(tmp_path, **left)
    follower = following(tmp_path, 2)
    news = follower.look()
    assert news is not None and (news.attempt, news.step) == (2, 6) and not news.is_last
    assert agree(follower, resumed.modules)
    if said:
        assert any(said in problem for problem in follower.problems)
    else:
        assert not follower.problems


def test_a_new_attempt_deletes_pieces_that_an_earlier_one_left(tmp_path: Path) -> None:
    leave(tmp_path, attempt=1)
    leave(tmp_path, attempt=1, count=2)
    leave(tmp_path, attempt=9, number=1, count=3)
    Trainer(tmp_path, [Module(0), Module(1)], attempt=2).train(2)
    assert {int(file.name.split("-")[0]) for file in files(tmp_path)} == {2}


def test_objects_of_another_run_are_refused(trainer: Trainer, tmp_path: Path) -> None:
    trainer.train(2)
    follower = Follower(PatchStore(ObjectStore(str(tmp_path)), plain), "another s1", 2)
    assert follower.look() is None
    assert "it is of the run 'toy s1', not of 'another s1'" in follower.problems[0]


def test_an_object_that_is_too_large_is_not_read(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.train(2)
    monkeypatch.setattr(store_module, "MAX_BYTES", 1000)
    follower = following(tmp_path, 2)
    assert follower.look() is None
    assert "bytes; at most 1,000 are read" in follower.problems[0]


def test_sealed_weights_open_for_their_reader_alone_and_only_in_their_place(
    tmp_path: Path,
) -> None:
    seals = sealing(keys_of("cloud_a", ["cloud_b"]), reader="cloud_b")
    trainer = Trainer(tmp_path, [Module(0)], protects=[seals])
    trainer.train(2)
    (file,) = files(tmp_path)
    assert b"max_length" not in file.read_bytes()
    opens = opening(keys_of("cloud_b", ["cloud_a"]), cloud_of=lambda stage: "cloud_a")
    follower = following(tmp_path, 1, opens)
    assert follower.look() is not None and agree(follower, trainer.modules)

    for me, peers in (("cloud_c", ["cloud_a"]), ("cloud_b", ["cloud_c"])):
        other = opening(keys_of(me, peers), cloud_of=lambda stage: "cloud_a")
        assert following(tmp_path, 1, other).look() is None
    file.rename(file.with_name(file.name.replace("-00000002-", "-00000004-")))
    moved = following(tmp_path, 1, opens)
    assert moved.look() is None and "not one that cloud_a sealed" in moved.problems[0]


@pytest.mark.parametrize("reader", first_daily(["cloud_c", "cloud_b"], count=1))
def test_clouds_of_two_owners_write_for_a_third_or_one_of_them_each_with_its_own_key(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = build_job(
        *SMALL, EVERY, "cluster/wan=sealed", address("cloud_b"),
        f"training.patches.url={tmp_path}", f"training.patches.reader={reader}",
    )  # fmt: skip
    job.check()
    protects = []
    for rank, (me, other) in enumerate((("cloud_a", "cloud_b"), ("cloud_b", "cloud_a"))):
        keys = keys_of(me, [other, "cloud_c"])
        monkeypatch.setattr(feature_module, "this_clouds_keys", lambda keys=keys: keys)
        protects.append(feature_module.protection(job, rank))
    trainer = Trainer(tmp_path, [Module(0), Module(1)], protects=protects)
    others = sorted({"cloud_a", "cloud_b"} - {reader})
    opens = opening(keys_of(reader, others), job.cluster.stage_cloud)
    follower = following(tmp_path, 2, opens)
    for step in (2, 4):
        trainer.train(step)
        assert follower.look() is not None and agree(follower, trainer.modules)

    swapped = Trainer(tmp_path, [Module(0), Module(1)], attempt=2, protects=protects[::-1])
    swapped.train(2)
    assert follower.look() is None
    assert "not one that cloud_a sealed" in " ".join(follower.problems)


def test_what_leaves_is_counted_for_the_audit_and_the_summary(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.train(2, 4)
    described = trainer.records[0].described()
    carries = {one["parts"][0]["carries"]: one["num_bytes"] for one in described}
    own = [file for file in files(tmp_path) if "-0000-0000-" in file.name]
    sizes = {"whole" in file.name: file.stat().st_size for file in own}
    assert carries == {"all weights in BF16": sizes[True], "changed weights in BF16": sizes[False]}
    assert {(one["to"], one["kind"]) for one in described} == {("followers", "stored")}

    summary = WEIGHTS.in_summary([e for e in trainer.log.events if "num_bytes" in e])
    found = summary["weight_patches"]
    assert (found["num_patches"], found["num_snapshots"]) == (2, 2)
    assert found["patch_bytes"] + found["snapshot_bytes"] == sum(
        file.stat().st_size for file in files(tmp_path)
    )
    [(label, _, remark)] = WEIGHTS.rows(summary)
    assert label == "weight patches" and "% of whole weights; 2 snapshots" in remark
    told = [e for e in trainer.log.events if e["event"] == "weights_written"]
    assert [(e["step"], e["stage"], e["is_whole"], e["num_values"]) for e in told] == [
        (2, 0, 1, 620), (2, 1, 1, 620), (4, 0, 0, 620), (4, 1, 0, 620)
    ]  # fmt: skip
    for seconds in ("pause_s", "write_s"):
        assert all(0 <= e[seconds] < 60 for e in told)
    told = [e | {"pause_s": 0.25, "write_s": 1.5} for e in told]
    found = WEIGHTS.in_summary(told)["weight_patches"]
    assert (found["pause_s"], found["write_s"]) == (1.0, 6.0)
    assert found["share_of_whole"] == found["patch_bytes"] / (2 * 2 * 620)


# --- the folder


def tokenizer_of() -> SimpleNamespace:
    """Stands for a task whose tokenizer is one file."""

    def save(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")

    return SimpleNamespace(saved_text=lambda folder: SimpleNamespace(save=save))


@pytest.mark.parametrize(
    ("kind", "lora"), each_once(["qwen3_moe", "llama"], [Lora(r=2), None], count=1)
)
def test_the_folder_is_the_export_of_two_stages_rounded_to_bf16(
    tmp_path: Path, kind: str, lora: Lora | None
) -> None:
    saved(kind, tmp_path / "base")
    model = CausalLM(checkpoint=str(tmp_path / "base"), lora=lora)
    at = where(tmp_path / "cache")
    stages = build(model, 2, at)
    (tmp_path / "box").mkdir()
    trainer = Trainer(tmp_path / "box", [*stages], last_step=6)
    follower = following(tmp_path / "box", 2)
    folder = FollowedFolder(tmp_path / "served", RUN, model, tokenizer_of())
    for step in (2, 4, 6):
        with torch.no_grad():
            for stage in stages:
                for parameter in stage.parameters():
                    if parameter.requires_grad:
                        parameter.add_(1e-3 * torch.randn_like(parameter))
        for writer in trainer.writers:
            writer.write(step)
            writer.settle()
        news = follower.look()
        assert news is not None and news.is_last is (step == 6)
        folder.update(follower, news, at)

        tensors = {k: v for stage in stages for k, v in stage.exported().items()}
        model.join(tensors, stages[-1].architecture, at, tmp_path / "joined")
        name = "model.safetensors" if lora is None else "adapter_model.safetensors"
        exported = load_file(tmp_path / "joined" / name)
        served = load_file(tmp_path / "served" / name)
        assert served.keys() == exported.keys()
        for key, tensor in exported.items():
            assert torch.equal(served[key], tensor.bfloat16()), key
    beside = {file.name for file in (tmp_path / "joined").iterdir()}
    mine = {file.name for file in (tmp_path / "served").iterdir()}
    assert mine == beside | {"followed.json", "tokenizer.json"}
    assert json.loads((tmp_path / "served" / "followed.json").read_text())["step"] == 6
    if lora is None:
        assert json.loads((tmp_path / "served" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_with_files_of_something_else_is_left_alone(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="holds files of something else: give --as a folder"):
        FollowedFolder(tmp_path, RUN, None, None)
    (tmp_path / "followed.json").write_text(json.dumps({"run": "another s1", "step": 2}))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="has the weights of the run 'another s1', not of"):
        FollowedFolder(tmp_path, RUN, None, None)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / "followed.json").write_text(json.dumps({"run": RUN, "step": 2}))
    FollowedFolder(tmp_path, RUN, None, None)  # its own: goes on


# --- settings

EVERY = "training.patches.every=2"
REFUSED = [
    (["cluster/wan=real"], "training.patches.url is not set"),
    (["strategy=data_parallel"], "strategy=data_parallel makes 2 of it"),
    (
        ["cluster=two_clouds_dp", "+cluster.clouds.cloud_b.shard=true"],
        "shard leaves each rank sums",
    ),
    (["model.split.layer=1", "model.split.rank=4"], "leave model.split out"),
    (["+security.weights={head: [cloud_b]}"], "security.weights keeps parts of the model"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_what_is_not_tested_together_is_refused_by_name(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        build_job(*SMALL, EVERY, *overrides).check()
    assert "training.patches.every=2" in str(refused.value)


def test_another_kind_of_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no causal language model: set it to 0"):
        build_job("+exp=abnet_iwslt", EVERY)


def test_an_approval_shows_that_weights_leave() -> None:
    job = build_job(*SMALL, EVERY, "training.patches.reader=cloud_c")
    found = [one for one in job.leaving() if one.kind == "weights"]
    assert [(one.sender, one.to) for one in found] == [
        ("cloud_a", "cloud_c"), ("cloud_b", "cloud_c"),
    ]  # fmt: skip
    assert "every 2 updates" in found[0].in_words


def test_the_first_rank_of_a_stage_writes_every_so_many_updates_and_after_the_last(
    tmp_path: Path,
) -> None:
    job = build_job(*SMALL, "training.patches.every=3", "training.patches.whole_every=2")
    assert job.max_steps == 4

    def hook(*led: int) -> tuple[Any, Log, list[LinkRecord]]:
        log = Log()
        records: list[LinkRecord] = []
        context = SimpleNamespace(
            job=job, run_dir=tmp_path, rank=1, verdict=SimpleNamespace(attempt=1), reporter=log
        )
        wiring = SimpleNamespace(
            groups={number: SimpleNamespace(leads=number in led) for number in (0, 1)},
            ends=SimpleNamespace(records=records),
        )
        built: Any = SimpleNamespace(
            context=context, stages={0: Module(0), 1: Module(1)}, wiring=wiring,
            data=SimpleNamespace(save_tokenizers=lambda folder: None),
        )  # fmt: skip
        return (
            feature_module.WritingAtRank(*[cast(Any, None)] * 2).observer(built, cast(Any, None)),
            log,
            records,
        )

    assert hook()[0] is None
    writer, log, [record] = hook(0)
    report: Any = SimpleNamespace(clock=SimpleNamespace(paused=nullcontext))
    for step in range(1, 5):
        writer.after_update(step, report)
    writer.settle()
    assert [(e["step"], e["stage"], e["is_whole"]) for e in log.events] == [(3, 0, 1), (4, 0, 0)]
    assert {one["to"] for one in record.described()} == {"followers"}
    store = PatchStore(ObjectStore(str(tmp_path), writes=False), plain)
    news = Follower(store, f"{job.name} s{job.seed}", num_stages=1).look()
    assert news is not None and news.step == 4 and news.is_last


def test_a_machine_that_is_not_the_cloud_cannot_seal_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = build_job(*SMALL, EVERY, "training.patches.reader=cloud_c")
    keys = keys_of("cloud_a", ["cloud_b"])
    monkeypatch.setattr(feature_module, "this_clouds_keys", lambda: keys)
    with pytest.raises(ConfigError, match="reader=cloud_c has rank 1 seal its weights as cloud c"):
        feature_module.protection(job, 1)
    with pytest.raises(ConfigError, match=r"put it beside .* into policy.yaml: peers: {cloud_c"):
        feature_module.protection(job, 0)
    patches = replace(job.training.patches, reader=None)
    open_job = replace(job, training=replace(job.training, patches=patches))
    assert feature_module.protection(open_job, 1) is plain


# --- a run of real processes


def test_a_folder_is_followed_to_the_end_of_the_run_and_its_server_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also over weights that the server cannot read, as long as others will come."""
    job = build_job(*SMALL, EVERY)
    box = tmp_path / "run"
    box.mkdir()
    (box / EXPERIMENT_FILE).write_text("")
    trainer = Trainer(box, [Module(0), Module(1)], last_step=job.max_steps)
    kept: list[tuple[int, int]] = []
    served: list[int] = []

    def folder_of(path: Path, run: str, model: Any, task: Any) -> Any:
        assert (path, run, model, task) == (tmp_path / "served", RUN, job.model, job.task)
        return SimpleNamespace(
            update=lambda follower, news, at: kept.append((news.step, at.max_length))
        )

    def reload(folder: Path) -> None:
        served.append(kept[-1][0])
        if served == [2, 2]:
            trainer.train(4)
        if len(served) != 3:
            raise DataError("it is busy")

    for name, what in {
        "read_settings": lambda file: SimpleNamespace(job=job), "name_of": lambda job: RUN,
        "FollowedFolder": folder_of, "server_of": lambda given: SimpleNamespace(reload=reload),
    }.items():  # fmt: skip
        monkeypatch.setattr(command_module, name, what)
    words = [str(box), "--as", str(tmp_path / "served")]
    with pytest.raises(DataError, match=f"there are no weights in {box} yet"):
        follow([*words, "--once"])
    (tmp_path / "else").mkdir()
    with pytest.raises(DataError, match=f"there are no weights in {tmp_path}/else yet"):
        follow([*words, "--once", "--from", str(tmp_path / "else")])
    trainer.train(2)
    follow([*words, "--once"])
    said = capsys.readouterr().out
    assert "step 2: " in said and " in 2 snapshots, " in said and "last update" not in said
    assert kept == [(2, job.task.max_length)]
    with pytest.raises(DataError, match="the server does not have step 2: it is busy"):
        follow([*words, "--once", "--reload", "x"])
    capsys.readouterr()

    follow([*words, "--reload", "x"])
    said, warned = capsys.readouterr()
    assert "xcloud: the server does not have step 2: it is busy" in warned
    assert " in 2 patches, " in said and "step 4: the server has it" in said
    assert said.endswith("that was the last update of the run\n")
    assert [step for step, _ in kept] == [2, 2, 2, 4] and served == [2, 2, 4]
    with pytest.raises(DataError, match="the server does not have step 4: it is busy"):
        follow([*words, "--reload", "x"])
    assert " in 2 snapshots and 2 patches, " in capsys.readouterr().out

    patches = replace(job.training.patches, every=0)
    job = replace(job, training=replace(job.training, patches=patches))
    with pytest.raises(ConfigError, match=r"start it with training\.patches\.every=N"):
        follow(words)
    patches = replace(patches, every=2, reader="cloud_c")
    job = replace(job, training=replace(job.training, patches=patches))
    monkeypatch.setattr(command_module, "this_clouds_keys", lambda: keys_of("cloud_a", []))
    with pytest.raises(ConfigError, match=r"sealed to cloud_c .* has the key of cloud_a"):
        follow(words)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.xdist_group("causal_run")
def test_a_run_of_two_clouds_is_followed_while_it_trains_and_after_a_resume(
    tmp_path: Path,
) -> None:
    """Its folder loads in transformers, is the export of the run, and is what a server of it
    has."""
    run_dir = tmp_path / "run"
    words = [
        *SMALL, f"cache_dir={tmp_path}/cache", "cluster/wan=free", "model.lora=null",
        "training.patches.every=1", "training.patches.whole_every=2",
    ]  # fmt: skip
    command = [str(run_dir), "--as", str(tmp_path / "served")]
    server = VllmServer(tmp_path / "served")
    with ThreadPoolExecutor() as pool, server.started():
        settings = Settings.of(composed(*words))
        settings.write(made(run_dir) / "experiment.yaml")
        following = pool.submit(follow, [*command, "--reload", f"vllm={server.url}"])
        summary = run(settings, run_dir)
        following.result(120)
    served = load_file(tmp_path / "served" / "model.safetensors")
    assert all(torch.equal(server.loaded[-1][name], served[name]) for name in served)
    assert not server.is_paused
    found = summary["weight_patches"]
    assert found["num_patches"] == 6 and found["num_snapshots"] == 4
    kinds = summary["wire"]["cloud_a -> followers"]
    assert kinds["stored"]["bytes"] > 0
    use.export([str(run_dir), "--out", str(tmp_path / "joined")])
    same_to_bf16(tmp_path)

    others = [word for word in words if "max_steps" not in word]
    longer = Settings.of(composed(*others, "training.max_steps=6"))
    run(longer, run_dir, resumes=check_can_go_on)
    follow([*command, "--once"])
    use.export([str(run_dir), "--out", str(tmp_path / "joined")])
    same_to_bf16(tmp_path)
    assert json.loads((tmp_path / "served" / "followed.json").read_text())["step"] == 6
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    ids = AutoTokenizer.from_pretrained(tmp_path / "served")("Ana", return_tensors="pt").input_ids
    assert model.dtype is torch.bfloat16 and model(ids).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.xdist_group("causal_run")
def test_of_two_owners_one_follows_the_whole_model_also_late_and_over_a_line_that_is_cut(
    tmp_path: Path,
) -> None:
    """Each seals its stage to the other training cloud, in a folder that both reach."""
    bucket = made(tmp_path / "bucket")
    port = 20_000 + free_port() % 10_000
    proxy = Proxy(port, cut_after=lambda: 150_000)
    owners = Owners(
        tmp_path,
        [
            address("cloud_a", proxy.port), f"cache_dir={tmp_path}/cache", "model.lora=null",
            "training.patches.every=1", "training.patches.whole_every=2",
            "training.max_steps=8", f"training.patches.url={bucket}",
            "training.patches.reader=cloud_b",
        ],
        compose=lambda cluster, overrides: OmegaConf.to_container(
            composed(*SMALL, *overrides), resolve=True
        ),
        bucket=bucket,
    )  # fmt: skip
    beside = follow_as(owners, "cloud_b", "served")
    owners.finish(cloud_a=["--listen", f"127.0.0.1:{port}"], within_s=300)
    proxy.close()
    assert proxy.num_cuts > 1
    assert beside.wait(120) == 0, read(tmp_path / "served.log")
    assert read(tmp_path / "served.log").endswith("that was the last update of the run\n")
    assert follow_as(owners, "cloud_b", "late", "--once").wait(120) == 0, read(
        tmp_path / "late.log"
    )
    assert "step 8: " in (said := read(tmp_path / "late.log")) and "step 7" not in said

    run_dir = owners.run_dir("cloud_a")
    shutil.copy(owners.run_dir("cloud_b") / "model" / "stage1.safetensors", run_dir / "model")
    use.export([str(run_dir), "--out", str(tmp_path / "joined")])
    same_to_bf16(tmp_path)
    same_to_bf16(tmp_path, served="late")
    assert follow_as(owners, "cloud_a", "other", "--once").wait(120)
    assert "sealed to cloud_b" in read(tmp_path / "other.log")


def follow_as(owners: Owners, cloud: str, name: str, *words: str) -> Any:
    """Start the follower of one owner, which keeps a folder of this name current."""
    folder = owners.folder
    return command(
        "-m", "xcloud", "follow", str(folder), "--as", str(folder / name), *words,
        log=folder / f"{name}.log", XCLOUD_POLICY=str(folder / f"owner_{cloud}" / "policy.yaml"),
    )  # fmt: skip


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def same_to_bf16(folder: Path, served: str = "served") -> None:
    exported, followed = (
        load_file(folder / name / "model.safetensors") for name in ("joined", served)
    )
    assert followed.keys() == exported.keys()
    assert all(torch.equal(followed[name], exported[name].bfloat16()) for name in followed)
