"""What labels are called, counted and shown as."""

from __future__ import annotations

import pytest
import torch

from xcloud.base.errors import DataError
from xcloud.tasks.labels import Benchmark, LabelSet, plain

UNKNOWN = Benchmark(classes=None, metrics=None, num_texts=(1,))
LETTERS = tuple("abcdefgh")


def named(names: tuple[str, ...]) -> LabelSet:
    return LabelSet(names, {name: number for number, name in enumerate(names)})


def test_the_labels_of_a_set_are_described_by_their_counts_or_their_range() -> None:
    values = LabelSet(None)
    assert values.describe(torch.tensor([0.5, 4.25, 1.0])) == "values 0.5 to 4.25"
    assert named(("no", "yes")).describe(torch.tensor([1, 0, 1])) == "no 1, yes 2"
    one = torch.tensor([0])
    assert named(LETTERS[:6]).describe(one) == "a 1, none of b, c, d, e, f"
    assert named(LETTERS).describe(one) == "a 1, none of b, c, d, e, f and 2 more classes"
    by_number = LabelSet(("no", "yes"), {"0": 0, "1": 1})
    assert by_number.describe(torch.tensor([1, 0])) == "no 1, yes 1, by number"
    many = tuple(map(str, range(31)))
    assert named(many[:30]).describe(torch.arange(30)).endswith("29 1")
    assert named(many).describe(torch.arange(31)).endswith("29 1 and 1 more classes")


def test_a_prediction_is_shown_as_its_class_or_its_value() -> None:
    values = LabelSet(None)
    assert values.show(values.read([2_512_345])) == "2.51"
    assert (values.head.kind, values.head.num_outputs) == ("value", 1)
    classes = named(("no", "yes"))
    assert [classes.show(classes.read([n])) for n in (0, 1)] == ["no", "yes"]
    assert [classes.show(n) for n in (-1, 2)] == ["-1 (no class)", "2 (no class)"]
    assert (classes.head.kind, classes.head.num_outputs) == ("classes", 2)


def test_unknown_classes_are_those_of_the_training_set_of_2_to_1000() -> None:
    def names_of(*cells: str) -> tuple[str, ...] | None:
        return LabelSet.of(UNKNOWN, {"train": cells}, cells, where="here").names

    assert names_of("yes", "no", "yes") == ("no", "yes")
    assert names_of("3", "0") == ("0", "1", "2", "3")
    assert names_of("03", "00") == ("00", "03"), "codes, and no numbers"
    assert names_of("999", "0") == tuple(map(str, range(1000)))
    assert names_of("1000", "0") == ("0", "1000")
    thousand = [f"n{number:04}x" for number in range(1001)]
    assert names_of(*thousand[1:]) == tuple(thousand[1:])
    with pytest.raises(DataError, match=r"1,001 different labels .*not 2 to 1000"):
        names_of(*thousand)


@pytest.mark.parametrize(
    ("label", "seen"),
    [
        ("Not  Good ", "not good"), ("1.0", "1"), ("007", "7"), ("1.5", "1.5"), ("-1", "-1"),
        ("0" * 8 + "1", "1"),
        ("0" * 9 + "1", "0" * 9 + "1"), ("ye\u200bs", "yes"), ("\uff21", "a"),
    ],
)  # fmt: skip
def test_a_label_is_read_as_it_is_seen(label: str, seen: str) -> None:
    assert plain(label) == seen
