"""One rank of torch's DistributedDataParallel or of torchft's DiLoCo, for links.py.

    python -m experiments.strategies.peers NAME RANK EXPERIMENT RESULT

Model, samples, their order, optimizer and scores are the experiment's; loop and what crosses the
line are torch's or torchft's. Each of the two ranks trains on half of a batch.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.namespaces import ADDRESSES
from xcloud.contracts.model import Batch, Stage, TaskData
from xcloud.job.given import read_settings
from xcloud.rank.task_data import context_of

RANKS = 2


class WholeModel(nn.Module):
    """Batch to the sum of its losses."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, batch: Batch) -> Tensor:
        loss: Tensor | None = self.stage(None, batch).loss
        assert loss is not None
        return loss


def main() -> None:
    name, rank, file, result = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    job = read_settings(file).job
    fields = job.model.fields(0, 1) | {"ids"}
    data = job.task.load(frozenset(fields - {"ids"}), job.seed)
    device = torch.device("cpu")
    torch.manual_seed(job.seed)
    model = WholeModel(job.model.build_stage(0, 1, context_of(job, data, device, print)))
    plan = job.batch_plan(data.num_samples("train"))
    settings = job.training
    made = settings.optimizer.build(model)
    steps, curve = settings.max_steps, list[tuple[float, float]]()

    with (torchft if name.startswith("torchft") else ddp)(name, rank, model, made) as wrapped:
        begun_s = time.perf_counter()
        for step in range(1, steps + 1):
            ids = plan.ids(step)
            weight = data.weight(ids)
            mine = torch.tensor_split(ids, RANKS)[rank]
            for group in made.param_groups:
                group["lr"] = settings.optimizer.learning_rate_at(step, steps)
            made.zero_grad()
            loss = wrapped(data.batch("train", mine)) / weight
            # DDP takes the mean over ranks, and a DiLoCo worker trains on its half alone.
            (loss * RANKS).backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip_norm or math.inf)
            made.step()
            curve.append((time.perf_counter() - begun_s, RANKS * float(loss.detach())))
        training_s = time.perf_counter() - begun_s
    times = [b[0] - a[0] for a, b in pairwise(curve)]
    found = {
        "step_s": sorted(times)[len(times) // 2],
        "training_s": training_s,
        "perplexity": perplexity(model, data, settings.eval_batch_size),
        "curve": curve,
    }
    result.write_text(json.dumps(found))


@contextmanager
def ddp(
    name: str, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[nn.Module]:
    address = f"tcp://{ADDRESSES[0]}:29560"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    # One bucket: with several, torch's PowerSGD hook begins their sums in another order on each
    # rank of a slow line, and gloo ends the run (torch 2.13).
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000 if "PowerSGD" in name else None)
    if "FP16" in name:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if "PowerSGD" in name:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=10
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    yield wrapped
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def torchft(
    name: str, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[nn.Module]:
    """Source of the outer optimizer's settings: DiLoCo, arXiv:2311.08105, as xcloud has them."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    lighthouse = None
    if rank == 0:
        lighthouse = LighthouseServer(
            bind=f"{ADDRESSES[0]}:29510", min_replicas=RANKS, join_timeout_ms=60_000
        )
    store = dist.TCPStore(ADDRESSES[rank], 0, is_master=True, wait_for_workers=False)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        load_state_dict=lambda state: model.load_state_dict(state),
        state_dict=model.state_dict,
        min_replica_size=RANKS, use_async_quorum=False, init_sync=False,  # both begin equal
        timeout=timedelta(seconds=120),
        quorum_timeout=timedelta(seconds=120), rank=0, world_size=1,
        store_addr=ADDRESSES[rank], store_port=store.port, hostname=ADDRESSES[rank],
        lighthouse_addr=f"http://{ADDRESSES[0]}:29510", replica_id=f"rank{rank}",
    )  # fmt: skip
    every = int(name.rpartition(" ")[2])
    with DiLoCo(manager, [model], optimizer, outer, sync_every=every, pin_memory=False):
        yield model
    manager.shutdown()
    if lighthouse is not None:
        time.sleep(2.0)  # the other one leaves first
        lighthouse.shutdown()


@torch.no_grad()
def perplexity(model: WholeModel, data: TaskData, batch_size: int) -> float:
    """Of the test part, without compression: no activations cross."""
    model.eval()
    predictions = {}
    for ids in torch.arange(data.num_samples("test")).split(batch_size):
        batch = data.batch("test", ids)
        found = model.stage.predict(None, batch)
        predictions.update(zip(batch["ids"].tolist(), found, strict=True))
    return data.score("test", predictions).values["perplexity"]


if __name__ == "__main__":
    main()
