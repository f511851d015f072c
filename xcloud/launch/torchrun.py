"""`python -m xcloud torchrun`: torchrun, with machines that report their state to each other.

All machines find each other at --master-addr before any rank starts. A machine that waits there
prints once a minute for which machines it waits. If the ranks of a machine end early, it leaves an
`Ending` in the store. Rank 0, if it still waits for them, then ends instead of waiting for hours.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from xcloud.base.errors import XcloudError
from xcloud.base.project import module_paths
from xcloud.base.terminal import say, signals_to_stop
from xcloud.launch.failures import ENDINGS, EXIT_START_AGAIN
from xcloud.launch.processes import LIBRARY_SETTINGS, num_threads
from xcloud.net.addresses import store_at, why_unreachable
from xcloud.net.rendezvous import JOIN_WITHIN_S, Ending, Waiting, ended_key

_LOOK_EVERY_S = 0.2
_TELL_WITHIN_S = 20.0  # torch looks up the names of both ends, which may take 5 s each
_DEFAULT_PORT = 29500


class StopAsked(Exception):
    """The end of ranks that were asked to stop, so that torchrun must not start them again."""


class Machines(StaticTCPRendezvous):
    """The rendezvous of all machines: a store that the first of them serves at --master-addr. It
    differs from torch's static one in how it waits for machines, and in what ends it."""

    def __init__(
        self,
        host: str,
        port: int,
        number: int,
        num_machines: int,
        run_id: str,
        within_s: float,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(host, port, number, num_machines, run_id, timeout=math.ceil(within_s))
        self._within_s = within_s
        self._say = say

    def next_rendezvous(self) -> RendezvousInfo:
        """Return where the ranks of all machines find each other, once every machine has come.

        Raises StopAsked where torchrun would start ranks again that were asked to stop.
        """
        if self._store is None:
            store = self._open()
            self._await_all(store)
            self._store = store
        elif Ending.STOPPED in endings_here().values():
            raise StopAsked
        return super().next_rendezvous()

    def _open(self) -> TCPStore:
        host = self.master_addr
        port = self.master_port
        if self.rank != 0:
            waiting = Waiting(f"for {host}:{port}", within_s=self._within_s, say=self._say)
            while (why := why_unreachable(host, port=port)) is not None:
                waiting.go_on(why, look_every_s=_LOOK_EVERY_S)
        return store_at(host, port=port, serves=self.rank == 0, within_s=self._within_s)

    def _await_all(self, store: TCPStore) -> None:
        store.set(f"machine.{self.rank}", "here")
        waiting = Waiting(what="for all machines", within_s=self._within_s, say=self._say)
        while not store.check(["machines"]):
            missing = [n for n in range(self.world_size) if not store.check([f"machine.{n}"])]
            if self.rank == 0 and not missing:
                store.set("machines", "all")
                return
            who = ", ".join(map(str, missing)) or "0"
            waiting.go_on(f"--node-rank {who} has not come", look_every_s=_LOOK_EVERY_S)

    def get_backend(self) -> str:
        return "xcloud"  # as it is registered


def _machines_of(parameters: RendezvousParameters) -> RendezvousHandler:
    host, port = host_and_port_of(parameters.endpoint)
    within_s = float(parameters.config.get("timeout", JOIN_WITHIN_S))
    return Machines(
        host,
        port,
        number=int(parameters.config["rank"]),
        num_machines=parameters.max_nodes,
        run_id=parameters.run_id,
        within_s=within_s,
        say=say,
    )


def host_and_port_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of "host:port", "[::1]:port" or "host"."""
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or not port.isdigit():
        host = endpoint.strip()
        port = str(_DEFAULT_PORT)
    return host.strip("[]"), int(port)


def torchrun(words: Sequence[str]) -> int:
    """Start this cloud's ranks: python -m xcloud torchrun OPTIONS -m xcloud worker EXPERIMENT

    OPTIONS are torchrun's. The ranks get the memory settings of a local run (processes.py); what
    is set in the environment stays. No traceback follows what the ranks have said. Exit code 75:
    the same command goes on; a run that was asked to stop is not started again by --max-restarts,
    in any cloud.
    """
    for name, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ |= {**module_paths(), "PYTHONSAFEPATH": "1"}  # as python -P, for torchrun's ranks
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    parser = get_args_parser()
    parser.prog = "python -m xcloud torchrun"
    parser.description = torchrun.__doc__
    # Passed on to the ranks, which save and end; torchrun would take SIGHUP back from nohup.
    handled = [one.name for one in signals_to_stop() if one is not signal.SIGUSR1]
    parser.set_defaults(signals_to_handle=",".join(handled))
    given = parser.parse_args(words)
    logging.disable(logging.ERROR)  # of torchrun, which repeats what its ranks have said
    if given.nproc_per_node.isdigit():
        os.environ["OMP_NUM_THREADS"] = num_threads(int(given.nproc_per_node))
    place = given.rdzv_endpoint or f"{given.master_addr}:{given.master_port or _DEFAULT_PORT}"
    # "static" is torchrun's default: whoever has chosen another rendezvous keeps it.
    is_ours = given.rdzv_backend == "static" and not given.standalone
    if is_ours:
        _take_over_rendezvous(given, place)
    say(f"waiting for all machines at {place}")
    with tempfile.TemporaryDirectory(prefix="xcloud-") as folder:
        os.environ[ENDINGS] = folder
        code = 0
        killed: dict[int, Ending] = {}
        try:
            run(given)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            for rank, failure in error.failures.items():
                if failure.exitcode < 0:  # it could say nothing
                    say(f"xcloud: rank {rank} was ended by {failure.signal_name()}", error=True)
            killed = dict.fromkeys(error.failures, Ending.FAILED)
            codes = {failure.exitcode for failure in error.failures.values()}
            code = EXIT_START_AGAIN if codes == {EXIT_START_AGAIN} else 1
        except SignalException:  # the ranks were given the signal, and have said what they did
            code = EXIT_START_AGAIN
        except StopAsked:
            code = EXIT_START_AGAIN
        except XcloudError as error:
            say(f"xcloud: {error}", error=True)
            return 1
        except DistNetworkError as error:
            is_taken = "EADDRINUSE" in str(error)
            why = "the port is taken" if is_taken else str(error).partition("\n")[0]
            advice = "Give all clouds the address and one free port of the first one's machine"
            say(f"xcloud: rendezvous failed at {place}: {why}. {advice}", error=True)
            return 1
        if code and is_ours and given.node_rank:  # the store ends with the first machine
            leave_endings(place, endings={**killed, **endings_here()}, code=code)
    return code


def _take_over_rendezvous(given: Any, place: str) -> None:
    with contextlib.suppress(ValueError):  # registered before, in this process
        rendezvous_handler_registry.register("xcloud", _machines_of)
    conf = f"rank={given.node_rank}"
    given.rdzv_conf = f"{given.rdzv_conf},{conf}" if given.rdzv_conf else conf
    given.rdzv_backend = "xcloud"
    given.rdzv_endpoint = place


def endings_here() -> dict[int, Ending]:
    """Return how ranks of this machine have ended, as far as they could say so."""
    found: dict[int, Ending] = {}
    folder = os.environ.get(ENDINGS)
    if folder is None:
        return found
    for path in Path(folder).iterdir():
        with contextlib.suppress(OSError, ValueError):
            found[int(path.name)] = Ending(path.read_text())
    return found


def leave_endings(place: str, endings: dict[int, Ending], code: int) -> None:
    """Leave word for rank 0 that this machine's ranks come no more."""
    host, port = host_and_port_of(place)
    if why_unreachable(host, port, within_s=_TELL_WITHIN_S) is not None:
        return  # the first machine has ended, too
    with contextlib.suppress(RuntimeError, XcloudError):
        store = store_at(host, port, serves=False, within_s=_TELL_WITHIN_S)
        # Rank 0 may still wait for them, and would for hours.
        for rank, ending in endings.items():
            reported = Ending.STOPPED if code == EXIT_START_AGAIN else ending
            store.set(ended_key(rank), reported.value)
