"""What several tests share: torch on one thread, and Ctrl+C that arrives."""

from __future__ import annotations

import signal

import pytest
import torch

# A shell starts what it runs in the background with SIGINT ignored, and children inherit that; the
# tests that interrupt a command would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
