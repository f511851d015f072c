"""A carrier that the package does not have, all of it here: a TCP connection for each direction of
each line. The cluster's config chooses it, and a whole run goes through it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from tests.combinations import losses, run
from tests.pipelines import in_threads
from tests.toy import toy_config
from xcloud.base.errors import LinkClosed, LinkError
from xcloud.job.config import Settings
from xcloud.job.job import Job
from xcloud.launch import one_rank
from xcloud.launch.one_rank import join
from xcloud.net.frame import Kind, seal_frame
from xcloud.net.link_end import (
    InSettings,
    Outgoing,
    OutSettings,
    ReceivingEnd,
    SendingEnd,
)
from xcloud.net.transport import CPU, Collectives, Rendezvous, Transport
from xcloud.rank.agreement import rendezvous_here, table_of
from xcloud.rank.stop_signal import StopSignal

_LENGTH = struct.Struct("<Q")
carried: list[int] = []


class Sockets:
    """The carrier, as `cluster.carrier` names it."""

    def transport(self, rendezvous: Rendezvous) -> Transport:
        return SocketTransport(rendezvous)


class SocketTransport(Transport):
    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        return SocketOut(self.rendezvous, f"{line} {self.rank}-{peer}", peer, settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        server = socket.create_server(("127.0.0.1", 0))
        self.rendezvous.write(f"{line} {peer}-{self.rank}", str(server.getsockname()[1]))
        return SocketIn(server, settings)

    def group(self, ranks: Any, device: torch.device = CPU) -> Collectives | None:
        assert len(ranks) == 1, "this carrier joins no ranks of one cloud"
        return None


class SocketOut(SendingEnd):
    def __init__(
        self, rendezvous: Rendezvous, name: str, peer: int, settings: OutSettings
    ) -> None:
        super().__init__(settings)
        self._port = partial(rendezvous.read, name, peer)
        self._socket: socket.socket | None = None

    def _put(self, item: Outgoing) -> None:
        if self._socket is None:  # by now the other side has made its end, or soon will
            self._socket = socket.create_connection(("127.0.0.1", int(self._port())))
        seal_frame(item.frame, -time.monotonic())
        self.record.sending(item.key, item.sequence, item.frame.numel(), item.queued_at_s)
        carried.append(item.frame.numel())
        self._socket.sendall(_LENGTH.pack(item.frame.numel()) + item.frame.numpy().tobytes())

    def close(self, timeout_s: float) -> None:
        with self._sending:
            self._send_closes(1)
            assert self._socket is not None
            self._socket.close()


class SocketIn(ReceivingEnd):
    def __init__(self, server: socket.socket, settings: InSettings) -> None:
        super().__init__(settings)
        threading.Thread(target=self._run, args=(server,), daemon=True).start()

    def _run(self, server: socket.socket) -> None:
        with server, server.accept()[0] as connection, connection.makefile("rb") as stream:
            try:
                while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                    data = bytearray(stream.read(_LENGTH.unpack(head)[0]))
                    frame = self._open(torch.frombuffer(data, dtype=torch.uint8))
                    if frame.key.kind is Kind.CLOSE:
                        self._leave()
                        stream.read()  # the other closes
                        return
                    self._deliver(frame)
                self._end(LinkClosed(f"{self.peer_name} is gone"))
            except LinkError as error:
                self._end(error)


def job_of(**cluster: Any) -> Job:
    config = OmegaConf.create(toy_config("two_clouds", ["training.max_steps=6"]))
    config.model.dropout = 0.0  # ranks in threads share torch's generator
    for name, value in cluster.items():
        OmegaConf.update(config, f"cluster.{name}", value, force_add=True)
    return Settings.of(config).job


def test_a_run_goes_through_the_carrier_that_the_config_names(
    tmp_path: Path, monkeypatch: Any
) -> None:
    job = job_of(wan="free", carrier={"_target_": f"{__name__}.Sockets"})
    (ours := tmp_path / "sockets").mkdir()

    def one(rank: int) -> None:
        rendezvous, verdict = join(
            job, table_of({}), rank, ours, partial(rendezvous_here, job, rank, ours)
        )
        transport = job.cluster.carrier.transport(rendezvous)
        process = one_rank.Process(StopSignal())
        one_rank.run_rank(Settings(job, {}), ours, verdict, process, transport)

    in_threads([partial(one, rank) for rank in range(2)])
    run(job_of(wan="free"), tmp_path / "memory", monkeypatch)

    assert len(carried) > 50 and min(carried) > 0
    assert losses(ours) == losses(tmp_path / "memory") and len(losses(ours)) == 6
    assert (ours / "rank1.wire.json").exists()
