"""The original WIT3 archive: tagged training text, segments with bare ampersands, either order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpora import given, write_archive
from xcloud.base.errors import ConfigError, DataError
from xcloud.tasks import wit3
from xcloud.tasks.rows import Corpus
from xcloud.tasks.translation import Translation
from xcloud.tasks.wit3 import Wit3

BOTH = frozenset({"source", "target"})


def read(path: Path, visible: frozenset[str] = BOTH, **settings: object) -> Corpus:
    return given(Translation, Wit3, path=str(path), **settings).read(visible)


def test_tagged_lines_are_skipped_and_rows_stay_aligned(tmp_path: Path) -> None:
    corpus = read(write_archive(tmp_path))
    train = corpus.splits["train"]
    assert train.num_rows == 50
    assert train.texts["source"][11] == "es 1.1 Q&A <laughs>"
    assert [t[3:] for t in train.texts["source"]] == [t[3:] for t in train.texts["target"]]


def test_sets_are_joined_and_bare_ampersands_allowed(tmp_path: Path) -> None:
    corpus = read(write_archive(tmp_path))
    assert corpus.splits["dev"].texts["target"] == ["en R&D 1 x", "en R&D 2 x", "en R&D 3 x"]
    assert corpus.splits["test"].num_rows == 9
    assert wit3.clean("&amp;lt;b&amp;gt; &quot;R&D&apos;") == "&lt;b&gt; \"R&D'"
    assert read(tmp_path, test=["tst2011"]).splits["test"].num_rows == 3


@pytest.mark.parametrize(("pair", "release"), [("en-es", "IWSLT14.TED"), ("es-en", "IWSLT15.TED")])
def test_either_direction_and_other_releases(tmp_path: Path, pair: str, release: str) -> None:
    write_archive(tmp_path / pair, pair, release)
    assert read(tmp_path).splits["train"].num_rows == 50  # the folder above is found too


def test_a_one_sided_cloud_needs_its_own_files_only(tmp_path: Path) -> None:
    whole = read(write_archive(tmp_path))
    for path in tmp_path.glob("*.en*"):
        if path.name.endswith((".en", ".en.xml")):
            path.unlink()
    seen = read(tmp_path, frozenset({"source"}))
    assert seen.splits["test"].texts == {"source": whole.splits["test"].texts["source"]}
    nothing = read(tmp_path, frozenset())
    assert [r.num_rows for r in nothing.splits.values()] == [50, 3, 9]
    with pytest.raises(DataError, match=r"its other side, train\.tags\.es-en\.en, is missing"):
        read(tmp_path)


def test_an_empty_dev_list_is_held_out_of_train(tmp_path: Path) -> None:
    corpus = read(write_archive(tmp_path), dev=[], dev_share=5)
    assert (corpus.splits["train"].num_rows, corpus.splits["dev"].num_rows) == (45, 5)
    assert corpus.remarks == ["dev held out of train"]


def test_what_is_missing_is_said_with_the_way_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.tags\.es-en\.es.*2014-01.*WIT3 site of FBK"):
        read(tmp_path)
    write_archive(tmp_path)
    with pytest.raises(DataError, match=r"IWSLT14\.TED\.tst2013\.es-en\.\*\.xml is missing"):
        read(tmp_path, test=["tst2013"])
    with pytest.raises(ConfigError, match=r"task\.data\.path"):
        given(Translation, Wit3, path="")
    with pytest.raises(ConfigError, match=r"task\.data\.test must be a list"):
        read(tmp_path, test="tst2010")


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    write_archive(tmp_path)
    write_archive(tmp_path, release="IWSLT14.TEDX")
    with pytest.raises(DataError, match=r"several files for the set dev2010.*TED\.dev2010"):
        read(tmp_path)
    assert read(tmp_path, dev=["TEDX.dev2010"], test=["TED.tst2010"]).splits["dev"].num_rows == 3
    train = tmp_path / "train.tags.es-en.es"
    train.write_text(train.read_text() + "uno más\n")
    with pytest.raises(DataError, match=r"differ in lines: .*\.en 50 and .*\.es 51"):
        read(tmp_path, dev=["TEDX.dev2010"], test=["TED.tst2010"])
