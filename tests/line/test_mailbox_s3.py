"""A whole job of two owners through a bucket: what it asks of a server of the S3 protocol, and
that it survives one that is busy. Nightly, and only where moto and s3fs are."""

from __future__ import annotations

from pathlib import Path

from tests.combinations import losses
from tests.nightly import NIGHTLY
from tests.owners import TwoOwners
from tests.s3_server import BUCKET, S3Server, needs_s3, s3_server

pytestmark = [*NIGHTLY, needs_s3]

LOCAL = ["strategy=local_updates", "strategy.averaging.every=2", "compression=int4"]
MAX_REQUESTS_A_MERGE = 20


def finish(folder: Path, server: S3Server, num_steps: int) -> list[float | None]:
    """Run a job to its end, and return its losses."""
    folder.mkdir()
    url = f"s3://{BUCKET}/{folder.name}"
    owners = TwoOwners(folder, [*LOCAL, f"training.max_steps={num_steps}"], mailbox=url)
    owners.finish(200.0)
    return losses(owners.run_dir("cloud_a"))


def test_a_merge_of_two_clouds_costs_few_requests(tmp_path: Path) -> None:
    """The difference of two runs, so that what joins and ends them does not count."""
    with s3_server() as server:
        finish(tmp_path / "short", server, num_steps=6)
        short = server.num.copy()
        server.num.clear()
        finish(tmp_path / "long", server, num_steps=26)
        more = server.num.copy()
    more.subtract(short)
    print("requests of 10 merges:", dict(more))
    assert more["PUT"] >= 20, "each cloud sends its part of each merge"
    assert more.total() <= 10 * MAX_REQUESTS_A_MERGE


def test_a_bucket_that_is_busy_delays_a_run_and_changes_nothing(tmp_path: Path) -> None:
    with s3_server() as server:
        quiet = finish(tmp_path / "quiet", server, num_steps=6)
        server.refuse = lambda number: {0: 503, 1: 429}.get(number % 5)
        busy = finish(tmp_path / "busy", server, num_steps=6)
        assert server.num_refused > 50
    assert busy == quiet
