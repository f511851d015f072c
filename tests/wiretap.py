"""Records every byte that a rank hands to torch.distributed: frames, words before the start and
collectives alike.

Import of this module by a worker (its task lives here) taps that process; the test process, which
only builds the experiment, is left alone.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from tests.toy_text import ToyTextTask
from xcloud.net.gloo_link import GlooPair

_TAPPED = False


class Tapped(NamedTuple):
    rank: int
    call: str  # isend, word, or the name of a collective
    dtype: str
    data: bytes


@dataclass(frozen=True)
class TappedTask(ToyTextTask):
    tape: str = ""

    def __post_init__(self) -> None:
        global _TAPPED
        if "LOCAL_RANK" in os.environ and not _TAPPED:
            _TAPPED = True
            _tap(Path(self.tape))


def _tap(folder: Path) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    file = open(folder / f"rank{rank}.tape", "ab", buffering=0)

    def keep(call: str, tensor: Tensor) -> None:
        data = tensor.detach().contiguous().flatten().numpy().tobytes()
        head = {"call": call, "dtype": str(tensor.dtype), "size": len(data)}
        file.write(json.dumps(head).encode() + b"\n" + data + b"\n")

    def wrap(owner: Any, name: str, which: int) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            keep(name, args[which])
            return original(*args, **kwargs)

        setattr(owner, name, tapped)

    isend = GlooPair.isend

    def tapped_isend(pair: GlooPair, frame: Tensor, tag: int) -> Any:
        keep("word" if pair._line == "life" else "isend", frame)
        return isend(pair, frame, tag)

    GlooPair.isend = tapped_isend  # type: ignore[method-assign]
    for name, which in (("broadcast", 0), ("all_reduce", 0), ("all_gather", 1)):
        wrap(dist, name, which)


def read_tape(folder: Path) -> list[Tapped]:
    found = []
    for path in sorted(folder.glob("rank*.tape")):
        rank = int(path.stem.removeprefix("rank"))
        with path.open("rb") as file:
            while line := file.readline():
                head = json.loads(line)
                data = file.read(head["size"])
                assert file.read(1) == b"\n"
                found.append(Tapped(rank, head["call"], head["dtype"], data))
    return found
