"""What scores are called and how they are quoted."""

import pytest

from xcloud.base.units import score_name, score_text, shown_scores


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("bleu", 0.4213, "0.42"), ("bleu", 41.92, "41.92"), ("accuracy", 92.231, "92.23"),
     ("label_leak_auc", 0.57312, "0.5731"), ("something", 2.5, "2.50"),
     ("loss", 3.21987, "3.2199"), ("replaced_loss", 0.352846, "0.3528")],
)  # fmt: skip
def test_decimals_follow_the_score_not_its_value(name: str, value: float, text: str) -> None:
    assert score_text(name, value) == text


def test_names_and_what_a_table_shows() -> None:
    assert (score_name("f1"), score_name("xx")) == ("F1", "xx")
    assert shown_scores(["bleu", "chrf"]) == ["bleu"]
    assert shown_scores(["exact_match", "f1", "exact_match"]) == ["exact_match", "f1"]
    assert shown_scores(["accuracy", "accuracy_de", "label_leak_auc"])[1:] == ["label_leak_auc"]
    assert shown_scores([]) == []
