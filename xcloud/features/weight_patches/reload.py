"""`follow --reload`: let what serves the followed folder read its new weights."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from xcloud.base.errors import ConfigError, DataError

FORMS = "vllm=URL (a server of vLLM) or command=WORDS (a command of this machine)"
TIMEOUT_S = 600.0
"""Of one request: a server reads a large checkpoint for minutes."""


class Server(ABC):
    """Whatever serves the weights of a followed folder."""

    @abstractmethod
    def reload(self, folder: Path) -> None:
        """Let it read the folder's weights again. Raises DataError with the reason if it has not
        done so."""


@dataclass(frozen=True)
class Vllm(Server):
    """A server of vLLM, by its own HTTP interface.

    Adapters are loaded again under the name of the folder (`/v1/load_lora_adapter` with
    `load_inplace`). A whole model is read again from the path that the server was started with
    (`/collective_rpc` with `reload_weights`): requests are held meanwhile (`/pause`, which also
    forgets cached keys and values) and continue with the new weights (`/resume`). With
    VLLM_API_KEY in the environment, requests carry that key.
    """

    url: str

    def reload(self, folder: Path) -> None:
        if (folder / "adapter_config.json").exists():
            names = {"lora_name": folder.name, "lora_path": str(folder.resolve())}
            self._post("/v1/load_lora_adapter", {**names, "load_inplace": True})
            return
        # Cached keys and values are of the old weights: kept, they would mix both in one answer.
        self._post("/pause?mode=keep&clear_cache=true")
        try:
            self._post("/collective_rpc", {"method": "reload_weights"})
        # Also where reading failed: the server goes on with the weights that it has.
        finally:
            self._post("/resume")

    def _post(self, path: str, body: dict[str, object] | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data, {"Content-Type": "application/json"}
        )
        if key := os.environ.get("VLLM_API_KEY"):
            # A redirect may lead to somebody else, who is not sent the key.
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                came_from = answer.url
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise DataError(f"{request.full_url} answers {error.code}: {said}") from error
        except (OSError, HTTPException) as error:
            raise DataError(f"{request.full_url} cannot be reached: {error}") from error
        # urllib turns what is redirected into a GET, which lets nobody read weights.
        if came_from != f"{self.url}{path}":
            raise DataError(f"{self.url}{path} is redirected to {came_from}: give that address")


@dataclass(frozen=True)
class Command(Server):
    """A command of this machine, which gets the folder as its last word."""

    words: tuple[str, ...]

    def reload(self, folder: Path) -> None:
        words = [*self.words, str(folder.resolve())]
        try:
            # Words and no shell; without standard input, for which it would wait unseen.
            done = subprocess.run(words, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"{shlex.join(words)}: {error}") from error
        if done.returncode:
            raise DataError(f"{shlex.join(words)} ended with exit code {done.returncode}")


def server_of(given: str) -> Server:
    """Return the server that --reload names. Raises ConfigError for another form."""
    kind, _, value = given.partition("=")
    if kind == "vllm" and value.startswith(("http://", "https://")):
        return Vllm(value.rstrip("/"))
    if kind == "command" and value.strip():
        return Command(tuple(shlex.split(value)))
    raise ConfigError(
        f"--reload must be {FORMS}, such as vllm=http://127.0.0.1:8000; got {given!r}"
    )
