"""What becomes of memory that large tensors leave."""

from __future__ import annotations

import contextlib
import ctypes
import sys

import torch

_M_MMAP_THRESHOLD = -3  # of malloc.h
_given_back_bytes = sys.maxsize  # of this process: tensors from here on have pages of their own


def return_freed_memory(device: torch.device, num_bytes: int) -> None:
    """Give tensors of num_bytes or more pages of their own from now on, which go back to the
    system when they are freed; nothing where smaller ones have them already.

    Gathering frees and allocates so often that glibc's heap else grows to twice what is in use
    (109 million weights on two CPUs: 1.6 instead of 3.1 GB a rank). What averaging makes of a
    message of the model's length stayed in it up to 14 times, and takes 0.3 of one now.
    """
    global _given_back_bytes
    if device.type != "cpu" or sys.platform != "linux" or num_bytes >= _given_back_bytes:
        return
    with contextlib.suppress(AttributeError, OSError):  # a libc without it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, num_bytes)
        _given_back_bytes = num_bytes
