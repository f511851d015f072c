"""Copies of a state into memory that is kept and made beforehand."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.channels import same_state
from xcloud.comm.memory import DeltaCache, SampleRows
from xcloud.comm.snapshot import SnapshotBuffer, bytes_to_copy
from xcloud.comm.state import State, copy_of, states_of
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing
from xcloud.pipeline.control import Signal
from xcloud.pipeline.settings import Checkpoints, Optimizer
from xcloud.pipeline.trainer import TrainedModule
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.reporter import Reporter

NEVER = threading.Event()


def learn(part: TrainedModule) -> None:
    assert part.optimizer is not None
    part.module(torch.randn(2, 3)).sum().backward()
    part.optimizer.step()


def parts() -> dict[str, Any]:
    net, memory = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), DeltaCache("bfloat16")
    module = TrainedModule(net, Optimizer(0.1, 1).build(net))
    learn(module)
    memory.after_receive(torch.randn(7, 3), SampleRows((4, 9, 5), (2, 4, 1)))
    return {"module": module, "memory": memory}


def places(state: State) -> dict[str, int]:
    """In memory, of all large tensors."""
    small = {"memory.ids", "memory.counts"}
    return {n: v.data_ptr() for n, v in state.items() if isinstance(v, Tensor) and n not in small}


def test_a_snapshot_in_kept_memory_equals_one_in_its_own_and_is_overwritten_by_the_next() -> None:
    mine = parts()
    buffer, own = SnapshotBuffer(), states_of(mine)
    buffer.enlarge(bytes_to_copy(lambda: states_of(mine)), NEVER)
    with buffer.snapshot():
        state = states_of(mine)
    assert same_state([state], [own])

    learn(mine["module"])
    assert same_state([state], [own])  # later steps do not change it
    with buffer.snapshot():
        later = states_of(mine)
    assert places(later) == places(state)
    assert same_state([later], [states_of(mine)])


def test_what_does_not_fit_gets_memory_of_its_own() -> None:
    buffer, large, small = SnapshotBuffer(), torch.randn(1000), torch.randn(3)
    buffer.enlarge(100, NEVER)
    with buffer.snapshot():
        copies = [copy_of(large), copy_of(small), copy_of(large)]
    assert all(map(torch.equal, copies, [large, small, large]))
    assert [copy.untyped_storage().nbytes() for copy in copies] == [4000, 100, 4000]
    assert len({copy.data_ptr() for copy in copies}) == 3


def test_memory_is_made_half_way_to_a_checkpoint_that_will_come(tmp_path: Path) -> None:
    mine = parts()

    def kept(from_step: int, until_step: int, last_step: int, **schedule: float) -> int:
        checkpoints = Checkpointer(
            Timing(Checkpoints(**schedule), from_step, last_step),  # type: ignore[arg-type]
            CheckpointWriter(CheckpointFolder(tmp_path), 0, {}),
            None,
            mine,
            Reporter(0, "a", lambda lines: None),
        )
        for step in range(from_step + 1, until_step + 1):
            checkpoints.after(step, Signal.GO_ON)
        checkpoints.settle(is_urgent=False)
        found = len(checkpoints.writer.buffer.memory)
        checkpoints.close(is_finished=False)
        return found

    needed = bytes_to_copy(lambda: states_of(mine))
    assert needed > 0
    assert kept(0, 4, 20, every_steps=10) == 0
    assert kept(0, 5, 20, every_steps=10) == needed
    assert kept(20, 24, 40, every_steps=10) == 0
    assert kept(20, 25, 40, every_steps=10) == needed
    assert kept(0, 8, 9, every_steps=10) == 0  # the run ends before its first checkpoint
    assert kept(0, 1, 9, every_steps=10, every_minutes=1e-9) == needed
    assert kept(0, 1, 9, every_steps=10, every_minutes=60) == 0  # half of an hour is to pass


def test_a_checkpoint_that_comes_early_does_not_wait_until_all_memory_is_touched() -> None:
    class DueAtThirdLook(threading.Event):
        num_looks = 0

        def is_set(self) -> bool:
            self.num_looks += 1
            return self.num_looks == 3

    due, buffer, tensor = DueAtThirdLook(), SnapshotBuffer(), torch.randn(5)
    buffer.enlarge(10**8, due)  # six pieces
    assert due.num_looks == 3
    with buffer.snapshot():
        copy = copy_of(tensor)
    assert torch.equal(copy, tensor) and copy.untyped_storage().nbytes() == 10**8


def test_a_snapshot_of_a_device_is_counted_as_host_memory() -> None:
    """On the device a copy needs room that training does not have."""
    values = torch.empty(1000, device="meta")  # stands for a device
    assert bytes_to_copy(lambda: copy_of(values, values)) >= 2 * values.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_snapshot_of_a_gpu_lies_in_host_memory() -> None:
    values = torch.randn(3, 5, device="cuda")
    buffer = SnapshotBuffer()
    for room_bytes in (0, 1 << 16):
        buffer.enlarge(room_bytes, NEVER)
        before = torch.cuda.memory_allocated()
        with buffer.snapshot():
            made = [copy_of(values), copy_of(values, values)]
        assert torch.cuda.memory_allocated() == before
        assert [tensor.device.type for tensor in made] == ["cpu", "cpu"]
        assert torch.equal(made[0], values.cpu())
        assert torch.equal(made[1], torch.cat([values, values]).cpu())
