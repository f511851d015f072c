"""A check of the mailbox between clouds: whether this cloud can do there all that a run does."""

from __future__ import annotations

import secrets
import time

from xcloud.base.errors import ConfigError, LinkError
from xcloud.base.units import human_seconds
from xcloud.doctor.case import Case
from xcloud.doctor.finding import Finding, ok, red, warn
from xcloud.line.mailbox import Mailbox, ObjectStore

_PATIENCE_S = 5.0
_FOLDER = "doctor"
_DATA = b"written by xcloud doctor"
_RANGE_BYTES = 7


def check_mailbox(case: Case) -> Finding:
    """Write an object, list it, read a range of it and delete it, as this cloud's ranks do."""
    wan = case.layout.wan
    assert isinstance(wan, Mailbox), "there is a mailbox between the clouds"
    if case.refusal is not None:  # the policy may not let this cloud reach that address
        return warn("mailbox", fact="not looked at", advice="first mend the file or the policy")
    try:
        # writes=False: what the store would try by itself is tried below, step by step and timed.
        store = ObjectStore(wan.url, patience_s=_PATIENCE_S, writes=False)
        took_s = _try(store)
    except (ConfigError, LinkError) as error:
        return red(
            "mailbox",
            fact=str(error),
            advice="each cloud must list, read, write and delete there: make the folder if there "
            "is none, and look at this machine's credentials for it and at its connection",
        )
    shown = ", ".join(f"{what} {human_seconds(spent_s)}" for what, spent_s in took_s.items())
    figures = {f"{what}_s": spent_s for what, spent_s in took_s.items()}
    return ok("mailbox", fact=f"{wan.url}: {shown}", **figures)


def _try(store: ObjectStore) -> dict[str, float]:
    """Return what each request took, in seconds. Raises LinkError for one that fails, or that
    does something else than a run needs."""
    # A name of its own, so that two doctors at once do not meet.
    name = secrets.token_hex(8)
    path = f"{_FOLDER}/{name}"
    took_s = {}

    # Each request by itself, as a policy of the store may allow some of them only.
    started_s = time.monotonic()
    store.put(path, data=_DATA)
    took_s["write"] = time.monotonic() - started_s

    started_s = time.monotonic()
    listed = store.sizes(_FOLDER)
    took_s["list"] = time.monotonic() - started_s
    if listed.get(name) != len(_DATA):
        raise LinkError(f"{store.url} does not list an object that has just been written there")

    started_s = time.monotonic()
    found = store.get(path, max_bytes=_RANGE_BYTES)
    took_s["read"] = time.monotonic() - started_s
    # get returns one byte more than was asked for, where there is one.
    if found != _DATA[: _RANGE_BYTES + 1]:
        raise LinkError(f"{store.url} gives other bytes of an object than were asked for")

    started_s = time.monotonic()
    store.delete(path)
    took_s["delete"] = time.monotonic() - started_s
    if name in store.sizes(_FOLDER):
        raise LinkError(f"{store.url} keeps an object that has been deleted")
    return took_s
