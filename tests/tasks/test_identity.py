"""Whether a thing is what it was: what a run reads, changed between two attempts at it, or in one
of its clouds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import HashStore

from tests.causal_models import saved, where
from tests.combinations import FIRST, STEPS, experiment, run
from tests.corpora import given
from tests.nightly import first_daily
from tests.pipelines import in_threads
from tests.understanding_models import backbone
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import BASES, Stage
from xcloud.job.compared import compared_settings
from xcloud.job.inputs import inputs_of
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.models.split_point import Split
from xcloud.net.transport import Rendezvous
from xcloud.pretrained import contents_of, kept_digest
from xcloud.rank.agreement import agree_where_shared
from xcloud.rank.task_data import shown_digest
from xcloud.tasks.classification import Classification
from xcloud.tasks.language_modelling import LanguageModelling
from xcloud.tasks.question_answering import QuestionAnswering
from xcloud.tasks.rows import digest_of
from xcloud.tasks.sources import Folder
from xcloud.tasks.text_task import TextTask
from xcloud.tasks.tokenizer import TrainedTokenizer
from xcloud.tasks.translation import Translation
from xcloud.train import building

SPLITS = {"train": 30, "dev": 4, "test": 4}
OTHER = {"cat": "dog", "yes": "no"}  # as long, and as many rows


def translation(folder: Path, word: str, answer: str, split: str) -> None:
    lines = [f"{word} {n} aqui\t{n} {answer} here" for n in range(SPLITS[split])]
    (folder / f"{split}.tsv").write_text("\n".join(["es\ten", *lines]) + "\n")


def classification(folder: Path, word: str, answer: str, split: str) -> None:
    lines = [f"{word} {n}\t{answer if n == 1 else 'yes no'.split()[n % 2]}" for n in
             range(SPLITS[split])]  # fmt: skip
    (folder / f"{split}.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")


def answering(folder: Path, word: str, answer: str, split: str) -> None:
    rows = []
    for n in range(SPLITS[split]):
        context = f"{word} {n} says yes or says no today"
        answers = [{"text": answer, "start": context.index(answer)}]
        rows.append({"context": context, "qas": [{"question": "what", "answers": answers}]})
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def texts(folder: Path, word: str, answer: str, split: str) -> None:
    (folder / f"{split}.txt").write_text("\n\n".join([f"a {word} sat"] * SPLITS[split]))


TOKENIZER = TrainedTokenizer(vocab_size=290)
TASKS: dict[str, tuple[Callable[[Path, str, str, str], None], Callable[[str, str], TextTask]]] = {
    "translation": (
        translation,
        lambda path, cache: given(
            Translation,
            Folder,
            path=path,
            source_tokenizer=TOKENIZER,
            target_tokenizer=TOKENIZER,
            cache_dir=cache,
        ),
    ),
    "classification": (
        classification,
        lambda path, cache: given(
            Classification, Folder, path=path, tokenizer=TOKENIZER, max_length=16, cache_dir=cache
        ),
    ),
    "question answering": (
        answering,
        lambda path, cache: given(
            QuestionAnswering,
            Folder,
            path=path,
            tokenizer=TOKENIZER,
            max_length=64,
            max_question=8,
            stride=16,
            cache_dir=cache,
        ),
    ),
    "language modelling": (
        texts,
        lambda path, cache: given(
            LanguageModelling,
            Folder,
            path=path,
            tokenizer=TOKENIZER,
            max_length=32,
            cache_dir=cache,
        ),
    ),
}


@pytest.mark.parametrize(
    ("name", "split", "changes", "said"),
    [
        ("translation", "train", "cat", {"source of train", "the source tokenizer"}),
        ("translation", "train", "yes", {"target of train", "the target tokenizer"}),
        ("translation", "dev", "cat", {"source of dev"}),
        ("translation", "test", "yes", {"target of test"}),
        ("classification", "train", "cat", {"first of train"}),
        ("classification", "train", "yes", {"label of train"}),
        ("classification", "test", "yes", {"label of test"}),
        ("question answering", "train", "yes", {"answers of train"}),
        ("question answering", "test", "cat", {"context of test"}),
        ("language modelling", "train", "cat", {"text of train"}),
        ("language modelling", "test", "cat", {"text of test"}),
    ],
)
def test_data_of_equal_size_are_told_apart_here_and_not_shown_to_others(
    name: str, split: str, changes: str, said: set[str], tmp_path: Path
) -> None:
    write, task_of = TASKS[name]
    found = []
    for attempt in ("before", "after"):
        (folder := tmp_path / attempt).mkdir()
        for one in SPLITS:
            other = OTHER if attempt == "after" and one == split else {}
            word = other.get("cat", "cat") if changes == "cat" else "cat"
            answer = other.get("yes", "yes") if changes == "yes" else "yes"
            write(folder, word, answer, one)
        task = task_of(str(folder), str(tmp_path / "cache"))
        found.append(task.load(frozenset(task.fields), 1))
    before, after = found
    digests, others = before.own_digests(), after.own_digests()
    assert digests.keys() == others.keys()
    differing = {key for key in digests if digests[key] != others[key]}
    assert {key for key in differing if not key.startswith("tokens of")} == said
    assert before.fingerprint() == after.fingerprint()


def test_the_order_of_rows_and_where_one_ends_are_part_of_a_digest() -> None:
    columns = [["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], ["ab", "c", ""], [["ab", "c"]]]
    assert len({digest_of(cells) for cells in columns}) == len(columns)


@pytest.mark.parametrize("name", TASKS)
def test_a_rank_that_reads_nothing_has_nothing_to_compare(name: str, tmp_path: Path) -> None:
    write, task_of = TASKS[name]
    for split in SPLITS:
        write(tmp_path, "cat", "yes", split)
    data = task_of(str(tmp_path), str(tmp_path / "cache")).load(frozenset(), 1)
    assert data.own_digests() == {} == data.shared_digests()


# --- what every cloud has: compared by contents ---


class Lines(Rendezvous):
    """Over several processes a rank hears rank 0 and nobody else."""

    def read(self, name: str, rank: int) -> str:
        assert 0 in (rank, self.rank)
        return super().read(name, rank)


def refusals(*facts: Mapping[str, str]) -> list[str]:
    """Of each rank that compares what it has: why it is refused, or ""."""
    store = HashStore()

    def one(rank: int) -> str:
        try:
            agree_where_shared(Lines(rank, len(facts), store, within_s=20.0), facts[rank])
        except ConfigError as error:
            return str(error)
        return ""

    return in_threads([partial(one, rank) for rank in range(len(facts))])


@pytest.mark.parametrize(
    ("facts", "refused"),
    [
        (({"base": "a"}, {"base": "a"}), set()),
        (({"base": "a"}, {"base": "b"}), {0, 1}),
        (({"base": "a", "shard 1": "x"}, {"base": "a", "shard 2": "y"}), set()),
        (({}, {"base": "a"}, {"base": "b"}), {0, 2}),
        (({"base": "a"}, {"base": "b"}, {"base": "a"}, {"base": "b"}), {0, 1, 3}),
        (({"base": "a"}, {}, {"base": "a"}), set()),
        (({"base": "a"}, {}, {"base": "b"}), {0, 2}),
    ],
)
def test_what_two_ranks_have_of_one_thing_must_be_equal(
    facts: tuple[Mapping[str, str], ...], refused: set[int]
) -> None:
    said = refusals(*facts)
    assert {rank for rank, text in enumerate(said) if text} == refused
    assert all("base" in text and "two networks" in text for text in said if text)


def bases(stage: Stage) -> dict[str, str]:
    return dict(stage.architecture[BASES])


def changed(file: Path, name: str) -> None:
    """One value of one tensor, in a file of as many bytes."""
    tensors = load_file(file)
    tensors[name].flatten()[0] += 1
    save_file(tensors, file, {"format": "pt"})


def test_a_stage_names_the_whole_base_and_not_only_its_part(tmp_path: Path) -> None:
    """The upper half is another in one cloud, which holds the lower one only."""
    model = CausalLM(str(tmp_path / "a"), lora=Lora(r=2))
    saved("llama", tmp_path / "a")
    at = where(tmp_path / "cache")
    lower, upper = (model.build_stage(n, 2, at) for n in range(2))
    assert bases(lower) == bases(upper) and len(bases(lower)) == 3

    saved("llama", tmp_path / "b")
    changed(tmp_path / "b" / "model.safetensors", "model.layers.3.mlp.up_proj.weight")
    other = replace(model, checkpoint=str(tmp_path / "b")).build_stage(0, 2, at)
    assert all(
        torch.equal(a, b) for a, b in zip(lower.parameters(), other.parameters(), strict=True)
    )
    (said, _) = refusals(bases(lower), bases(other))
    assert "base model: model.safetensors" in said


@pytest.mark.parametrize("what", ["the base", "the text of the cut"])
def test_public_text_that_differs_in_one_cloud_is_refused(what: str, tmp_path: Path) -> None:
    """Its own copy of a file, with as many lines: no setting differs."""
    from tests.understanding_models import RandomText
    from xcloud.models.low_rank_split import LowRankSplit

    def stage(seed: int, cloud: str) -> Stage:
        own, text = backbone(), RandomText()
        if what == "the base":
            own = replace(own, text=RandomText(seed))
        else:
            text = RandomText(seed)
        split = Split(1, rank=2, method="pca", calibration="public", calibration_texts=8)
        model = LowRankSplit(own, split, public_text=text)
        at = where(tmp_path / cloud)
        return model.build_stage(
            0, 2, replace(at, vocabularies={"text": text.token_ids(tmp_path)})
        )

    first, same, other = stage(0, "a"), stage(0, "b"), stage(1, "c")
    assert bases(first) == bases(same) and len(bases(first)) == 2
    assert not any(refusals(bases(first), bases(same)))
    assert all(refusals(bases(first), bases(other)))


def test_a_public_base_is_made_on_the_processor_that_all_have(tmp_path: Path) -> None:
    """Nothing can be learned on this device; and the number of threads changes no bit."""
    at = where(tmp_path / "a", device=torch.device("meta"))
    before, threads = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        own = backbone()
        first = own.weights("text", replace(at, report=lambda _: threads.append(
            torch.get_num_threads()
        )))  # fmt: skip
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert 1 in threads, "while it was made"
    second = own.weights("text", where(tmp_path / "b"))
    assert first.bases == second.bases != {}


@pytest.mark.parametrize(
    ("key", "target", "is_compared"),
    [
        ("model.public_text", "xcloud.tasks.text_sources.PublicText", True),
        ("model.backbone.words", "xcloud.tasks.text_sources.PublicText", True),
        ("task.data", "xcloud.tasks.sources.Folder", False),
        ("model.text", "xcloud.tasks.text_sources.FolderText", False),
    ],
)
def test_public_files_are_compared_by_contents_and_private_ones_not(
    key: str, target: str, is_compared: bool, tmp_path: Path
) -> None:
    found = []
    for name in ("a", "b", "a again"):
        (file := tmp_path / f"{name}.txt").write_text(f"a line of {name[0]}\n" * 5)
        settings: dict[str, Any] = {"_target_": target, "path": str(file)}
        for part in reversed(key.split(".")):
            settings = {part: settings}
        found.append(compared_settings(settings))
    first, other, again = found
    assert (first != other) == is_compared and first == again
    assert str(tmp_path) not in str(found)


def test_a_digest_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    """Whatever its size and the time that somebody gives it."""
    import os

    file = tmp_path / "weights"
    file.write_bytes(b"one")
    first = kept_digest(file, tmp_path)
    times = file.stat()
    assert kept_digest(file, tmp_path) == first
    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert kept_digest(file, tmp_path) != first


def test_adapters_are_used_beside_the_base_that_they_were_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    saved("llama", folder)
    at = where(tmp_path / "cache")
    model = CausalLM(str(folder), lora=Lora(r=2))
    about = json.loads(json.dumps(dict(model.build_stage(0, 2, at).architecture)))
    used = replace(at, architecture=about)
    model.build_stage(0, 2, used)
    changed(folder / "model.safetensors", "model.layers.3.mlp.up_proj.weight")
    for use in (
        lambda: model.build_stage(0, 2, used),
        lambda: model.join({}, about, at, tmp_path / "out"),
    ):
        with pytest.raises(DataError, match=r"trained adapters beside: base model: model\.saf"):
            use()


def test_a_base_that_the_run_made_is_never_made_again(tmp_path: Path) -> None:
    import shutil

    from tests.causal_models import own

    at = where(tmp_path / "cache")
    model = CausalLM(own=own(), lora=Lora(r=2))
    about = json.loads(json.dumps(dict(model.build_stage(1, 2, at).architecture)))
    used = replace(at, architecture=about)
    model.build_stage(1, 2, used)
    shutil.rmtree(tmp_path / "cache" / "causal")
    for use in (
        lambda: model.build_stage(1, 2, used),
        lambda: model.join({}, about, at, tmp_path / "out"),
    ):
        with pytest.raises(DataError, match=r"is not here: there is no .*causal"):
            use()
    assert not (tmp_path / "cache" / "causal").exists()


def test_peft_finds_the_base_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llama", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    at = where(tmp_path / "cache")
    model = CausalLM("base", lora=Lora(r=2))
    stage = model.build_stage(0, 1, at)
    about = json.loads(json.dumps(dict(stage.architecture)))
    model.join(dict(stage.exported()), about, at, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")


def toy_run(
    run_dir: Path,
    patch: pytest.MonkeyPatch,
    digest_of: Callable[[int], str],
    max_steps: int = STEPS,
) -> None:
    """Of two clouds, in threads. digest_of: what a rank has built its stage from."""
    build = building.build_stage

    def stage(number: int, context: Any, **of: Any) -> Any:
        made = build(number, context, **of)
        made.architecture = {**made.architecture, BASES: {"base model": digest_of(context.rank)}}
        return made

    with patch.context() as patched:
        patched.setattr(building, "build_stage", stage)
        run(experiment(FIRST, max_steps), run_dir, patched)


def test_a_run_of_two_bases_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="different copies of the same thing: base model"):
        toy_run(tmp_path, monkeypatch, str)


def test_a_run_goes_on_with_the_base_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_run(tmp_path, monkeypatch, lambda rank: "a")
    longer = STEPS + 2
    with pytest.raises(DataError, match=rf"checkpoint of step {STEPS} was made with: base model"):
        toy_run(tmp_path, monkeypatch, lambda rank: "b", longer)
    toy_run(tmp_path, monkeypatch, lambda rank: "a", longer)


# --- what a run reads, for whoever takes its result for that of another ---


@pytest.mark.parametrize(
    ("key", "counts"),
    [
        ("task.data.path", True),
        ("task.source_monolingual_file", True),
        ("task.tokenizer.name_or_path", True),
        ("task.tokenizer.path", True),
        ("model.checkpoint", True),
        ("model.own.text.path", True),
        ("model.public_text.path", True),
        ("model.text.source.path", True),
        ("task.cache_dir", False),
        ("tracker.root", False),
    ],
)
def test_inputs_are_told_by_their_contents(key: str, counts: bool, tmp_path: Path) -> None:
    for name in ("a", "b", "moved"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "train.tsv").write_text(f"rows of {name[0].replace('m', 'a')}")
    found = [inputs_of({key: str(tmp_path / name)}, tmp_path / "cache") for name in ("a", "b")]
    moved = inputs_of({key: str(tmp_path / "moved")}, tmp_path / "cache")
    assert all(set(one) == ({key} if counts else set()) for one in found)
    assert (found[0] != found[1]) == counts and moved == found[0]
    assert inputs_of({key: "owner/name"}, tmp_path / "cache") == {}, "not on this machine"


def test_settings_may_be_nested(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("a")
    nested = {"task": {"path": str(tmp_path / "corpus"), "sizes": [1, 2]}}
    found = inputs_of(nested, tmp_path / "cache")
    assert found == inputs_of({"task.path": str(tmp_path / "corpus")}, tmp_path / "cache") != {}


@pytest.mark.parametrize("holders", first_daily([{}, {"text": ["cloud_a"]}], count=2))
def test_a_record_knows_data_by_their_contents_unless_a_rule_keeps_them(
    holders: dict[str, list[str]], tmp_path: Path
) -> None:
    digests = []
    for word in ("cat", "dog"):
        (folder := tmp_path / word).mkdir()
        for split in SPLITS:
            texts(folder, word, "", split)
        task = TASKS["language modelling"][1](str(folder), str(tmp_path / "cache"))
        job: Any = SimpleNamespace(security=SimpleNamespace(holders=holders))
        digests.append(shown_digest(job, task.load(frozenset(task.fields), 1)))
    assert (digests[0] == digests[1]) == bool(holders)


def test_the_contents_of_a_folder_are_those_beside_the_cache(tmp_path: Path) -> None:
    """The digests that are kept would be digested themselves, more of them each time."""
    (tmp_path / "weights").write_text("a")
    cache = tmp_path / "cache"
    first = contents_of(tmp_path, cache_dir=cache)
    num_files = len([*cache.rglob("*")])
    assert contents_of(tmp_path, cache_dir=cache) == first
    assert len([*cache.rglob("*")]) == num_files
    (tmp_path / "more").write_text("b")
    assert contents_of(tmp_path, cache_dir=cache) != first
