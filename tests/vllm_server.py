"""A stand-in for a server of vLLM that keeps the documented protocol of its reloads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from safetensors.torch import load_file

from tests.http_server import QuietHandler, serving


class VllmServer:
    """It serves the weights of a folder that it was started with, or adapters by name."""

    def __init__(self, served: Path | None = None, fails: int = 0) -> None:
        self.served = served
        self.fails = fails
        self.requests = list[str]()
        self.keys = list[str | None]()
        self.is_paused = False
        self.loaded = list[dict[str, Any]]()
        self.url = ""

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> int:
        self.requests.append(path)
        match path:
            case "/pause" if query == {"mode": ["keep"], "clear_cache": ["true"]}:
                self.is_paused = True
            case "/resume":
                self.is_paused = False
            case "/collective_rpc" if body == {"method": "reload_weights"} and self.is_paused:
                if self.fails:
                    self.fails -= 1
                    return 500
                assert self.served is not None
                self.loaded.append(load_file(self.served / "model.safetensors"))
            case "/v1/load_lora_adapter" if body.keys() == {
                "lora_name",
                "lora_path",
                "load_inplace",
            }:
                self.loaded.append(load_file(Path(body["lora_path"], "adapter_model.safetensors")))
            case _:
                return 404
        return 200

    @contextmanager
    def started(self) -> Iterator[VllmServer]:
        server = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                about = urlsplit(self.path)
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                server.keys.append(self.headers["Authorization"])
                status = server.answer(
                    about.path, parse_qs(about.query), json.loads(body) if body else {}
                )
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

        with serving(Handler) as self.url:
            yield self
