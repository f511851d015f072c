"""Where a setting leads: addresses, ports of a machine's ranks, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xcloud.job.compared import MAX_VALUE, as_text, digest_of
from xcloud.security import places
from xcloud.security.places import covers, is_place, leads_of, lies_below, link_out, with_ports


@pytest.mark.parametrize(
    ("allowed", "value", "is_covered"),
    [
        ("h:5", "h:5", True), ("h:5", "h:6", False), ("h:5-9", "h:5", True),
        ("h:5-9", "h:9", True), ("h:5-9", "h:10", False), ("h:5-9", "h:4", False),
        ("h:5-9", "h:6-8", True), ("h:5-9", "h:6-10", False), ("h:6-8", "h:5-9", False),
        ("h:5-9", "i:6", False), ("h", "h", True), ("h", "i", False), ("h:a", "h:b", False),
        ("h:1-70000", "h:65535", True), ("h:1-70000", "h:65536", False),
        ("h:1-", "h:1", True), ("h:1-100000", "h:5", True), ("h:9-5", "h:9-5", True),
        ("h:9-5", "h:7", False), ("h:000001-000009", "h:5", False),
    ],
)  # fmt: skip
def test_an_address_is_covered_by_itself_and_by_a_range_that_holds_all_its_ports(
    allowed: str, value: str, is_covered: bool
) -> None:
    assert covers(allowed, value) is is_covered


@pytest.mark.parametrize(
    ("address", "cloud", "ports"),
    [
        ("h:5000", {}, "h:5000"),
        ("h:5000", {"num_ranks": 1}, "h:5000"),
        ("h:5000", {"num_ranks": 3}, "h:5000-5002"),
        ("h:5000", {"num_ranks": 4, "address": ["h:5000", "i:5000"]}, "h:5000-5001"),
        ("h:5000", {"num_ranks": 2, "address": ["h:5000", "i:5000"]}, "h:5000"),
        ("h:5000", {"num_ranks": 3, "address": "h:5000"}, "h:5000-5002"),
        ("h:port", {"num_ranks": 3}, "h:port"),
        ("h:5000", {"num_ranks": "many"}, "h:5000"),
    ],
)
def test_a_cloud_s_address_stands_for_the_ports_of_all_ranks_of_its_machine(
    address: str, cloud: dict[str, Any], ports: str
) -> None:
    assert with_ports(address, cloud) == ports


def test_a_name_on_the_hub_is_no_folder_unless_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "project_root", lambda: tmp_path / "project")
    for name in ("owner/name", "name", "minilm", "owner/name@refs/pr/7", "owner/name@main"):
        assert not is_place(name), name
    for name in ("/a", "./a", "~/a", "..", r"a\b", "a/b/c", "a/b/c@main"):
        assert is_place(name), name
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "project" / "mine").mkdir(parents=True)
    assert is_place("owner/name") and is_place("mine") and not is_place("\0")
    (tmp_path / "minilm").mkdir()
    assert not is_place("minilm")  # the name of an installed checkpoint


def test_a_path_lies_in_a_folder_only_if_it_does_however_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, project = tmp_path / "here", tmp_path / "project"
    for folder in (here, project, project / "data", tmp_path / "other"):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(places, "project_root", lambda: project)
    (project / "data" / "out").symlink_to(tmp_path / "other")
    (project / "data" / "in").symlink_to(project / "data")
    assert lies_below("data", ["data"]) and lies_below("data/new", ["data"])
    assert lies_below(str(project / "data" / "in" / "x"), ["data"])
    assert lies_below("data", ["other", "data"])
    for outside in ("data/out", "data/../x", "databank", str(tmp_path / "other"), "..", "\0"):
        assert not lies_below(outside, ["data"]), outside
    assert not lies_below("data", [])
    (here / "data").mkdir()  # now it may mean either
    assert not lies_below("data", ["data"])
    assert lies_below("data", ["data", str(here)])
    assert link_out(str(project / "data"), ["data"]) == str(project / "data" / "out")
    (project / "data" / "out").unlink()
    assert link_out(str(project / "data"), ["data"]) is None
    (project / "data" / "deep").mkdir()
    (project / "data" / "deep" / "file").symlink_to("/etc/hostname")
    assert link_out(str(project / "data"), ["data"]) == str(project / "data" / "deep" / "file")
    monkeypatch.setattr(places, "MAX_ENTRIES", 1)
    assert link_out(str(project / "data"), ["data"]) == str(project / "data")


def test_what_nobody_has_marked_leads_where_it_looks_like() -> None:
    settings = {
        "_target_": "nowhere.Thing",
        "a": "http://b",
        "c": "d/e",
        "f": "word",
        "g": ["./h"],
    }
    found = [
        (lead.where, lead.to, lead.value) for lead in leads_of(settings, lambda target: False)
    ]
    assert found == [("a", "address", "http://b"), ("c", "read", "d/e"), ("g", "read", "./h")]


def test_values_are_compared_as_texts_of_bounded_length() -> None:
    assert (as_text(2.0), as_text(2), as_text(2.5), as_text(True)) == ("2", "2", "2.5", "true")
    assert as_text("é") == '"\\u00e9"' and as_text(Path("a")) == '"a"'
    fits = "x" * (MAX_VALUE - 2)
    assert as_text(fits) == f'"{fits}"'
    text = f'"{fits}x"'
    assert as_text(f"{fits}x") == f"{text[:120]}... (digest {digest_of(text.encode())})"
    assert digest_of(b"") == "e3b0c44298fc1c14"
