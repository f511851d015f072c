"""One rank of a training run with torch's DistributedDataParallel: python -m tests.ddp_rank."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from xcloud.comm.compressor import Chain
from xcloud.comm.low_rank import PowerSgd
from xcloud.comm.precision import Cast
from xcloud.features.replicas.gradient_averaging import CompressedAveraging, compressed_averaging


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))
    target = torch.randn(32, 8) / 32**0.5
    model = DistributedDataParallel(network, bucket_cap_mb=0.01)
    state = CompressedAveraging(model, Chain(powersgd=PowerSgd(2), fp16=Cast()))
    model.register_comm_hook(state, compressed_averaging)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)

    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(60):
        inputs = torch.randn(64, 32)
        loss = nn.functional.mse_loss(model(inputs), inputs @ target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(
        json.dumps(
            {
                "losses": losses,
                "bits": parameters.view(torch.int32).tolist(),
                "num_bytes": state.num_bytes,
                "raw_bytes": state.raw_bytes,
                "residual": sum(k.endswith("residual") for k in state.state_dict()),
            }
        )
    )
    # First: the last that holds the group joins gloo's threads, and a model would do so with the
    # GIL, for which one of them may wait to release the callback of the last gradients.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
