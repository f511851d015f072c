"""The live line: what it shows, how often, and that notes do not tear it."""

import io
import re
import time
from collections.abc import Mapping

import pytest

from tests.configs import build
from xcloud.base.units import human_duration
from xcloud.record.events import Key, StepTotals
from xcloud.show.display import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What a reader sees: \\r goes back to the start of the line, ESC[2K empties it."""
        lines = []
        for line in re.sub(r"\x1b\[\?25[lh]", "", self.getvalue()).split("\n"):
            shown = ""
            for part in line.split("\r"):
                *emptied, written = part.split("\x1b[2K")
                shown = written + ("" if emptied else shown[len(written) :])
            lines.append(shown.rstrip())
        return lines


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def totals(
    step: int, loss: float = 3.0, step_s: float = 0.4, more: Mapping[Key, float] | None = None
) -> StepTotals:
    numbers: dict[Key, float] = {
        ("num_ranks", "source"): 1, ("num_ranks", "target"): 1,
        ("tokens",): 172, ("waiting_s", "source"): 0.05, ("waiting_s", "target"): 0.1,
        ("sent", "forward"): 100_000.0, ("sent", "backward"): 25_000.0,
    }  # fmt: skip
    return StepTotals(step, step_s, loss=loss, numbers={**numbers, **(more or {})})


def test_line_shows_step_loss_times_link_use_and_time_left() -> None:
    stream = io.StringIO()
    there, back, other = ("a", "b"), ("b", "a"), ("b", "c")
    busy_s: dict[Key, float] = {
        ("line_busy_s", "forward", there): 0.15, ("line_busy_s", "forward", other): 0.1,
        ("line_busy_s", "backward", back): 0.1, ("line_busy_s", "x", there): 0.05,
    }  # fmt: skip
    line = ProgressLine(2000, stream=stream, clock=Clock())
    line.update(totals(1000, more=busy_s))

    # The busiest line, which carries two kinds, is busy half of the time.
    assert stream.getvalue() == (
        "step 1000/2000  7 min left  loss 3.000  0.400 s/step  430 tokens/s  "
        "target waits 0.100 s  link 50 %\n"
    )


def test_a_link_of_unknown_bandwidth_shows_its_rate() -> None:
    stream = io.StringIO()
    ProgressLine(10, stream=stream).update(totals(1))
    assert "sends 2 Mbit/s" in stream.getvalue()


def test_a_run_in_one_cloud_says_that_nothing_crosses() -> None:
    stream = io.StringIO()
    ProgressLine(10, stream=stream).update(StepTotals(1, 0.4, loss=3.0, numbers={("tokens",): 4}))
    assert stream.getvalue().endswith("  nothing crosses clouds\n")


def test_replicas_that_train_apart_say_when_they_merge_next() -> None:
    """Between two merges nothing crosses, and yet the job's clouds are not alone."""
    job = build("+exp=lora_clm", "strategy=streaming", "strategy.averaging.every=10")
    assert job.strategy.averaging.fragments == 4
    due = {
        1 + step for step in range(40)
        if any(
            (1 + step) % 10 == job.strategy.averaging.offset(number) for number in range(4)
        )
    }  # fmt: skip
    for step in range(39):
        assert job.next_merge(step) == min(number for number in due if number > step)
    stream = io.StringIO()
    line = ProgressLine(40, stream=stream, next_merge=lambda step: step + 3)
    line.update(StepTotals(1, 0.4, loss=3.0, numbers={("tokens",): 4}))
    assert stream.getvalue().endswith("  next merge at step 4\n")


def test_loss_is_smoothed_and_starts_unbiased() -> None:
    stream = io.StringIO()
    clock = Clock()
    progress = ProgressLine(100, stream=stream, clock=clock)
    for step, loss in enumerate([4.0, 2.0], start=1):
        clock.now_s += 30
        progress.update(totals(step, loss=loss))
    first, second = stream.getvalue().splitlines()
    assert "loss 4.000" in first
    assert "loss 2.947" in second  # (0.9 * 4 + 2) / 1.9


def test_elsewhere_than_on_a_terminal_a_line_comes_every_thirty_seconds() -> None:
    stream = io.StringIO()
    clock = Clock()
    progress = ProgressLine(1000, stream=stream, clock=clock)
    for step in range(1, 204):  # 25 s, eight steps a second
        progress.update(totals(step))
        clock.now_s += 0.375
    progress.close()

    lines = stream.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines] == [
        *("step 1", "step 81", "step 161"),
        "step 203",  # the last state, at close
    ]
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_one_line_is_rewritten_ten_times_a_second_at_most() -> None:
    stream = Terminal()
    progress = ProgressLine(1000, stream=stream)
    started_s = time.monotonic()
    for step in range(1, 101):
        progress.update(totals(step))
        time.sleep(0.005)
    elapsed_s = time.monotonic() - started_s
    progress.close()

    assert 2 <= stream.getvalue().count("/1000 ") <= 10 * elapsed_s + 3
    assert len(stream.screen()) == 2 and stream.screen()[0].startswith("step 100/1000")


def test_a_terminal_that_cannot_rewrite_gets_lines_as_a_file_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream, clock = Terminal(), Clock()
    progress = ProgressLine(10, stream=stream, clock=clock)
    for step in (1, 2, 3):
        progress.update(totals(step))
        clock.now_s += 5
    progress.close()

    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == ["step 1", "step 3"]


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_a_file_gets_lines_whatever_the_environment_says_of_colors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook sets FORCE_COLOR for what it starts, as many CI services do."""
    monkeypatch.setenv(name, "1")
    stream, clock = io.StringIO(), Clock()
    progress = ProgressLine(10, stream=stream, clock=clock)
    for step in (1, 2, 3):
        progress.update(totals(step))
        clock.now_s += 5
    progress.close()

    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == ["step 1", "step 3"]
    assert "\x1b" not in stream.getvalue()


def test_the_last_step_is_printed_before_the_evaluation() -> None:
    stream = io.StringIO()
    progress = ProgressLine(2, stream=stream, clock=Clock())
    progress.update(totals(1))
    progress.update(totals(2))
    progress.show({"event": "phase", "cloud": "source", "name": "evaluation"})
    progress.close()
    assert [line[:8] for line in stream.getvalue().splitlines()] == [
        *("step 1/2", "step 2/2", "evaluati"),
    ]


def test_notes_stand_above_the_line_and_leave_nothing_of_it() -> None:
    stream = Terminal()
    progress = ProgressLine(10, stream=stream, clock=Clock())
    progress.show({"event": "start", "cloud": "source", "headline": "two ranks"})
    progress.show({"event": "phase", "cloud": "source", "name": "training"})
    progress.show({"event": "phase", "cloud": "target", "name": "training"})
    progress.update(totals(1))
    progress.show({"event": "note", "cloud": "target", "text": "hi [bold] 7"})
    progress.show(
        {
            "event": "quality",
            "cloud": "target",
            "split": "dev",
            "step": 1,
            "values": {"bleu": 31.2, "accuracy": 92.234},
            "evaluation_s": 12.3,
        }
    )
    progress.close()

    *notes, line, end = stream.screen()
    assert notes == [
        "source: two ranks",
        "training",
        "target: hi [bold] 7",
        "dev at step 1: BLEU 31.20  accuracy 92.23  (12 s)",
    ]
    assert line.startswith("step 1/10") and end == ""


def test_line_never_leaves_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    progress = ProgressLine(10, stream=stream, clock=Clock())
    progress.update(totals(1))
    progress.close()
    (line, end) = stream.screen()
    assert line == "step 1/10  4 s left" and end == "", "the loss has no room"


def test_terminal_that_speaks_ascii_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ProgressLine(10, stream=stream).note("año")
    assert raw.getvalue() == b"a?o\n"


def test_close_without_any_step_prints_nothing() -> None:
    stream = Terminal()
    ProgressLine(10, stream=stream).close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-0.4, "0 s"),
        (99, "99 s"),
        (150, "2 min"),
        (7500, "2 h 05 min"),
        (float("nan"), "?"),
    ],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


QUALITY = {
    "event": "quality", "split": "test", "step": 9, "values": {"bleu": 31.25, "chrf": 50.0},
    "errors": {"bleu": 0.5}, "evaluation_s": 42.0, "samples_text": "a -> b\n\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "start", "cloud": "a", "headline": "GPipe"}, ["a: GPipe"]),
        ({"event": "start", "cloud": "a", "headline": ""}, []),
        ({"event": "note", "cloud": "b", "text": "no dropout"}, ["b: no dropout"]),
        ({"event": "resume", "step": 4}, ["resumes from step 4"]),
        ({"event": "resume", "step": 0}, ["restarts"]),
        ({"event": "resume", "step": 4, "steps_again": 1, "changed": ["seed 1 -> 2", "c a -> b"]},
         ["resumes from step 4; 1 step done before are repeated; changed: seed 1 -> 2, c a -> b"]),
        ({"event": "resume", "step": 0, "steps_again": 7},
         ["restarts; 7 steps done before are repeated"]),
        (QUALITY, ["test at step 9: BLEU 31.25 ± 0.50  chrF 50.00  (42 s)", "a -> b"]),
        ({**QUALITY, "split": "dev", "evaluation_s": None},
         ["dev at step 9: BLEU 31.25 ± 0.50  chrF 50.00"]),
        ({**QUALITY, "step": 0}, ["test at step 0: BLEU 31.25 ± 0.50  chrF 50.00  (42 s)"]),
        ({"event": "fed", "cloud": "a", "loss": 1.5}, []),
        ({"event": "unknown"}, []),
    ],
)  # fmt: skip
def test_what_ranks_tell_is_a_line_each(event: dict[str, object], said: list[str]) -> None:
    stream = io.StringIO()
    ProgressLine(9, stream=stream).show(event)
    assert stream.getvalue().splitlines() == said


def test_a_phase_is_said_once_though_every_rank_tells_it_and_a_loss_is_in_the_line() -> None:
    stream = io.StringIO()
    line = ProgressLine(9, stream=stream)
    for name in ("training", "training", "evaluation", "training"):
        line.show({"event": "phase", "name": name})
    assert stream.getvalue().splitlines() == ["training", "evaluation", "training"]
    line.show({"event": "fed", "cloud": "b", "loss": 1.5})
    line.update(totals(1, more={("taken", "a"): 1, ("taken", "b"): 3}))
    assert "  a (25 %)  b 1.50 (75 %)  " in stream.getvalue()
