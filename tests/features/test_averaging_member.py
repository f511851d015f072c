"""The end of a replica that averages through a server."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xcloud.features.replicas.averaging_server import Member


@pytest.mark.parametrize("is_counted", [True, False])
def test_what_the_server_does_not_count_is_given_back_to_the_error_feedback(
    is_counted: bool,
) -> None:
    settled: list[bool] = []
    final: list[bool] = []

    def encode(tensors: Any, is_final: bool) -> Any:
        final.append(is_final)
        return (), None

    codec = SimpleNamespace(settle=settled.append, carries=(), raw_bytes=0, encode=encode)
    answer = torch.tensor([3.0, 3.0, float(is_counted), 0.0], dtype=torch.float64)
    links: Any = SimpleNamespace(post=lambda *_, **__: None, next=lambda *_, **__: (answer,))
    member = Member(links, codec, SimpleNamespace(wire_specs=(1,)))  # type: ignore[arg-type]
    member.start(3, [])

    assert member.finish(3).is_counted is is_counted
    assert settled == [is_counted]
    assert final == [False], "only the answer tells whether it is used"
