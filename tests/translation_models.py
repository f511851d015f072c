"""What the tests of the networks share: a context, stages joined by hand, a copying task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xcloud.comm.channel import Message
from xcloud.contracts.model import Batch, BuildContext, SplitModel, Stage, TokenIds
from xcloud.models.encoder import Packing
from xcloud.models.transformer import TargetStage

IDS = TokenIds(size=24, pad=0, bos=1, eos=2, mask=3)
FIRST_WORD = 4


def texts(num: int, longest: int = 8, seed: int = 0, ids: TokenIds = IDS) -> list[list[int]]:
    """Random texts of 1 to `longest` words, without special ids."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num,), generator=draw).tolist()
    return [
        torch.randint(FIRST_WORD, ids.size, (length,), generator=draw).tolist()
        for length in lengths
    ]


def padded(lines: Sequence[Sequence[int]], ids: TokenIds = IDS) -> Tensor:
    """bos, words, eos, padding: [B, S]."""
    whole = [torch.tensor([ids.bos, *line, ids.eos]) for line in lines]
    return torch.nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=ids.pad)


def batch_of(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Batch:
    return {
        "ids": torch.arange(len(sources)),
        "source": padded(sources),
        "target": padded(targets),
    }


def reversing(num: int, longest: int = 6, seed: int = 0) -> Batch:
    """The target is the source read backwards: cannot be done without cross-attention."""
    sources = texts(num, longest, seed)
    return batch_of(sources, [line[::-1] for line in sources])


def context(
    cache_dir: Path,
    *,
    seed: int = 0,
    fields: Sequence[str] = ("source", "target"),
    sentences: Callable[[str], Sequence[Sequence[int]]] | None = None,
    vocabularies: Mapping[str, TokenIds] | None = None,
    max_length: int = 16,
    **changes: Any,
) -> BuildContext:
    whole: dict[str, Any] = {
        "seed": seed,
        "device": torch.device("cpu"),
        "cache_dir": cache_dir,
        "vocabularies": {name: IDS for name in fields} if vocabularies is None else vocabularies,
        "sentences": sentences or (lambda name: texts(40, seed=len(name))),
        "max_length": max_length,
        "report": lambda line: None,
    }
    return BuildContext(**(whole | changes))


def build(model: SplitModel, num_stages: int, where: BuildContext) -> list[Stage]:
    return [model.build_stage(stage, num_stages, where) for stage in range(num_stages)]


def run_joined(stages: Sequence[Stage], batch: Batch) -> Tensor:
    """All stages as one network, with one graph; returns the loss."""
    received: Message | None = None
    for stage in stages[:-1]:
        received = stage(received, batch).send
    loss = stages[-1](received, batch).loss
    assert isinstance(loss, Tensor)
    return loss


def backward_split(stages: Sequence[Stage], batch: Batch) -> Tensor:
    """Forward and backward as a pipeline does: each boundary is a cut in the graph."""
    received: Message | None = None
    cuts = []
    for stage in stages[:-1]:
        sent = stage(received, batch).send
        received = {name: tensor.detach() for name, tensor in sent.items()}
        received["hidden"].requires_grad_()
        cuts.append((sent["hidden"], received["hidden"]))
    loss = stages[-1](received, batch).loss
    assert isinstance(loss, Tensor)
    loss.backward()
    for sent, arrived in reversed(cuts):
        sent.backward(arrived.grad)
    return loss.detach()


def gradients(stages: Sequence[Stage]) -> list[dict[str, Tensor | None]]:
    return [{name: p.grad for name, p in stage.named_parameters()} for stage in stages]


def train(stages: Sequence[Stage], batches: Sequence[Batch], learning_rate: float) -> float:
    """One Adam step for each batch; returns the mean loss per token of the last one."""
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, fused=True)
    mean = 0.0
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / 20)
            group["lr"] = learning_rate * warm * (1 - step / len(batches))
        weight = int((batch["target"] != IDS.pad).sum()) - len(batch["target"])
        loss = run_joined(stages, batch) / weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.item()
    return mean


def predict(stages: Sequence[Stage], batch: Batch) -> list[list[int]]:
    received: Message | None = None
    with torch.no_grad():
        for stage in stages[:-1]:
            received = stage(received, batch).send
    return stages[-1].predict(received, {"ids": batch["ids"]})


def target_scores(stages: Sequence[Stage], batch: Batch, inputs: Tensor) -> Tensor:
    """Scores [B, T, V] after each token of `inputs` [B, T], which has no padding; no cache."""
    last = stages[-1]
    assert isinstance(last, TargetStage)
    with torch.no_grad():
        received = stages[0](None, batch).send
        packing = Packing(torch.full((len(inputs),), inputs.shape[1]))
        scores = last.scores(packing.pack(inputs), packing, last.open(received))
    return packing.unpack(scores)
