"""What a run may change between two updates, and what it may not."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable
from xcloud.comm.compressor import Chain
from xcloud.comm.memory import ErrorFeedback
from xcloud.comm.precision import BlockInt
from xcloud.pipeline.schedule import GPipe
from xcloud.rank.switching import check_choices

PLAIN = Compression()
CODED = Compression(forward=Chain(int8=BlockInt(8)))
REMEMBERS = Compression(forward=Chain(int4=BlockInt(4)), forward_memory=ErrorFeedback())


@dataclass(frozen=True)
class Own:
    """The job without what chooses: it has 8 samples."""

    schedule: GPipe

    def __post_init__(self) -> None:
        if self.schedule.num_micro_batches > 8:
            raise ConfigError("a pass has 8 samples")


@pytest.mark.parametrize(
    ("counts", "choices", "cache_mb", "lanes", "said"),
    [
        ([4], [PLAIN, CODED], 0, 1, None),
        ([4, 8], [PLAIN], 0, 1, None),
        ([4], [PLAIN], 0, 1, r"has 1 schedules \(.*\) times 1 compressions \(0, \.\.\.\)"),
        ([1, 2, 4, 5, 8], [PLAIN] * 51, 0, 1, None),  # 255 in all
        ([4, 8], [PLAIN] * 128, 0, 1, "there must be 2 to 255 together"),
        ([4, 16], [PLAIN], 0, 1, "a part may choose .*16.*, but a pass has 8 samples"),
        ([4, 8], [REMEMBERS], 0, 1, None),  # a sample has one rank whatever its micro-batch
        ([4, 8], [REMEMBERS], 0, 2, "with 4 to 8 micro-batches a sample would not stay"),
        ([4, 8], [CODED], 9, 2, "with 4 to 8 micro-batches a sample would not stay"),
        ([4, 8], [CODED], 0, 2, None),
        ([4, 4], [PLAIN, REMEMBERS], 9, 2, None),
    ],
)
def test_what_may_be_chosen_is_checked_before_a_run_begins(
    counts: list[int], choices: list[Any], cache_mb: int, lanes: int, said: str | None
) -> None:
    schedules = [GPipe(count) for count in counts]
    job: Any = SimpleNamespace(
        schedules=schedules,
        compression=Selectable({str(n): choice for n, choice in enumerate(choices)}),
        training=SimpleNamespace(activation_cache_mb=cache_mb),
        cluster=SimpleNamespace(min_micro_batches=lambda: lanes),
    )
    own: Any = Own(schedules[0])
    if said is None:
        check_choices(job, own, by="a part")
    else:
        with pytest.raises(ConfigError, match=said):
            check_choices(job, own, by="a part")
