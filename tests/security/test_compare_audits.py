"""Two clouds' records of what crossed between them: counted at both ends, signed, compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipelines import BORDER, in_threads, samples, wired
from xcloud.base.errors import DataError
from xcloud.comm.compression import Compression
from xcloud.job.audit_keys import audit_signer
from xcloud.layout import Cloud, ClusterLayout
from xcloud.line.keys import make_key
from xcloud.net.frame import Kind, MessageKey
from xcloud.security.audit import SIGNATURE, audit_file, set_aside, write_rank_audit
from xcloud.show.wire_audit import (
    MAX_BYTES,
    ComparedCount,
    Comparison,
    Counted,
    as_json,
    in_words,
    main,
)

TWO = ClusterLayout({"cloud_a": Cloud(), "cloud_b": Cloud()}, "free")
Say = Callable[..., tuple[int, dict[str, Any]]]
Policy = Callable[[str], None]


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """Gives this process the policy and the key of one of two clouds that know each other."""
    folders = {cloud: tmp_path / f"of {cloud}" for cloud in TWO.clouds}
    for cloud, folder in folders.items():
        folder.mkdir()
        make_key(cloud, folder)
    for cloud, other in (("cloud_a", "cloud_b"), ("cloud_b", "cloud_a")):
        pem = (folders[other] / f"{other}.pem").read_text()
        (folders[cloud] / f"{other}.pem").write_text(pem)
        text = f"me: {cloud}\npeers: {{{other}: [{other}.pem]}}\n"
        (folders[cloud] / "policy.yaml").write_text(text)

    def use(cloud: str) -> None:
        monkeypatch.setenv("XCLOUD_POLICY", str(folders[cloud] / "policy.yaml"))

    return use


@pytest.fixture(autouse=True)
def no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none.yaml").write_text("")
    (tmp_path / "none.yaml").write_text("max_ranks: 9\n")
    monkeypatch.setenv("XCLOUD_POLICY", str(tmp_path / "none.yaml"))


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*words: str) -> tuple[int, dict[str, Any]]:
        folders = [str(tmp_path / name) for name in ("a", "b")]
        capsys.readouterr()
        code = main([*folders, "--json", *words])
        found = json.loads(capsys.readouterr().out)
        assert main(folders) == code
        said = capsys.readouterr().out.splitlines()[-1]
        assert said == ("the records agree" if code == 0 else "the records do not agree")
        return code, found

    return run


def crossing(
    folder: Path,
    policy: Policy | None = None,
    attempt: int = 7,
    lost: int = 0,
    is_finished: bool = True,
) -> None:
    """Messages cross between two ranks, each of which then writes its record.

    lost: messages that rank 0 counts and rank 1 does not.
    """
    ranks = wired(TWO, {0: BORDER}, Compression())
    wirings = [one.wiring for one in ranks]
    batch = samples(torch.arange(4))
    counts = (batch["ids"] % 4 + 1).to(torch.int16)
    message = {"counts": counts, "hidden": torch.ones(int(counts.sum()), 8)}
    sender = wirings[0].boundaries.ports[0].forward_out[1]
    receiver = wirings[1].boundaries.ports[0].forward_in[0]
    for step in (1, 2, 3):
        sender.send(MessageKey(Kind.ACTIVATION, step), message, batch)
        receiver.recv(MessageKey(Kind.ACTIVATION, step), batch)
    in_threads([wiring.close for wiring in wirings])
    for rank, (cloud, wiring) in enumerate(zip(TWO.clouds, wirings, strict=True)):
        records = wiring.ends.records
        if rank == 0 and lost:
            first = next(record for record in records if record.num_messages[Kind.ACTIVATION])
            first.num_messages[Kind.ACTIVATION] += lost
            first.num_bytes[Kind.ACTIVATION] += 500 * lost
        if policy is not None:
            policy(cloud)
        run_dir = folder / cloud[-1]
        run_dir.mkdir(exist_ok=True)
        write_rank_audit(
            run_dir, rank, TWO, records, {}, attempt=attempt, is_finished=is_finished,
            sign=audit_signer(cloud),
        )  # fmt: skip


def changed(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def test_what_was_sent_and_received_agrees_and_is_signed(
    tmp_path: Path, policy: Policy, compared: Say
) -> None:
    crossing(tmp_path, policy)
    code, found = compared()
    assert code == 0 and found["agrees"]
    activations = found["totals"]["cloud_a -> cloud_b"]["activation"]
    assert activations["sent"] == activations["received"] and activations["sent"][0] == 3
    assert "close" not in found["totals"]["cloud_a -> cloud_b"]
    assert sorted(found["signatures"].values()) == ["signed by cloud_a", "signed by cloud_b"]


def test_without_keys_it_says_that_nothing_is_signed(tmp_path: Path, compared: Say) -> None:
    crossing(tmp_path)
    code, found = compared()
    assert code == 0 and set(found["signatures"].values()) == {"not signed"}


def test_who_knows_no_certificate_cannot_check_and_says_so(
    tmp_path: Path, policy: Policy, compared: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossing(tmp_path, policy)
    monkeypatch.setenv("XCLOUD_POLICY", str(tmp_path / "none.yaml"))
    code, found = compared()
    assert code == 0
    assert all("no certificate of cloud_" in said for said in found["signatures"].values())


def test_a_changed_record_is_refused(tmp_path: Path, policy: Policy, compared: Say) -> None:
    crossing(tmp_path, policy)
    file = audit_file(tmp_path / "b", 1)

    def add(record: dict[str, Any]) -> None:
        record["attempts"][0]["received"][0]["messages"] += 1

    changed(file, add)
    code, found = compared()
    assert code == 1 and found["refused_signatures"] == [str(file)]
    assert [pair["kind"] for pair in found["differs"]] == ["activation"]


@pytest.mark.parametrize("way", ["other key", "stripped", "of another file", "no hex"])
def test_a_signature_that_is_not_that_cloud_s_is_refused(
    way: str, tmp_path: Path, policy: Policy, compared: Say
) -> None:
    crossing(tmp_path, policy)
    own = audit_file(tmp_path / "b", 1).with_suffix(SIGNATURE)
    other = audit_file(tmp_path / "a", 0).with_suffix(SIGNATURE)
    if way == "stripped":
        own.unlink()
    elif way == "other key":
        own.write_text(other.read_text())
    elif way == "no hex":
        changed(own, lambda signature: signature.update(signature="x"))
    else:
        given = json.loads(other.read_text())["signature"]
        changed(own, lambda signature: signature.update(signature=given))
    code, found = compared()
    assert code == 1 and found["refused_signatures"] == [str(audit_file(tmp_path / "b", 1))]
    assert found["differs"] == []


def test_a_lost_message_differs_unless_a_cut_explains_it(tmp_path: Path, compared: Say) -> None:
    crossing(tmp_path, lost=2)
    code, found = compared()
    (pair,) = found["differs"]
    assert code == 1 and pair["sent"][0] == 5 and pair["received"][0] == 3

    crossing(tmp_path, lost=2, is_finished=False)
    code, found = compared()
    assert code == 0 and found["differs"] == [] and len(found["under_way"]) == 1


def test_a_cut_explains_no_more_than_what_was_under_way(tmp_path: Path, compared: Say) -> None:
    crossing(tmp_path, lost=-1, is_finished=False)
    code, found = compared()
    assert code == 1 and [pair["kind"] for pair in found["differs"]] == ["activation"]


def test_attempts_of_a_resumed_run_are_compared_one_by_one(tmp_path: Path, compared: Say) -> None:
    crossing(tmp_path, attempt=1, lost=1, is_finished=False)
    for folder, rank in (("a", 0), ("b", 1)):  # as a rank begins
        set_aside(audit_file(tmp_path / folder, rank))
    crossing(tmp_path, attempt=2)
    crossing(tmp_path, attempt=2)  # written again at its end
    code, found = compared()
    assert code == 0 and len(found["under_way"]) == 1
    assert found["totals"]["cloud_a -> cloud_b"]["activation"]["sent"][0] == 7

    file = audit_file(tmp_path / "b", 1)
    changed(file, lambda record: record.update(attempts=record["attempts"][1:]))
    code, found = compared()
    assert code == 0 and [p["received"] for p in found["not_known"]] == [None]
    changed(file, lambda record: record.update(attempts=[]))
    assert compared()[0] == 1  # attempt 2 has come to its end


def test_a_rank_without_a_record_is_named(tmp_path: Path, compared: Say) -> None:
    crossing(tmp_path)
    for folder, rank in (("a", 0), ("b", 1)):
        changed(audit_file(tmp_path / folder, rank), lambda record: record.update(num_ranks=3))
    code, found = compared()
    assert code == 1 and found["missing_ranks"] == [2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "is no record"),
        ("{}", "is no record"),
        (" " * (MAX_BYTES + 1), "is longer than 16,777,216 bytes"),
        ('{"rank": 1, "cloud": "b", "num_ranks": 1e99, "attempts": []}', "is no record"),
        ('{"rank": 1, "cloud": "b", "num_ranks": 99999999, "attempts": []}', "is no record"),
    ],
)
def test_a_hostile_record_is_refused(content: str, said: str, tmp_path: Path) -> None:
    crossing(tmp_path)
    audit_file(tmp_path / "b", 1).write_text(content)
    with pytest.raises(DataError, match=said):
        main([str(tmp_path / "a"), str(tmp_path / "b")])


def set_count(record: dict[str, Any], **changes: Any) -> None:
    record["attempts"][0]["received"][0].update(changes)


def add_count(record: dict[str, Any], **changes: Any) -> None:
    counts = record["attempts"][0]["sent"]
    first = record["attempts"][0]["received"][0]
    counts += [{**first, **changes}, {**first, **changes}]


IMPOSSIBLE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a rank that is not there": (lambda r: set_count(r, rank=7), "names rank 7, which is not"),
    "a rank to itself": (lambda r: set_count(r, rank=1), "names rank 1, which is not another"),
    "its own rank": (lambda r: r.update(rank=2), "it is of rank 2, and counts 2 ranks"),
    "a kind": (lambda r: set_count(r, kind="sideways"), "no messages of the kind 'sideways'"),
    "a kind twice": (lambda r: add_count(r, kind="stop"), "sent: a kind of messages stands twice"),
    "an attempt twice": (
        lambda r: r.update(attempts=r["attempts"] * 2), "it has an attempt twice",
    ),
    "bytes of nothing": (lambda r: set_count(r, messages=0), "0 messages of the kind"),
    "fewer bytes than heads": (lambda r: set_count(r, bytes=5), "cannot have 5 bytes"),
    "another cloud": (lambda r: set_count(r, cloud="cloud_c"), "rank 0 is of 'cloud_c'; by"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_record_that_no_rank_can_have_written_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    crossing(tmp_path)
    changed(audit_file(tmp_path / "b", 1), change)
    with pytest.raises(DataError, match=said):
        main([str(tmp_path / "a"), str(tmp_path / "b")])


def test_an_attempt_before_the_last_one_may_have_had_more_ranks_in_other_clouds(
    tmp_path: Path, compared: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    crossing(tmp_path)
    count = {"rank": 5, "cloud": "cloud_c", "kind": "activation", "messages": 1, "bytes": 500}
    moved = count | {"rank": 0}
    earlier = {"attempt": 1, "is_finished": False, "sent": [count, moved], "received": []}
    file = audit_file(tmp_path / "b", 1)
    changed(file, lambda record: record["attempts"].insert(0, earlier))
    code, found = compared()
    assert code == 0 and found["not_compared"] == [
        "cloud_b rank 1, attempt 1: 1 messages, 500 bytes sent to cloud_c rank 5"
    ]
    main([str(tmp_path / "a"), str(tmp_path / "b")])
    line = f"not compared: {found['not_compared'][0]}, which has no record of that"
    assert line in capsys.readouterr().out.splitlines()
    changed(file, lambda record: record["attempts"][0].update(attempt=9))
    with pytest.raises(DataError, match="names rank 5, which is not another one of its 2 ranks"):
        main([str(tmp_path / "a"), str(tmp_path / "b")])


COUNTS = {
    "a rank that is gone": ({"rank": 5, "cloud": "cloud_c"}, True),
    "a rank that was in another cloud": ({"rank": 2, "cloud": "cloud_a"}, True),
    "a rank of the same cloud": ({"rank": 2, "cloud": "cloud_b"}, False),
    "a rank that is compared": ({"rank": 0, "cloud": "cloud_a"}, False),
}


@pytest.mark.parametrize(("peer", "is_listed"), COUNTS.values(), ids=COUNTS)
def test_counts_of_an_earlier_attempt_that_have_no_other_side_are_listed(
    peer: dict[str, Any], is_listed: bool, tmp_path: Path, compared: Say
) -> None:
    crossing(tmp_path)
    other = {"rank": 2, "cloud": "cloud_b", "num_ranks": 3, "attempts": []}
    audit_file(tmp_path / "b", 2).write_text(json.dumps(other))
    kinds = [{"kind": "activation", "messages": 1, "bytes": 500} | peer,
             {"kind": "gradient", "messages": 2, "bytes": 700} | peer]  # fmt: skip
    earlier = {"attempt": 1, "is_finished": False, "sent": [], "received": kinds}
    changed(audit_file(tmp_path / "b", 1), lambda record: record["attempts"].insert(0, earlier))
    said = f"3 messages, 1,200 bytes received from {peer['cloud']} rank {peer['rank']}"
    expected = [f"cloud_b rank 1, attempt 1: {said}"] if is_listed else []
    assert compared()[1]["not_compared"] == expected


def test_two_records_of_one_rank_are_refused(tmp_path: Path) -> None:
    crossing(tmp_path)
    changed(audit_file(tmp_path / "b", 1), lambda record: record.update(rank=0, attempts=[]))
    with pytest.raises(DataError, match=r"another record of rank 0|rank 0 is of 'cloud_b'"):
        main([str(tmp_path / "a"), str(tmp_path / "b")])


def test_the_cloud_of_a_rank_is_what_ones_own_record_says(
    tmp_path: Path, policy: Policy, compared: Say
) -> None:
    """A record could take another cloud's name, of which nobody has a certificate, to stay without
    a signature."""
    crossing(tmp_path, policy)
    policy("cloud_a")
    file = audit_file(tmp_path / "b", rank=1)
    file.with_suffix(SIGNATURE).unlink()
    assert compared()[0] == 1  # unsigned

    def rename(record: dict[str, Any]) -> None:
        record["cloud"] = "cloud_B"

    changed(file, rename)
    with pytest.raises(DataError, match="rank 1 is of 'cloud_B'; by the records in"):
        main([str(tmp_path / "a"), str(tmp_path / "b")])


def counts(kind: str, sent: Any, received: Any, is_cut: bool) -> ComparedCount:
    sides = [None if side is None else Counted(*side) for side in (sent, received)]
    return ComparedCount("a rank 0", "b rank 1", kind, *sides, is_cut=is_cut)


PAIRS = {
    "forward": (counts("forward", (3, 3000), (3, 3000), is_cut=True), "equal"),
    "norm": (counts("norm", (3, 3000), (2, 2000), is_cut=False), "differs"),
    "backward": (counts("backward", (3, 3000), (2, 2000), is_cut=True), "under way"),
    "less": (counts("less", (3, 3000), (2, 3000), is_cut=True), "differs"),
    "fewer": (counts("fewer", (2, 3000), (2, 2000), is_cut=True), "differs"),
    "more": (counts("more", (2, 2000), (3, 3000), is_cut=True), "differs"),
    "start": (counts("start", (1, 50), None, is_cut=True), "not known"),
    "stop": (counts("stop", None, (1, 50), is_cut=True), "not known"),
    "word": (counts("word", None, (1, 50), is_cut=False), "differs"),
}


def test_a_comparison_is_told_to_the_letter_for_people_and_for_programs() -> None:
    assert {kind: pair.verdict for kind, (pair, _) in PAIRS.items()} == {
        kind: verdict for kind, (_, verdict) in PAIRS.items()
    }
    kinds = ("forward", "norm", "backward", "start")
    back = ComparedCount("b rank 1", "a rank 0", "forward", Counted(1, 9), Counted(1, 9), False)
    again = [PAIRS["forward"][0], *(PAIRS[kind][0] for kind in kinds), back]
    signatures = {"a/rank0.wire.json": "signed by a", "b/rank1.wire.json": "not signed"}
    found = Comparison(again, missing=[2, 3], signatures=signatures, refused=[])
    assert in_words(found).splitlines() == [
        "a -> b  forward      sent        6 messages          6,000 bytes, received        6 "
        "messages          6,000 bytes  equal",
        "a -> b  norm         sent        3 messages          3,000 bytes, received        2 "
        "messages          2,000 bytes  NOT EQUAL",
        "a -> b  backward     sent        3 messages          3,000 bytes, received        2 "
        "messages          2,000 bytes  NOT EQUAL",
        "a -> b  start        sent        1 messages             50 bytes, received        0 "
        "messages              0 bytes  NOT EQUAL",
        "b -> a  forward      sent        1 messages              9 bytes, received        1 "
        "messages              9 bytes  equal",
        "a rank 0 -> b rank 1 backward: sent 3 messages, 3,000 bytes; received 2 messages, 2,000 "
        "bytes: the attempt was interrupted, which explains it",
        "a rank 0 -> b rank 1 start: sent 1 messages, 50 bytes; no record of what was received: "
        "one of the two was ended before it could write its record",
        "a rank 0 -> b rank 1 norm: sent 3 messages, 3,000 bytes; received 2 messages, 2,000 "
        "bytes: NOTHING EXPLAINS IT",
        "not compared: ranks 2, 3, whose records are not here",
        "a/rank0.wire.json: signed by a",
        "b/rank1.wire.json: not signed",
        "the records do not agree",
    ]
    told = json.loads(as_json(found))
    for verdict in ("differs", "under_way", "not_known"):
        (pair,) = told.pop(verdict)
        assert PAIRS[pair["kind"]][1] == verdict.replace("_", " ")
    assert told == {
        "agrees": False,
        "totals": json.loads(json.dumps(found.totals())),
        "missing_ranks": [2, 3],
        "not_compared": [],
        "signatures": signatures,
        "refused_signatures": [],
    }
    assert told["totals"]["a -> b"]["backward"] == {"sent": [3, 3000], "received": [2, 2000]}
    fine = Comparison([PAIRS[k][0] for k in ("forward", "backward", "start")], [], {}, refused=[])
    assert fine.agrees
    for broken in ({"missing": [2]}, {"refused": ["x"]}, {"pairs": [PAIRS["norm"][0]]}):
        assert not dataclasses.replace(fine, **broken).agrees  # type: ignore[arg-type]
