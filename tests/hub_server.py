"""A small server of the hub's protocol, in the process that asks for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.http_server import QuietHandler, serving


class HubServer:
    """Serves data sets: owner/name to the files of each commit, the newest last."""

    def __init__(self, sets: dict[str, dict[str, dict[str, bytes]]]) -> None:
        self.sets = sets
        self.url = ""

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers."""
        is_api = path.startswith("/api")
        words = path.removeprefix("/api").strip("/").split("/")
        name = "/".join(words[1:3])
        if words[0] != "datasets" or name not in self.sets:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        commits = self.sets[name]
        kind, asked, *inside = words[3:] or ["revision", "main"]
        commit = list(commits)[-1] if asked == "main" else asked
        if commit not in commits:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        files = commits[commit]
        if is_api and kind == "revision":
            return self._json({"id": name, "sha": commit, "siblings": [], "tags": []})
        if is_api and kind == "tree":
            under = "/".join(inside)
            found = [self._described(path, data) for path, data in files.items()]
            return self._json([one for one in found if one["path"].startswith(under)])
        file = "/".join(inside)
        if kind != "resolve" or file not in files:
            return 404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
        tag = hashlib.sha1(files[file]).hexdigest()
        return 200, files[file], {"ETag": f'"{tag}"', "X-Repo-Commit": commit}

    def _described(self, path: str, data: bytes) -> dict[str, Any]:
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": path, "size": len(data), "oid": oid}

    def _json(self, value: object) -> tuple[int, bytes, dict[str, str]]:
        return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}

    @contextmanager
    def started(self) -> Iterator[HubServer]:
        server = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                status, body, headers = server.answer(unquote(urlsplit(self.path).path))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

        with serving(Handler) as self.url:
            yield self
