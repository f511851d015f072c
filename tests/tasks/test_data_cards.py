"""What a data set says of itself is read before `datasets`, which would contact who it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from xcloud.base.errors import DataError
from xcloud.tasks import sources
from xcloud.tasks.data_cards import CARDS, OPENED, check_card, check_features
from xcloud.tasks.language_modelling import CausalTokenizer

OUT = [
    "http://attacker/x.jsonl", "http://attacker/*.jsonl", "hf://datasets/company-b/private/x",
    "zip://x.jsonl::http://attacker/z.zip", "file:///etc/passwd", "/usr/**/passwd*", "~/x.jsonl",
    "../other/x.jsonl", "data/../../x", "local:/etc/passwd", "C:\\x", "s3:x", "a::b",
    "{a,b}://x", "data\\x",
]  # fmt: skip


def card(folder: Path, file: str, **config: object) -> Path:
    text = yaml.safe_dump({"configs": [{"config_name": "default", **config}]})
    path = folder / file
    path.write_text(f"---\n{text}---\n# A data set\n" if file.endswith(".md") else text)
    return path


@pytest.mark.parametrize("place", OUT)
def test_data_elsewhere_is_refused_however_and_wherever_it_is_named(
    place: str, tmp_path: Path
) -> None:
    for file in CARDS:
        for config in (
            {"data_files": place},
            {"data_files": [place]},
            {"data_files": {"train": ["train.jsonl", place]}},
            {"data_files": [{"split": "train", "path": place}]},
            {"data_files": [{"split": "train", "path": ["train.jsonl", place]}]},
            {"data_dir": place},
        ):
            with pytest.raises(DataError, match="no file of its own"):
                check_card(card(tmp_path, file, **config), name="x")


def test_a_card_that_takes_long_to_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("---\na: &a [x]\nb: [*a, *a]\n---\n")
    with pytest.raises(DataError, match="anchors"):
        check_card(file, name="x")
    file.write_text("---\na: [" + "[" * 5000 + "\n---\n")
    with pytest.raises(DataError, match="no card"):
        check_card(file, name="x")


def test_own_files_are_taken_and_nothing_is_needed(tmp_path: Path) -> None:
    check_card(
        card(tmp_path, "README.md", data_files=[{"split": "train", "path": "a/*.jsonl"}]), "x"
    )
    (tmp_path / "README.md").write_text("# No card\n---\nb: 1\n")
    check_card(tmp_path / "README.md", name="x")


def test_datasets_is_not_asked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    for name in ("load_dataset", "load_dataset_builder"):
        monkeypatch.setattr(datasets, name, lambda *_, **__: pytest.fail("it was asked"))
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n')
    card(tmp_path, ".huggingface.yaml", data_files="http://attacker/x.jsonl")
    with pytest.raises(DataError, match="no file of its own"):
        sources.load_hub(str(tmp_path), None)


def test_columns_whose_values_are_opened_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = {
        name
        for name in dir(datasets.features)
        if hasattr(getattr(datasets.features, name), "decode_example")
    }
    assert kinds - {"Features", "Json"} == OPENED  # a further kind of `datasets` is looked at
    (tmp_path / "train.jsonl").write_text('{"text": "x", "picture": "http://attacker/x.png"}\n')
    features = [{"name": "text", "dtype": "string"}, {"name": "picture", "dtype": "image"}]
    text = yaml.safe_dump({"dataset_info": {"features": features}})
    (tmp_path / "README.md").write_text(f"---\n{text}---\n")
    with pytest.raises(DataError, match="column 'picture' is Image"):
        sources.load_hub(str(tmp_path), None)


def test_a_column_is_refused_however_deep_in_a_row_its_picture_is() -> None:
    datasets = pytest.importorskip("datasets")
    image, text = datasets.Image(), datasets.Value("string")
    for feature in (
        image, [image], {"a": text, "b": image}, [{"a": [image]}], datasets.LargeList(image),
        datasets.Sequence(image), datasets.Sequence({"a": text, "b": [image]}),
    ):  # fmt: skip
        with pytest.raises(DataError, match="its column 'x' is Image"):
            check_features({"text": text, "x": feature}, name="it")
    check_features({"text": text, "x": datasets.Sequence({"a": [text]})}, name="it")
    check_features(None, name="it")


def test_a_tokenizer_that_is_served_names_no_code(tmp_path: Path) -> None:
    """Who loads the served folder with trust_remote_code would run it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[EOS]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[EOS]", unk_token="[UNK]")
    given = tmp_path / "given"
    made.save_pretrained(given)
    code = {"auto_map": {"AutoTokenizer": [None, "evil--x.Y"]}}
    for file, more in (("tokenizer_config.json", {}), ("generation_config.json", {"top_k": 5})):
        about = json.loads((given / file).read_text()) if (given / file).exists() else {}
        (given / file).write_text(json.dumps({**about, **more, **code}))
    CausalTokenizer.load(given).save(tmp_path / "served")
    served = [path.read_text() for path in (tmp_path / "served").glob("*.json")]
    assert served and not any("evil" in text for text in served)
    assert any('"top_k": 5' in text for text in served)
