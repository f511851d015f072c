"""A server of the S3 protocol in this process: moto's, behind a middleware that counts requests
and answers some of them as a busy bucket does. Where moto or s3fs is missing, its tests are
skipped."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

needs_s3 = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("moto", "werkzeug", "s3fs", "boto3")),
    reason="needs moto[server] and s3fs",
)
BUCKET = "box"
_BUSY = {
    503: ("503 Service Unavailable", "SlowDown"),
    429: ("429 Too Many Requests", "TooManyRequests"),
}


class S3Server:
    """The server, as its middleware sees it.

    num: requests by kind: PUT, GET, DELETE, HEAD, LIST.
    refuse: returns the status with which a request is refused, by its number; None: it is served.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self.num = Counter[str]()
        self.num_refused = 0
        self.refuse: Callable[[int], int | None] = lambda number: None
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        kind = environ["REQUEST_METHOD"]
        if kind == "GET" and "list-type" in environ.get("QUERY_STRING", ""):
            kind = "LIST"
        with self._lock:
            self.num[kind] += 1
            status = self.refuse(self.num.total())
            self.num_refused += status is not None
        if status is None:
            found: Iterable[bytes] = self._app(environ, start)
            return found
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        line, code = _BUSY[status]
        body = f"<Error><Code>{code}</Code><Message>slow down</Message></Error>".encode()
        start(line, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server with an empty bucket, which this process and its children reach as s3://box."""
    import boto3  # type: ignore[import-not-found, unused-ignore]
    from moto.moto_server.werkzeug_app import (  # type: ignore[import-not-found, unused-ignore]
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import make_server  # type: ignore[import-not-found, unused-ignore]

    server = S3Server(DomainDispatcherApplication(create_backend_app))
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    serving = make_server("127.0.0.1", 0, server, threaded=True)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    given = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{serving.server_port}",
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        client = boto3.client("s3")
        for held in client.list_buckets()["Buckets"]:  # moto keeps them for the whole process
            for one in client.list_objects_v2(Bucket=held["Name"]).get("Contents", []):
                client.delete_object(Bucket=held["Name"], Key=one["Key"])
            client.delete_bucket(Bucket=held["Name"])
        client.create_bucket(Bucket=BUCKET)
        server.num.clear()
        yield server
    finally:
        serving.shutdown()
        thread.join(10)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
