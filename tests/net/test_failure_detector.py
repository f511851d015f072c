"""Heartbeats and barriers, without networks: links in memory, ranks in threads."""

import math
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.channels import InProcessLink
from tests.pipelines import heartbeat, in_threads
from tests.runs import wait_for
from xcloud.base.errors import ConfigError, FrameError, LinkClosed, LinkTimeout
from xcloud.launch.several_machines import await_monitor
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.failure_detector import FailureDetector
from xcloud.net.frame import (
    OF_A_STEP,
    Frame,
    Kind,
    MessageKey,
    encode_frame,
    seal_frame,
)
from xcloud.net.gloo_link import GlooOutLink
from xcloud.net.link import Progress
from xcloud.net.link_end import InSettings, OutSettings, ReceivingEnd
from xcloud.net.link_profile import LinkProfile, LinkWindow, Liveness, Wan
from xcloud.net.memory_transport import MemoryWorld
from xcloud.net.peer import Peer
from xcloud.pipeline.control import Control, number_of
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.wiring import join_control

QUICK = Liveness(interval_s=0.1, lost_after_s=0.5)


def controls(num_ranks: int, overdue_s: float) -> list[Control]:
    """A star of links in memory; the detectors are fed by the tests."""
    up = {rank: InProcessLink(f"rank {rank}") for rank in range(1, num_ranks)}
    down = {rank: InProcessLink("rank 0") for rank in range(1, num_ranks)}
    knows = [FailureDetector(rank, num_ranks, QUICK) for rank in range(num_ranks)]
    first = Control(0, down, up, overdue_s, knows[0])
    return [first] + [
        Control(rank, {0: up[rank]}, {0: down[rank]}, overdue_s, knows[rank])
        for rank in range(1, num_ranks)
    ]


def test_nobody_leaves_a_barrier_before_the_last_has_come() -> None:
    ranks = controls(3, 20.0)
    came, left = [], []

    def work(rank: int) -> None:
        for _ in range(2):
            time.sleep(0.2 * rank)
            came.append(time.monotonic())
            ranks[rank].barrier()
            left.append(time.monotonic())

    in_threads([lambda rank=rank: work(rank) for rank in range(3)])

    assert min(sorted(left)[:3]) >= max(sorted(came)[:3])
    assert min(sorted(left)[3:]) >= max(sorted(came)[3:])


@pytest.mark.parametrize("number", [0, 7])
def test_a_number_that_rank_0_gives_at_a_barrier_comes_to_all(number: int) -> None:
    ranks = controls(3, 5.0)
    told = in_threads(
        [lambda r=rank: ranks[r].barrier(number=number * (r == 0)) for rank in range(3)]
    )
    assert told == [number] * 3


@pytest.mark.parametrize(
    "parts",
    [(torch.tensor([7.0]),), (torch.tensor([7, 8]),), (torch.tensor([7]), torch.tensor([8]))],
)
def test_what_is_no_number_is_refused_at_a_barrier(parts: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(FrameError, match="came to a barrier of all ranks, expected one number"):
        number_of(parts)


def test_a_barrier_waits_for_whoever_gives_signs_of_life_and_names_who_does_not() -> None:
    ranks = controls(3, 0.2)
    started_s = time.monotonic()

    def busy() -> None:
        with heartbeat(QUICK.interval_s, lambda: ranks[0].detector.peers[2].mark_alive()):
            time.sleep(1.0)

    def wait() -> str:
        with pytest.raises(LinkTimeout) as raised:
            ranks[0].barrier()
        return str(raised.value)

    ranks[1].out[0].send(MessageKey(Kind.BARRIER, 1), ())
    said, _ = in_threads([wait, busy])

    assert "rank 2 has not come" in said and "sent no heartbeat for" in said
    assert "cluster.wan" not in said  # there may be no such setting
    assert time.monotonic() - started_s > 1.0 + QUICK.lost_after_s - QUICK.interval_s - 0.1


def test_the_end_of_any_rank_ends_the_barrier_at_once() -> None:
    """Also of one behind another that is busy for long."""

    class Gone(InProcessLink):
        def recv(self, key: MessageKey, overdue_s: float) -> tuple[torch.Tensor, ...]:
            raise LinkClosed("rank 2 is gone")

    first = controls(3, 600.0)[0]
    first.incoming[2] = Gone()

    with pytest.raises(LinkClosed, match="rank 2 is gone"):
        first.barrier()


def alive(*parts: Sequence[float]) -> Frame:
    made = tuple(torch.tensor(part, dtype=torch.float32) for part in parts)
    return Frame(MessageKey(Kind.ALIVE), made, 0, 0.0, 0)


def test_rank_0_passes_on_when_it_heard_the_others() -> None:
    detector = FailureDetector(1, num_ranks=4)
    ages = (0.0, 0.0, 30.0, math.inf)

    detector.receive(0, alive(ages, [9.0]))

    assert 30 <= detector.peers[2].silent_s < 35
    assert detector.peers[3].silent_s == float("inf")  # it has not come
    assert 9 <= time.monotonic() - detector.progress.moved_at_s < 14
    with pytest.raises(FrameError, match="must carry one vector of ages"):
        detector.receive(0, alive(ages, ages, [9.0]))
    with pytest.raises(FrameError, match="rank 2 reports on other ranks"):
        detector.receive(2, alive(ages, [9.0]))
    for moved in ([-1.0], [math.nan], [1.0, 2.0], []):
        with pytest.raises(FrameError, match="for how many seconds no message has moved"):
            detector.receive(2, alive(moved))


def test_a_heartbeat_of_rank_0_says_when_it_heard_each_rank() -> None:
    sent: list[list[float]] = []

    class Out:
        def say_alive(self, parts: tuple[torch.Tensor, ...], carries: Sequence[str]) -> None:
            sent.append(parts[0].tolist())

    detector = FailureDetector(0, 3, QUICK)
    detector.beat_over(1, Out())  # type: ignore[arg-type]
    detector.peers[1].mark_alive()
    with detector.running():
        wait_for(lambda: bool(sent), 10)

    own, first, second = sent[0]
    assert own == 0 and first < 5 and second == float("inf")


def test_a_peer_that_says_nothing_is_given_what_its_message_may_take() -> None:
    life = Peer(QUICK, now_s=lambda: 100.0)

    assert life.left_s(waited_s=3.0, overdue_s=7.0) == 4.0
    life.mark_alive(age_s=-60.0)  # a message under way on an emulated link
    life.mark_alive()
    assert life.left_s(waited_s=3.0, overdue_s=7.0) == 60.0 + QUICK.lost_after_s
    assert life.silent_s == 0.0  # what is under way is no later sign of its process


def test_a_message_that_an_emulated_line_holds_back_is_waited_for_until_it_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line tells its moment by another clock than a detector's, which may stand still."""
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    life = Peer(QUICK, now_s=lambda: 100.0)
    life.note_taken(arrives_at_s=67.0)
    assert life.left_s(waited_s=3.0, overdue_s=7.0) == 60.0 + QUICK.lost_after_s
    assert life.silent_s == math.inf, "its process was not heard"


def test_a_message_of_a_step_is_waited_for_while_its_sender_lives_and_not_longer() -> None:
    """Silence for lost_after_s ends it before overdue_s, life does not prolong that."""

    def waited_s(overdue_s: float, lives_s: float, lost_after_s: float) -> tuple[float, str]:
        life = Peer(Liveness(0.1, lost_after_s))
        life.silence_is_loss = True
        end, started_s = ReceivingEnd(InSettings("rank 1", 1000, peer=life)), time.monotonic()
        beating = heartbeat(
            0.1, lambda: time.monotonic() - started_s < lives_s and life.mark_alive()
        )
        with beating, pytest.raises(LinkTimeout) as raised:
            end.recv(MessageKey(Kind.GRADIENT, 3), overdue_s)
        return time.monotonic() - started_s, str(raised.value)

    seconds, said = waited_s(overdue_s=30.0, lives_s=0.8, lost_after_s=1.0)
    assert 1.0 < seconds < 15.0 and "Its last heartbeat came" in said
    seconds, _ = waited_s(overdue_s=0.8, lives_s=60.0, lost_after_s=20.0)
    assert 0.7 < seconds < 15.0


def test_whoever_waits_while_the_peer_lives_counts_no_time_of_the_link() -> None:
    """As for a merge of a first cloud whose round is long; it ends with the link."""
    for while_alive, error in ((False, LinkTimeout), (True, LinkClosed)):
        life = Peer(Liveness(0.1, 60.0))
        end = ReceivingEnd(InSettings("rank 1", 1000, peer=life))
        life.mark_alive()
        over = threading.Timer(0.3, end._end, [LinkClosed("the link is over")])
        over.start()
        with pytest.raises(error):
            end.recv(MessageKey(Kind.AVERAGING, 3), 0.01, while_alive)
        over.join()


@pytest.mark.parametrize("kind", OF_A_STEP)
def test_a_message_of_a_step_is_overdue_only_once_nothing_of_a_step_has_moved_for_as_long(
    kind: Kind,
) -> None:
    """A norm of a few bytes comes behind all gradients of its update."""
    progress = Progress()
    end = ReceivingEnd(InSettings("rank 1", 1000, peer=Peer(QUICK), progress=progress))
    moved_at_s = time.monotonic() + 0.2  # an emulated line delivers it then
    progress.note(moved_at_s)
    progress.note(time.monotonic())  # what comes earlier changes nothing

    with pytest.raises(LinkTimeout):
        end.recv(MessageKey(kind, 3), overdue_s=0.1)

    assert time.monotonic() >= moved_at_s + 0.1


def test_a_barrier_and_a_replica_that_may_be_late_are_given_their_time_and_no_more() -> None:
    for progress, kind in ((Progress(), Kind.BARRIER), (None, Kind.AVERAGING)):
        end = ReceivingEnd(InSettings("rank 1", 1000, peer=Peer(QUICK), progress=progress))
        if progress is not None:
            progress.note(time.monotonic() + 3600.0)
        with pytest.raises(LinkTimeout):  # or the test takes an hour
            end.recv(MessageKey(kind, 3), overdue_s=0.1)


@pytest.mark.parametrize(
    ("wan", "waiting", "for_whom", "between"),
    [
        (LinkProfile(8e6), 0, 1, (1, 2)),
        (Wan(), 0, 1, (1, 2)),
        (Wan(), 2, 1, (0, 1)),
        (Wan(), 1, 0, (2, 0)),
        (Wan(), 2, 0, (0, 1)),
    ],
)
def test_what_moves_between_two_ranks_is_known_to_a_third(
    wan: Wan, waiting: int, for_whom: int, between: tuple[int, int], tmp_path: Path
) -> None:
    """As a rank waits for what another makes of a message that is still on its way. On one machine
    a file says so, on several heartbeats do, by way of rank 0."""
    liveness = Liveness(0.1, 20.0)
    layout = ClusterLayout({"a": Cloud(), "b": Cloud(), "c": Cloud()}, wan, liveness=liveness)
    world = MemoryWorld(3)
    ends = in_threads(
        [lambda r=rank: Ends(world.transport(r), layout, tmp_path) for rank in range(3)]
    )
    window = LinkWindow()
    waits = ends[waiting].incoming("backward", for_whom, 1000, window)
    at = ends[between[1]].incoming("forward", between[0], 1000, window)
    with ExitStack() as running:
        if not wan.emulated:
            for rank in range(3):
                join_control(ends[rank], on_report=lambda peer, frame: None)
            for rank in range(3):
                running.enter_context(ends[rank].detector.running())
        until_s = time.monotonic() + 0.45
        moving = heartbeat(0.05, lambda: time.monotonic() < until_s and at.settings.note_moving())
        with moving, pytest.raises(LinkTimeout):
            waits.recv(MessageKey(Kind.GRADIENT, 3), overdue_s=0.3)

    assert until_s + 0.1 <= time.monotonic() < until_s + 5.0


@pytest.mark.parametrize("settings", [(1e-9, 60.0), (5.0, 0.0), (5.0, 14.0), (5.0, 20.0, 0.0)])
def test_a_policy_that_cannot_work_is_refused(settings: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.liveness"):
        Liveness(*settings)


def test_a_message_on_an_emulated_line_may_take_ten_times_its_transfer_longer() -> None:
    clouds = {"a": Cloud(), "b": Cloud()}
    liveness = Liveness(overdue_after_s=7.0)
    line = LinkProfile(1e6, latency_s=0.5)

    emulated = ClusterLayout(clouds, line, liveness=liveness)

    assert ClusterLayout(clouds, "real", liveness=liveness).overdue_s(0, 1, 1000) == 7.0
    assert emulated.overdue_s(0, 1, 1000) == 7.0 + 10 * line.transfer_s(1000)


def test_a_record_that_takes_long_to_write_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    monitor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])

    await_monitor(monitor, note_s=0.1)

    assert monitor.returncode == 0
    assert f"process {monitor.pid} still writes its record" in capsys.readouterr().out


class Taker:
    """In place of a link between two ranks: takes everything at once."""

    def join(self) -> None:
        """There is nobody."""

    def isend(self, frame: torch.Tensor, tag: int) -> "Taker":
        return self

    def irecv(self, buffer: torch.Tensor, tag: int) -> "Taker":
        return self

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("beats", [True, False])
@pytest.mark.parametrize("kind", [Kind.ALIVE, Kind.BARRIER])
def test_what_was_taken_is_no_sign_of_life_of_a_peer_that_gives_its_own(
    kind: Kind, beats: bool
) -> None:
    # Its machine takes as much as it has announced, with the line cut or the peer stopped. Nor is
    # a heartbeat of ours: the peer's own may lie in a line that never came about.
    life = Peer()
    life.silence_is_loss = beats
    out = OutSettings("rank 1", 4096, window=LinkWindow(num_posted=1), peer=life)
    link = GlooOutLink(Taker(), out)  # type: ignore[arg-type]
    link.send(MessageKey(kind), ())
    link._queue.put(None, 0)
    link._thread.join(5.0)
    assert life.silent_s == float("inf")
    is_given_time = life.left_s(waited_s=1000.0, overdue_s=0.0) > 0
    assert is_given_time == (kind is Kind.BARRIER and not beats)


def test_a_peer_is_silent_lost_after_s_after_its_last_word_and_until_the_next() -> None:
    now_s = [0.0]
    detector = FailureDetector(0, 3, clock_s=lambda: now_s[0])
    peers = detector.peers

    def silent_after(seconds: float) -> list[int]:
        """Looking once a second."""
        for _ in range(int(seconds)):
            now_s[0] += 1.0
            found = detector.silent()
        return found

    assert silent_after(100.0) == []  # nobody has come
    peers[1].mark_alive()
    peers[2].mark_alive()
    assert silent_after(15.0) == []
    peers[2].mark_alive()
    assert silent_after(5.0) == [] and silent_after(1.0) == [1]
    peers[1].forget()
    assert silent_after(14.0) == [] and silent_after(1.0) == [2]
    peers[1].mark_alive()
    peers[2].mark_alive()
    assert silent_after(20.0) == [] and silent_after(1.0) == [1, 2]


def test_a_rank_that_was_stopped_itself_blames_nobody_for_that_time() -> None:
    now_s = [0.0]
    detector = FailureDetector(0, 3, clock_s=lambda: now_s[0])
    detector.peers[1].mark_alive()
    for now_s[0], found in ((8.0, []), (15.0, []), (75.0, []), (79.0, []), (81.0, [1])):
        assert detector.silent() == found


@pytest.mark.parametrize(("numbers", "came"), [((0, 0), 0), ((0, 2), 2), ((1,), 1)])
def test_a_frame_that_is_repeated_or_lost_is_refused(numbers: Sequence[int], came: int) -> None:
    """Even of the key that is waited for."""
    end = ReceivingEnd(InSettings("rank 1", 1000, peer=Peer(QUICK)))
    key, value = MessageKey(Kind.GRADIENT, 3), torch.ones(2)
    *good, last = (encode_frame(key, (value,), number) for number in numbers)
    for frame in (*good, last):
        seal_frame(frame, 0.0)
    for frame in good:
        end._open(frame)
    said = f"message {came} from rank 1 came as number {len(good)}"
    with pytest.raises(FrameError, match=said):
        end._open(last)


@pytest.mark.parametrize(("asleep_s", "is_silent"), [(1.6, False), (0.9, True)])
def test_time_in_which_this_machine_slept_is_nobodys_silence(
    asleep_s: float, is_silent: bool
) -> None:
    """From half of lost_after_s on without a look it was asleep."""
    now_s = [100.0]
    liveness = Liveness(interval_s=0.5, lost_after_s=3.0)
    detector = FailureDetector(0, 2, liveness=liveness, clock_s=lambda: now_s[0])
    peer = detector.peers[1]
    peer.mark_alive()
    for _ in range(4):
        now_s[0] += asleep_s
        silent_s = peer.silent_s
    assert silent_s == pytest.approx(4 * asleep_s if is_silent else 0.0)
    assert peer.is_silent is is_silent


def test_a_message_that_an_emulated_line_holds_back_makes_its_sender_no_younger() -> None:
    """It was heard when the message came, and the wait lasts until it is delivered."""
    peer = Peer(Liveness(interval_s=0.5, lost_after_s=3.0))
    settings = InSettings("b", 1000, peer=peer, is_emulated=True)
    frame = encode_frame(MessageKey(Kind.NORM, 1), (), sequence=0)
    seal_frame(frame, deliver_at_s=time.monotonic() + 60.0)
    ReceivingEnd(settings)._open(frame)
    assert peer.silent_s < 30.0
    assert 30.0 < peer.left_s(1000.0, overdue_s=1.0) <= 63.0
