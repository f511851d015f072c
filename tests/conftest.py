"""What all tests share: one thread and one seed of torch, Ctrl+C that arrives, work side by side.

`python -m pytest` without a file runs in several processes (pytest-xdist) that share the tests:
slow ones each by itself, fast ones by file, in turns, as slow ones leave the processor free for
half of their time. Tests that must not run at the same time carry `xdist_group`; these groups
begin. A named file, --pdb and `-n 0` run in one process.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import warm_ranks
from tests.logged import LOG, Log

# A shell starts what it runs in the background with SIGINT ignored, and children inherit that; the
# tests that interrupt a command would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Toys are no constructors of xcloud; processes that the tests start inherit this.
os.environ["XCLOUD_POLICY"] = str(Path(__file__).parent / "policy.yaml")

# Torch looks up the names of both ends of a connection to its store. Where no name server answers
# each takes ten seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A fresh environment has no compiled files (`pip install --no-compile`). Where Python is told to
# write none, each process of the tests would compile all that it imports, a sixth of their time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

MAX_PROCESSES = 8


@functools.cache
def composed_folder() -> tempfile.TemporaryDirectory[str]:
    """Make the folder of configs that all processes of xdist share (`configs.by_hydra`)."""
    return tempfile.TemporaryDirectory(prefix="xcloud-composed-")


@pytest.fixture(autouse=True)
def _same_numbers_in_every_order() -> None:
    import torch

    torch.set_num_threads(1)
    # torch.manual_seed looks for every kind of device, each time with the stack as a text.
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_line_of_an_earlier_test() -> None:
    LOG.records.clear()
    # Hydra replaces the root logger's handlers when it configures a job.
    if LOG not in logging.root.handlers:
        logging.root.addHandler(LOG)


@pytest.fixture
def caplog() -> Iterator[Log]:
    """In place of pytest's (`tests/logged.py`)."""
    level = logging.root.level
    yield LOG
    logging.root.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _this_checkout_is_read_once() -> None:
    from tests import checkout_once  # torch, which begins threads before forked_workers.py forks

    checkout_once.use()


@pytest.fixture(autouse=True, scope="session")
def _ranks_start_warm(pytestconfig: pytest.Config) -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    if "warm_ranks" in (about := getattr(pytestconfig, "workerinput", {})):
        warm_ranks.connect(about["warm_ranks"])
    from xcloud.launch import processes

    with mock.patch.object(processes, "start_process", warm_ranks.start):
        yield
    warm_ranks.close()


@pytest.fixture(autouse=True, scope="session")
def _pictures_are_empty() -> Iterator[None]:
    """In this process, but for tests that use `pictures`: drawing one takes half a second, and
    every run ends with two."""
    from matplotlib.figure import Figure

    def save(figure: Figure, path: Path, draw: Any = Figure.savefig) -> None:
        draw(figure, path) if _draws else Path(path).touch()

    with mock.patch.object(Figure, "savefig", save):
        yield


@pytest.fixture(autouse=True, scope="session")
def _checkpoints_are_written_at_once() -> Iterator[None]:
    """In this process: the thread that writes them is nice, and many tests wait for it, beside
    other processes that leave it nothing."""
    from xcloud.features.checkpoints import saving

    with mock.patch.object(saving, "_NICENESS", 0):
        yield


@pytest.fixture(autouse=True, scope="session")
def _chats_are_written_by_one_process() -> Iterator[None]:
    """In this process: a task that has checked its chats ends the process that wrote them, and the
    next test would start it again, which takes more than a second."""
    from xcloud.tasks.chat_template import template_process

    with mock.patch.object(template_process(), "close"):
        yield
    template_process().close()


_draws = list[bool]()


@pytest.fixture
def pictures() -> Iterator[None]:
    _draws.append(True)
    yield
    _draws.clear()


@pytest.fixture(scope="session")
def suite_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of all processes of xdist together, for runs of one and the same backbone:
    what is made once is made under a lock."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "suite_cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.hookimpl(tryfirst=True)  # before xdist reads these options
def pytest_cmdline_main(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of the processes: it knows the command line alone
        config.option.loadgroup = config.workerinput["dist"] == "loadgroup"
        return
    if not config.pluginmanager.hasplugin("xdist"):
        return  # not installed or switched off
    option = config.option
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    if option.numprocesses is None and whole and not (option.usepdb or option.collectonly):
        # Two more than cores: slow tests wait for half of their time.
        option.numprocesses = min((os.cpu_count() or 1) + 2, MAX_PROCESSES)
    if option.numprocesses and option.dist == "no":
        option.dist = "loadgroup"
        option.loadscopereorder = False  # ours, below
        if option.maxworkerrestart is None:
            # The one that takes a dead one's place near the end gets no tests, and pytest-xdist
            # 3.8 waits for it for ever. Without it the run ends and names the test.
            option.maxworkerrestart = "0"
        if whole and sys.platform == "linux":
            from tests import forked_workers

            files = [file for root in config.args for file in Path(root).rglob("test_*.py")]
            forked_workers.start(option.numprocesses, sorted(files))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["dist"] = node.config.option.dist
    node.workerinput["composed"] = composed_folder().name
    if sys.platform == "linux":
        node.workerinput["warm_ranks"] = warm_ranks.address()


def pytest_unconfigure(config: pytest.Config) -> None:
    warm_ranks.close()


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.disable()
    about = getattr(session.config, "workerinput", {})
    if about:
        os.environ["XCLOUD_TESTS_COMPOSED"] = about["composed"]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    # Short files last, so that the processes end together.
    sizes = {path: -path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, sizes[item.path]))
    if hasattr(config, "workerinput") and config.option.loadgroup:
        alternate_slow_and_fast(items)
    for item in items:
        if not item.get_closest_marker("slow") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        group = item.get_closest_marker("xdist_group")
        # xdist 3.8 writes "@group" to an attribute that pytest has no more since 9.2.
        if group and hasattr(config, "workerinput") and config.option.loadgroup:
            if hasattr(item, "_id"):
                item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")


def alternate_slow_and_fast(items: list[Any]) -> None:
    """Sort tests so that slow and fast ones come in turns; groups of slow ones begin, as each runs
    in one process, and the last tenth of the fast ones ends, so that the processes end together.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    places = dict[str, float]()
    for place, item in enumerate(slow):
        begins = item.get_closest_marker("xdist_group") is not None
        places[item.nodeid] = -1.0 if begins else 0.9 * place / len(slow)
    for place, item in enumerate(fast):
        places[item.nodeid] = place / len(fast)
    items.sort(key=lambda item: places[item.nodeid])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test fail in a few words where pytest cannot report it. An exception that comes from
    an instruction without a line ends pytest's process, and the run, and nobody learns of it."""
    try:
        report = yield
        if report.failed and LOG.records:
            report.sections.append((f"Captured log {report.when}", LOG.text))
        return report
    except Exception:
        if call.excinfo is None:
            raise
        words = [repr(call.excinfo.value)]
        for frame, line in traceback.walk_tb(call.excinfo.tb):
            words.append(f"{frame.f_code.co_filename}:{line}: {frame.f_code.co_name}")
        return pytest.TestReport(
            item.nodeid,
            item.location,
            keywords={},
            outcome="failed",
            longrepr="\n".join(words),
            when=call.when,
            start=call.start,
            stop=call.stop,
            duration=call.duration,
        )


@pytest.hookimpl(trylast=True)  # after pytest has begun to count
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test with a longer timeout than others run beyond pytest's faulthandler_timeout."""
    timeout = item.get_closest_marker("timeout")
    if timeout is not None and timeout.args[0] > float(item.config.getini("timeout")):
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not walk it again and again."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # tests make much that no reference keeps for long
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Without xdist's "@group", so that --last-failed and a copied name find the test."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # what is read is the report of the process that starts the others
    name, at, group = report.nodeid.rpartition("@")
    if at and group.isidentifier():
        report.nodeid = name
