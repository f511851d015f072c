"""Chat templates are programs by whoever made a checkpoint. transformers runs them in a sandbox
that reaches no Python object, but that bounds neither time nor memory, so they run in a child
process that has little of both.

`python -P -m xcloud.tasks.chat_template` is that child: a line of JSON for each chat, in and out.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from threading import Lock
from typing import Any

from xcloud.base.bounded import parsed_json
from xcloud.base.project import module_paths, python_command
from xcloud.base.terminal import say

MAX_PROCESSOR_S = 10
"""Of one chat; a usual one takes a thousandth of a second."""
MAX_BYTES = 512 << 20
"""Beside the interpreter and transformers."""
MAX_CHARACTERS = 16 << 20
DATE = "2026-01-01"
"""The day that it is for every template of a run, unless task.date names another: by the clock of
a machine a run would go on with other texts than it began with, and two clouds would differ."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
"""The end of how Python writes an object that has no text of its own: its address, which is
another one in each process."""


class TemplateError(Exception):
    """A template that has failed, or has taken too much."""


@dataclass(eq=False)
class TemplateProcess:
    """A child process that writes chats, started by the first one and again once it was ended. It
    ends with this process.

    processor_s: the seconds of the processor that a chat may take.
    """

    processor_s: int = MAX_PROCESSOR_S
    _process: subprocess.Popen[str] | None = field(default=None, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def close(self) -> None:
        # Forgotten before it is killed: whatever fails below, the next chat gets a new process.
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            # What was not yet written goes nowhere.
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        date: str = DATE,
    ) -> tuple[str, bool]:
        """Return what the template writes, and whether it has asked for the day. Raises
        TemplateError.

        settings: other arguments of transformers' render_jinja_template.
        date: the day that it is for the template.
        """
        chat = {"chat_template": template, "conversations": [list(messages)], **settings}
        request = {"chat": chat, "date": date}
        # One chat at a time: an answer is the line that follows the question.
        with self._lock:
            answer = self._asked(json.dumps(request))
        if not answer:
            raise TemplateError(
                f"it takes more than {self.processor_s} s of the processor, or too much memory"
            )
        found = parsed_json(answer)
        if "error" in found:
            raise TemplateError(found["error"])
        return str(found["text"]), bool(found["dated"])

    def _asked(self, line: str) -> str:
        """Return the answer; "" if the process was ended by one of its limits."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                # `xcloud` is found by the child as it is by this process, installed or not.
                python_command(__name__, str(self.processor_s)), encoding="utf-8",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, **module_paths()},
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            # A limit ends the child without a word, which here is the end of its output.
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.close()
        return answer


@cache
def template_process() -> TemplateProcess:
    """Return the one of this process."""
    made = TemplateProcess()
    atexit.register(made.close)
    return made


def main() -> None:
    """Answer each line of standard input by a text or an error. The argument: how many seconds of
    the processor each may take."""
    import resource

    import jinja2.defaults
    import jinja2.filters
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        """The clock of a template (strftime_now), which stands at the run's date."""

        of_run = datetime.fromisoformat(DATE)
        was_asked = False

        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            Clock.was_asked = True
            return Clock.of_run

    # Templates ask strftime_now, which transformers takes from this name.
    chat_template_utils.datetime = Clock  # type: ignore[attr-defined]
    # The format %s counts seconds by the machine's time zone, and clouds may be in several.
    os.environ["TZ"] = "UTC"
    time.tzset()

    def refuse_draw(*values: object, **settings: object) -> str:
        raise ValueError(
            "it draws at random (random or lipsum), so two clouds, or a resumed run, would learn "
            "other texts"
        )

    jinja2.filters.FILTERS["random"] = refuse_draw
    jinja2.defaults.DEFAULT_NAMESPACE["lipsum"] = refuse_draw

    def limit(kind: int, most: int) -> None:
        # An unprivileged process may lower a hard limit and never raise it again, so only the soft
        # one moves.
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, hard))

    processor_s = int(sys.argv[1])
    # A memory dump of a template that failed would hold the texts.
    limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        # On top of what is mapped now: the interpreter and transformers are not the template's.
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MAX_BYTES)
    for line in sys.stdin:
        # The limit counts from the start of the process: what earlier chats took is added for each
        # one.
        limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + processor_s)
        answer: dict[str, object] = {}
        try:
            request = parsed_json(line)
            Clock.of_run = datetime.fromisoformat(request["date"])
            Clock.was_asked = False
            # Only the text is wanted; the second value is which of it the assistant wrote.
            text = chat_template_utils.render_jinja_template(**request["chat"])[0][0]
            # A text of a chat may hold such words itself, and the request then holds them, too.
            if (found := ADDRESS.search(text)) and found.group() not in line:
                raise ValueError(
                    "it writes an address in memory, which differs between clouds and runs: "
                    f"{found.group():.30}"
                )
            # Checked before it is sent: the parent reads the whole line.
            if len(text) > MAX_CHARACTERS:
                raise ValueError(f"it writes {len(text):,} characters; at most {MAX_CHARACTERS:,}")
            answer["text"] = text
            answer["dated"] = Clock.was_asked
        except MemoryError:
            answer["error"] = f"it takes more than {MAX_BYTES >> 20} MiB"
        except Exception as error:  # whatever a template raises
            # Cut to a length that fits into a message, as a template can raise its whole input.
            answer["error"] = f"{error or type(error).__name__}"[:300]
        say(json.dumps(answer))


if __name__ == "__main__":
    main()
