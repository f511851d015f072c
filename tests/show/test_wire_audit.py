"""What really crosses: real processes with every byte on tape, beside what the audit says."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nightly import NIGHTLY
from tests.toy_text import FIELDS, ToyTextTask, text_config
from tests.wiretap import Tapped, read_tape
from xcloud.base.errors import DataError, FrameError
from xcloud.features.one_way.intake import Inbox
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.features.one_way.ranks import CARRIES, noting
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.net.frame import Frame, Kind, MessageKey, decode_frame
from xcloud.net.link import CONTROL, LinkName, LinkRecord
from xcloud.net.peer import Peer
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.security.audit import (
    MAX_BYTES,
    as_table,
    audit_file,
    compact,
    join_audit,
    write_rank_audit,
)
from xcloud.show.wire_audit import compare, main

OFFSET = 70_001  # labels whose bytes can be told from others
DTYPES = (torch.int16, torch.int32, torch.int64, torch.uint8, torch.float32)


def tapped_run(folder: Path, cluster: str, security: str, *more: str, **model: object) -> dict:
    overrides = [f"security={security}", "training.evaluate_every=8", *more]
    config = text_config(cluster, overrides, label_offset=OFFSET, **model)
    tape = folder / "tape"
    tape.mkdir(parents=True)
    config["task"] = {"_target_": "tests.wiretap.TappedTask", "label_offset": OFFSET,
                      "tape": str(tape)}  # fmt: skip
    return run(Settings.of(config), folder / "run")


def encodings(values: Tensor) -> list[bytes]:
    """Plain bytes of a few numbers, in every width they fit."""
    fits = [d for d in DTYPES if d.is_floating_point or int(values.max()) <= torch.iinfo(d).max]
    return [values.to(dtype).numpy().tobytes() for dtype in fits]


def secrets_in(tape: list[Tapped]) -> Counter[str]:
    """How often text, labels and sample ids of any sample are found on the tape."""
    data = ToyTextTask(label_offset=OFFSET).load(frozenset(FIELDS), 1)
    everything = data.batch("train", torch.arange(128))
    found: Counter[str] = Counter()
    blob = b"|".join(entry.data for entry in tape)
    for text in everything["text"]:
        for piece in text[text != 0].unfold(0, 3, 1):
            found["text"] += any(code in blob for code in encodings(piece))
    for label in (OFFSET, OFFSET + 1):
        found["label"] += any(code in blob for code in encodings(torch.tensor([label])))
    labels = data.batch("train", torch.arange(128))["label"] - OFFSET
    for step in range(1, 17):
        ids = BatchPlan(128, 16, 1).ids(step)
        found["ids"] += any(code in blob for code in encodings(ids[:4]))
        # Classes alone are 0 and 1: only a whole batch of them can be told from other bytes.
        found["label"] += any(code in blob for code in encodings(labels[ids]))
    return found


LAYOUTS = [
    ("u_shape", "owner_keeps_text_and_labels"),
    pytest.param("two_owners", "two_owners", marks=NIGHTLY),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "security"), LAYOUTS)
def test_text_labels_and_sample_ids_never_cross_and_the_audit_lists_all_that_does(
    cluster: str, security: str, tmp_path: Path
) -> None:
    summary = tapped_run(tmp_path, cluster, security, "training.optimizer.clip_norm=1.0")
    tape = read_tape(tmp_path / "tape")
    frames = [entry for entry in tape if entry.call == "isend"]
    assert len(frames) > 100

    assert secrets_in(tape) == {"text": 0, "label": 0, "ids": 0}
    assert not any(b"SECRET" in entry.data for entry in tape)

    seen: Counter[tuple[int, str, tuple]] = Counter()
    sizes: Counter[tuple[int, str, tuple]] = Counter()
    for entry in frames:
        frame = decode_frame(torch.frombuffer(bytearray(entry.data), dtype=torch.uint8), "tape")
        make_up = tuple((str(p.dtype).removeprefix("torch."), p.dim()) for p in frame.parts)
        key = (entry.rank, frame.key.kind.name.lower(), make_up)
        seen[key] += 1
        sizes[key] += len(entry.data)
    audit = json.loads((tmp_path / "run" / "wire_audit.json").read_text())
    assert audit["missing_ranks"] == []
    both_ends = compare([tmp_path / "run"])
    assert both_ends.agrees and {p.verdict for p in both_ends.pairs} == {"equal"}
    assert {"activation", "gradient", "report"} <= {p.kind for p in both_ends.pairs}
    rank_of = {"owner": 0, "other": 1, "text_owner": 0, "label_owner": 1}
    told: Counter[tuple[int, str, tuple]] = Counter()
    told_bytes: Counter[tuple[int, str, tuple]] = Counter()
    for message in audit["messages"]:
        make_up = tuple((p["dtype"], len(p["shape"])) for p in message["parts"])
        key = (rank_of[message["from"]], message["kind"], make_up)
        told[key] += message["num_messages"]
        told_bytes[key] += message["num_bytes"]
        assert all(p["carries"] != "unnamed" for p in message["parts"])
    assert told == seen
    assert told_bytes == sizes
    # The bill counts what belongs to no step, too: evaluations, what stages hand over before the
    # first step. Only links that close and the last reports come after it.
    for cloud, egress_bytes in summary["egress_bytes"].items():
        own = {kind: 0 for _, kind, _ in sizes}
        for (rank, kind, _), num_bytes in sizes.items():
            own[kind] += num_bytes if rank == rank_of[cloud] else 0
        counted = sum(own.values()) - own["close"]
        assert counted - own["report"] <= egress_bytes <= counted
    kinds = {message["kind"] for message in audit["messages"]}
    kinds.discard("alive")  # of a rank that prepares for long
    assert kinds == {"activation", "gradient", "evaluation", "norm", "report", "barrier",
                      "close", "checkpoint"}  # fmt: skip
    # Reports tell figures; the words of a sample are in a file of its owner alone.
    assert "samples_text" not in audit["reports"].get("quality", [])
    assert "SECRET" in (tmp_path / "run" / "samples.txt").read_text()
    assert "SECRET" not in (tmp_path / "run" / "events.jsonl").read_text()
    scored = (tmp_path / "run" / "scores.jsonl").read_text().splitlines()
    assert scored and not any("prediction" in line for line in scored)
    assert {entry.call for entry in tape} == {"isend", "word"}  # and no collective
    assert summary["wire"] == compact(audit)


@pytest.mark.slow
def test_the_tap_finds_text_that_does_cross(tmp_path: Path) -> None:
    tapped_run(tmp_path, "two_owners", "two_owners", tell=True)
    found = secrets_in(read_tape(tmp_path / "tape"))

    assert found["text"] > 100
    assert found["ids"] == found["label"] == 0
    audit = json.loads((tmp_path / "run" / "wire_audit.json").read_text())
    assert "tokens int32 [R]" in {p["carries"] for m in audit["messages"] for p in m["parts"]}


def test_sizes_of_messages_of_one_make_up_are_a_span() -> None:
    record = LinkRecord(LinkName(0, 0, 1), "b")
    for rows in (5, 3, 9):
        record.note(
            Kind.ACTIVATION, (torch.zeros(rows, 8, dtype=torch.int8),), ("hidden float32 [R, 8]",),
            100,
        )  # fmt: skip
    (entry,) = record.described()

    assert entry["num_messages"] == 3 and entry["num_bytes"] == 300
    assert entry["parts"] == [
        {"carries": "hidden float32 [R, 8]", "dtype": "int8", "shape": ["3-9", 8]}
    ]


def test_records_of_several_ranks_are_joined_and_missing_ones_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def entry(rows: object, count: int) -> dict:
        part = {"carries": "hidden float32 [R, 8]", "dtype": "float32", "shape": [rows, 8]}
        return {"to": "b", "receiver": 2, "boundary": 0, "kind": "activation", "parts": [part],
                "num_messages": count, "num_bytes": 10 * count}  # fmt: skip

    for rank, message in ((0, entry("3-5", 2)), (1, entry(7, 1))):
        audit = {"rank": rank, "cloud": "a", "num_ranks": 3, "crosses_clouds": True,
                 "messages": [message], "received": [], "unframed": [],
                 "reports": {"step": ["loss", f"x{rank}"]}}  # fmt: skip
        (tmp_path / f"rank{rank}.wire.json").write_text(json.dumps(audit))

    main([str(tmp_path), "--json"])
    audit = json.loads((tmp_path / "wire_audit.json").read_text())
    (message,) = audit["messages"]
    assert message["parts"][0]["shape"] == ["3-7", 8]
    assert (message["num_messages"], message["num_bytes"]) == (3, 30)
    assert message["direction"] == "forward" and message["from"] == "a"
    assert audit["missing_ranks"] == [2]
    assert audit["reports"] == {"step": ["loss", "x0", "x1"]}
    short = json.loads(capsys.readouterr().out)
    assert short["a -> b"]["activation 0"] == {
        "messages": 3, "bytes": 30, "carries": ["hidden float32 [R, 8]"]
    }  # fmt: skip
    main([str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        "token ids as such: no", "labels as such: no",
        "hidden states: 30 bytes, from which texts may be guessed",
    ]  # fmt: skip
    assert "not known of ranks 2" in said[4] and not said[5]
    assert said[6].split()[:5] == ["a", "->", "b", "activation", "0"]
    assert "30 bytes  hidden" in said[6]
    message["parts"][0]["carries"] = "label int64 [B]"
    assert as_table(audit).splitlines()[:2] == ["token ids as such: no", "labels as such: yes"]
    batch = {**audit, "messages": [message | {"kind": "batch"}]}
    assert as_table(batch).startswith("token ids as such: yes\n")
    assert "guessed" not in as_table(batch)
    with pytest.raises(DataError, match=r"no rank\*\.wire\.json"):
        join_audit(tmp_path / "elsewhere")


def rank_record(rank: int, **changes: Any) -> dict[str, Any]:
    return {"rank": rank, "cloud": "ab"[rank % 2], "num_ranks": 3, "crosses_clouds": True,
            "messages": [], "received": [], "unframed": [], "reports": {}, **changes}  # fmt: skip


def test_what_a_rank_without_a_record_sent_is_in_the_audit_by_what_its_receivers_noted(
    tmp_path: Path,
) -> None:
    part = {"carries": "target int16 [B]", "dtype": "int16", "shape": [4]}
    sent = {"to": "a", "receiver": 0, "boundary": 0, "kind": "batch", "parts": [part],
            "num_messages": 2, "num_bytes": 20}  # fmt: skip
    by_missing = {**sent, "sender": 2, "from": "c"}
    by_present = {**sent, "sender": 1, "from": "b"}
    records = (
        rank_record(0, received=[by_missing, by_present]),
        rank_record(1, messages=[sent]),
    )
    for record in records:
        (tmp_path / f"rank{record['rank']}.wire.json").write_text(json.dumps(record))
    audit = join_audit(tmp_path)
    assert audit["missing_ranks"] == [2]
    found = {message["from"]: message["num_bytes"] for message in audit["messages"]}
    assert found == {"b": 20, "c": 20}  # and what rank 1 has noted itself is not counted twice
    assert as_table(audit).startswith("token ids as such: yes")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(rank_record(0, num_ranks=10**10)),
        json.dumps(rank_record(0, num_ranks=0)),
        json.dumps(rank_record(0, messages=[{"kind": "batch"}])),
        json.dumps(rank_record(0, messages=7)),
        json.dumps(rank_record(0, reports={"step": "loss"})),
        json.dumps(rank_record(0)).replace('"rank": 0', '"rank": ' + "9" * 5000),
        "[" * 200_000,
        "[]",
        " " * (MAX_BYTES + 1),
    ],
    ids=range(9),
)
def test_a_record_of_another_owner_is_read_within_bounds(text: str, tmp_path: Path) -> None:
    (tmp_path / "rank0.wire.json").write_text(text)
    with pytest.raises(DataError, match=r"rank0\.wire\.json is"):
        join_audit(tmp_path)


SENT = {"to": "a", "receiver": 0, "boundary": 0, "kind": "batch", "parts": [],
        "num_messages": 2, "num_bytes": 200}  # fmt: skip
WITHOUT_TO = {key: value for key, value in SENT.items() if key != "to"}
CONTRADICTORY = {
    "no receiver": ([rank_record(1, messages=[WITHOUT_TO])], "to Field required"),
    "a receiver that is no name": ([rank_record(1, messages=[SENT | {"to": ["a"]}])], "messages"),
    "no sender's cloud": ([rank_record(0, received=[SENT | {"sender": 2}])], "from Field"),
    "a sender that is not there": (
        [rank_record(0, received=[SENT | {"sender": 9, "from": "z"}])],
        "rank 0 .* names rank 9, and the run has 3 ranks",
    ),
    "a receiver that is not there": (
        [rank_record(1, messages=[SENT | {"receiver": 9}])], "names rank 9, and the run has 3",
    ),
    "no number of a receiver": (
        [rank_record(1, messages=[SENT | {"receiver": "0"}])], "receiver",
    ),
    "messages to itself": (
        [rank_record(1, messages=[SENT | {"receiver": 1, "to": "b"}])], "of rank 1 to rank 1",
    ),
    "messages between two others": (
        [rank_record(0, received=[SENT | {"sender": 2, "from": "c", "receiver": 1, "to": "b"}])],
        "counts messages of rank 2 to rank 1",
    ),
    "a receiver in a cloud that is not its own": (
        [rank_record(0), rank_record(1, messages=[SENT | {"to": "z"}])],
        "rank 0 is of 'z'; its own says 'a'",
    ),
    "a rank that is not there": ([rank_record(7)], "names rank 7, and the run has 3 ranks"),
    "a rank twice": ([rank_record(1, messages=[SENT])] * 2, "two records of rank 1"),
    "two runs": ([rank_record(0), rank_record(1, num_ranks=9)], "with 3 and with 9 ranks"),
    "a kind": ([rank_record(1, messages=[SENT | {"kind": "sideways"}])], "no messages of this"),
    "bytes of no messages": (
        [rank_record(1, messages=[SENT | {"num_messages": 0}])], "greater than or equal to 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "said"), CONTRADICTORY.values(), ids=CONTRADICTORY)
def test_records_that_name_what_is_not_there_are_not_joined(
    records: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    for number, record in enumerate(records):
        (tmp_path / f"rank{number}.wire.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=said):
        join_audit(tmp_path)


def test_no_value_of_a_message_is_kept() -> None:
    record = LinkRecord(LinkName(CONTROL, 0, 1), "b")
    record.note(Kind.NORM, (torch.tensor([123456.0]),), ("norm",), 50)

    assert "123456" not in json.dumps(record.described())
    assert MessageKey(Kind.NORM).kind.name.lower() == record.described()[0]["kind"]


def test_a_refused_frame_is_not_in_the_record(tmp_path: Path) -> None:
    """Its parts have no names, with which no record could be written."""
    layout = OneWayLayout({"a": OneWayCloud(1, 1.0), "d": OneWayCloud()})
    layout = OneWayLayout({"d": OneWayCloud(), "a": OneWayCloud(share=1.0)}, "free")
    record, part = LinkRecord(LinkName(CONTROL, 1, 0), "d"), torch.zeros(3)
    inbox = Inbox(layout, 100, {1: Peer()})
    for kind, parts in ((Kind.REPORT, (part, part)), (Kind.BATCH, (part,)), (Kind.READY, (part,))):
        with pytest.raises(FrameError):
            frame = Frame(MessageKey(kind, 1), parts, 0, 0.0, 50)
            noting(record, CARRIES[kind], partial(inbox.put, 0))(frame)
    ready = Frame(MessageKey(Kind.READY), (), 0, 0.0, 9)
    noting(record, CARRIES[Kind.READY], lambda frame: None)(ready)

    write_rank_audit(tmp_path, 0, layout, [], {}, {1: record})
    (message,) = json.loads(audit_file(tmp_path, 0).read_text())["received"]
    assert (message["kind"], message["num_bytes"]) == ("ready", 9)
