"""How ranks find each other in a store, before they have links.

The store holds what a rendezvous needs: who has come, to which attempt, and where to reach it.
Whoever reaches its port may write to it, so nothing that a rank does follows from a text in it but
where it looks for the others, and that it gives up waiting (`Ending`). What ranks tell each other
goes over links (words.py).

A further store is a subclass of `torch.distributed.Store`, because torch's PrefixStore and process
groups take no other class. Five calls are made on it. `set` writes a value in the place of an
earlier one. `get` returns a value, once it is there. `wait` blocks until all keys are there, and
raises RuntimeError after the timeout. `add` counts from 0; no two callers get the same number.
`check` returns whether all keys are there, without waiting. A short `wait` would not do: on a slow
line it cannot tell a value that is missing from one that is on its way. Where a wait keeps other
callers of the same client waiting, the store also has `clone`, which returns a client of its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum

from torch._C._distributed_c10d import PrefixStore, Store

from xcloud.base.errors import ConfigError, LinkClosed, LinkTimeout
from xcloud.base.units import human_duration
from xcloud.net.link_end import ignore

# Torch's limits end nothing here. Links have deadlines of their own; a rank that is stopped or cut
# off while others wait for it in a collective is ended, or these are, by the launcher on one
# machine (launch/processes.py), by heartbeats on several (net/failure_detector.py).
FOREVER = timedelta(days=30)
JOIN_WITHIN_S = 12 * 3600.0

NOTE_EVERY_S = 60.0
MAX_VALUE_BYTES = 1 << 16  # names of all ranks in one value
TAKEN_AFTER_S = 30.0  # how long a rank may be another process's before this one gives up
_LOOK_S = 0.05


class Ending(Enum):
    """The way in which a rank has ended that others still wait for. The reason stays in its
    cloud."""

    STOPPED = "stopped"
    REFUSED = "refused"
    FAILED = "failed"


HAS_ENDED = {
    Ending.STOPPED: "was asked to stop; to resume, give the same command in every cloud",
    Ending.REFUSED: "has refused to run this experiment; its terminal says why",
    Ending.FAILED: "has failed before all ranks had come; its terminal says why",
}


def ended_key(rank: int) -> str:
    """Return the key under which a rank's machine leaves how it has ended."""
    return f"ended.{rank}"


def ending_of(store: Store, rank: int) -> Ending | None:
    """Return how a rank has ended, None if it has not or if something else stands there."""
    text = value_of(store, name=ended_key(rank))
    return next((ending for ending in Ending if ending.value == text), None)


def value_of(store: Store, name: str) -> str:
    """Return a short value that may be there; empty if it is not, or is too long."""
    if not store.check([name]):
        return ""
    data = store.get(name)
    return data.decode("utf-8", "replace") if len(data) <= MAX_VALUE_BYTES else ""


def count_of(store: Store, name: str) -> int:
    """Return a counter's value without a write; 0 if it is not there, or is no number."""
    text = value_of(store, name)
    return int(text) if text.isdecimal() and len(text) < 16 else 0


@dataclass(eq=False)
class Waiting:
    """A wait that says once a minute what this process waits for.

    what: "for all machines".
    within_s: seconds after which `go_on` raises LinkTimeout.
    """

    what: str
    within_s: float
    say: Callable[[str], None]
    _since_s: float = field(default_factory=time.monotonic)
    _said_s: float = field(default_factory=time.monotonic)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._since_s

    def go_on(self, why: str, look_every_s: float = _LOOK_S) -> None:
        """Sleep a moment.

        why: text that says what this process found when it looked last.
        """
        now_s = time.monotonic()
        waited_s = self.waited_s
        if waited_s > self.within_s:
            raise LinkTimeout(f"waited {self.what} for {human_duration(waited_s)}: {why}")
        if now_s - self._said_s >= NOTE_EVERY_S:
            self._said_s = now_s
            self.say(f"still waiting {self.what}, {human_duration(waited_s)}: {why}")
        time.sleep(look_every_s)


def of_this_attempt(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    within_s: float,
    watch: Callable[[int, Store], None] = ignore,
    name_of: Callable[[int], str] = "rank {}".format,
    say: Callable[[str], None] = ignore,
) -> Store:
    """Return a part of the store that no earlier attempt of `ranks` to begin together has used.
    Every one of them calls it.

    The first of them numbers the attempt, the others sign in for it, and it begins once the first
    has named all of them: a rank that was signed in and has died is not among those who wait for
    that word.

    watch: called in the first rank with every other one that has come, in these with the first,
    and with a part of the store for the two. say: called once a minute with the ranks waited for.

    Ranks that have not come are waited for within_s; then raises LinkTimeout naming them. Raises
    LinkClosed for one whose machine has left word that it comes no more, ConfigError in a process
    whose rank another process has taken.
    """
    first, *missing = ranks
    names: dict[int, str] = {}
    mine = uuid.uuid4().hex
    until_s = time.monotonic() + within_s
    waiting = Waiting(what="for the other ranks", within_s=float("inf"), say=say)
    taken_s = None  # since when another process has this rank in the attempt that this one joined
    part = ""
    state = f"{name_of(first)} has not begun"
    if store.check([ended_key(rank)]):
        store.set(ended_key(rank), "")  # of an earlier attempt
    if rank == first:
        # A counter, as two beginnings of the first rank must not share a part: the old one's ranks
        # may still write to theirs.
        part = f"attempt.{store.add('attempt.count', 1)}"
        store.set("attempt", part)
    else:
        missing = [first]
    while time.monotonic() < until_s:
        if rank == first:
            # Polled instead of waited for: the first rank also looks for endings, and says for
            # whom it waits. `check` does not keep other callers of this client waiting.
            for other in [r for r in missing if store.check([f"{part}.{r}"])]:
                missing.remove(other)
                names[other] = value_of(store, name=f"{part}.{other}")
                watch(other, _line(store, part=part, name=names[other]))
            if not missing:
                # The names are those of processes, so a rank that has signed in and died is not
                # taken for the one that came in its place.
                store.set(f"{part}.all", ",".join(names.values()))
                return PrefixStore(part, store)
            for other in missing:
                if (ending := ending_of(store, rank=other)) is not None:
                    raise LinkClosed(f"{name_of(other)} {HAS_ENDED[ending]}")
            state = f"{', '.join(map(name_of, missing))} has not come"
        elif store.check(["attempt"]):
            current = value_of(store, name="attempt")
            if store.check([f"{current}.all"]):
                if mine in value_of(store, name=f"{current}.all").split(","):
                    return PrefixStore(current, store)
                if current == part:  # unless all begin again: its place may be a dead one's
                    taken_s = taken_s or time.monotonic()
                    if time.monotonic() - taken_s > TAKEN_AFTER_S:
                        raise ConfigError(
                            f"another process has begun as {name_of(rank)}: is this cloud's "
                            "command started twice?"
                        )
                state = (
                    f"the attempt of the others already has a {name_of(rank)}. Was this cloud's "
                    "command started twice? If not, it restarts with them"
                )
            elif current != part:
                part = current
                taken_s = None
                # Signed in with a name of this process. An earlier one of this rank may have left
                # its own.
                store.set(f"{part}.{rank}", mine)
                watch(first, _line(store, part=part, name=mine))
                state = "not all ranks have come"
        waiting.go_on(state)
    who = ", ".join(map(str, missing))
    raise LinkTimeout(
        f"ranks {who} have not come in {within_s:g} s (cluster.liveness.join_within_s)"
    )


def _line(store: Store, part: str, name: str) -> Store:
    # A client of its own: whoever waits in a store keeps others of that client waiting.
    return PrefixStore(f"{part}.line.{name}", store.clone())  # type: ignore[attr-defined]
