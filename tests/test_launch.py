"""Starting ranks: what their environment holds."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from xcloud.launch import LocalRanks


def test_memory_settings_reach_the_ranks_and_the_users_own_win(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[dict[str, str]] = []

    def popen(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        started.append(env)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "5")
    LocalRanks(tmp_path, ["a", "b"]).start()
    assert [env["LOCAL_RANK"] for env in started] == ["0", "1"]
    assert {env["LRU_CACHE_CAPACITY"] for env in started} == {"5"}
    assert {env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] for env in started} == {"16"}
