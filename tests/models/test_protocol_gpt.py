"""The benchmark Protocol NanoGPT: its network against one written from its description, its size,
its token files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.causal_models import batch_of, build, loss_of, next_words, where
from tests.configs import composed
from tests.runs import in_threads, losses
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import NO_LABEL, Scores, TokenIds
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora, Part, Past, laid_out
from xcloud.models.scratch import ProtocolGpt
from xcloud.models.split_point import Split
from xcloud.tasks.token_files import HEADER_BYTES, MAGIC, TokenFiles

WORDS, WIDTH, HEADS, BLOCKS = 40, 32, 2, 4
TEXTS = ([[3, 5, 8, 13, 21], [34, 2]], [[7, 7, 9, 11]])


def small(**changes: Any) -> CausalLM:
    sizes = {"vocab_size": WORDS, "hidden": WIDTH, "num_layers": BLOCKS, "num_heads": HEADS}
    return CausalLM(scratch=ProtocolGpt(**sizes), **changes)


def drawn(model: CausalLM, num_stages: int, folder: Path) -> list[Any]:
    """Return stages whose zero matrices are drawn too, so that every part matters."""
    stages = build(model, num_stages, where(folder, max_length=16))
    for stage in stages:
        for name, parameter in sorted(stage.named_parameters()):
            draw = torch.Generator().manual_seed(len(name) + 7 * parameter.numel())
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.2)
    return stages


def reference(weights: dict[str, Tensor], text: list[int]) -> Tensor:
    """Return the logits of a document, [S, V]."""

    def norm(rows: Tensor, name: str) -> Tensor:
        return F.rms_norm(rows, rows.shape[-1:]) * weights[f"model.{name}.weight"]

    def product(rows: Tensor, name: str) -> Tensor:
        return rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def turn(rows: Tensor) -> Tensor:
        num_pairs = rows.shape[-1] // 2
        turned = rows.clone()
        for place in range(len(rows)):
            for pair in range(num_pairs // 2):
                angle = place * (1 / 1024) ** (pair / max(1, num_pairs // 2 - 1))
                a, b = rows[place, pair], rows[place, pair + num_pairs]
                cos, sin = np.cos(angle), np.sin(angle)
                turned[place, pair] = a * cos + b * sin
                turned[place, pair + num_pairs] = b * cos - a * sin
        return turned

    rows = norm(weights["model.embed_tokens.weight"][text], "embed_norm")
    size = WIDTH // HEADS
    for number in range(BLOCKS):
        block = f"model.layers.{number}"
        given = norm(rows, f"layers.{number}.attention_norm")
        heads = []
        for head in range(HEADS):
            own = slice(head * size, (head + 1) * size)
            query, key, value = (
                product(given, f"{block}.self_attn.{name}")[:, own]
                for name in ("q_proj", "k_proj", "v_proj")
            )
            query = turn(query / query.square().mean(1, keepdim=True).sqrt())
            key = turn(key / key.square().mean(1, keepdim=True).sqrt())
            scores = query @ key.T * 0.12 * (128 / size) ** 0.5
            sees = torch.ones_like(scores).tril().bool()
            heads.append(scores.masked_fill(~sees, -torch.inf).softmax(1) @ value)
        rows = rows + product(torch.cat(heads, 1), f"{block}.self_attn.o_proj")
        given = norm(rows, f"layers.{number}.feed_forward_norm")
        inner = product(given, f"{block}.mlp.up_proj").relu() ** 2
        rows = rows + product(inner, f"{block}.mlp.down_proj")
    logits = product(norm(rows, "norm"), "lm_head")
    return 15 * logits / (logits**2 + 225).sqrt()


def test_the_network_has_as_many_parameters_as_the_benchmark() -> None:
    config = ProtocolGpt().config(1024)
    whole = laid_out(config, part=Part(range(8), is_first=True, is_last=True))

    assert sum(p.numel() for p in whole.parameters()) == 203_828_352
    assert all(p.is_meta for p in whole.parameters())


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_cut_network_computes_what_is_written(tmp_path: Path, num_stages: int) -> None:
    stages = drawn(small(), num_stages, folder=tmp_path)
    weights = {name: p for stage in stages for name, p in stage.network.named_parameters()}
    batch = batch_of(*TEXTS)
    expected = torch.zeros(())
    for text in (text for texts in TEXTS for text in texts):
        logits = reference(weights, text)[:-1]
        expected = expected + F.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum")
    loss = loss_of(stages, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)

    ours = torch.autograd.grad(loss, list(weights.values()))
    theirs = torch.autograd.grad(expected, list(weights.values()))
    for name, a, b in zip(weights, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda said, n=name: n + said)


def test_words_are_added_to_kept_keys_and_values_as_if_all_came_at_once(tmp_path: Path) -> None:
    stages = drawn(small(), 1, folder=tmp_path)
    whole = next_words(stages, batch_of([[3, 5, 8, 13]]))
    past = Past()
    with torch.no_grad():
        for token in (3, 5, 8, 13):
            step = stages[0].next_words(None, batch_of([[token]]), past)
    torch.testing.assert_close(step, whole, rtol=1e-5, atol=1e-5)


def test_a_new_network_guesses_all_words_alike_and_starts_alike_in_any_layout(
    tmp_path: Path,
) -> None:
    at = where(tmp_path, max_length=16)
    found = []
    for num_stages in (1, 2, 4):
        stages = build(small(), num_stages, at)
        batch = batch_of(*TEXTS)
        num_guessed = int((batch["label"] != NO_LABEL).sum())
        expected = torch.tensor(WORDS, dtype=torch.float).log() * num_guessed
        torch.testing.assert_close(loss_of(stages, batch).detach(), expected)
        found.append({n: p for s in stages for n, p in s.network.named_parameters()})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[name], found[0][name]) for name in other)
    again = build(small(), 1, replace(at, seed=at.seed + 1))[0].network
    assert not torch.equal(again.model.embed_tokens.weight, found[0]["model.embed_tokens.weight"])


def test_weights_are_drawn_by_the_width_before_them_and_last_products_start_with_zeros(
    tmp_path: Path,
) -> None:
    [stage] = build(small(), 1, where(tmp_path, max_length=16))
    model = stage.network.model
    assert float(model.embed_tokens.weight.detach().std()) == pytest.approx(0.0056, rel=0.1)
    layer = model.layers[0]
    for linear in (layer.self_attn.q_proj, layer.mlp.up_proj):
        expected = (0.33 / linear.in_features) ** 0.5
        assert float(linear.weight.detach().std()) == pytest.approx(expected, rel=0.15)
        assert not linear.bias.any()
    for last in (layer.self_attn.o_proj, layer.mlp.down_proj, stage.network.lm_head):
        assert not last.weight.any() and not last.bias.any()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: small(checkpoint="x"), "give one of model.checkpoint"),
        (lambda: small(lora=Lora()), "set model.lora=null"),
        (lambda: small(split=Split(1, method="pca")), "take method=identity"),
        (lambda: ProtocolGpt(hidden=36, num_heads=2), "take a multiple of 8"),
        (lambda: small().joined({}, {"config": {}}), "transformers has no type of model"),
    ],
)
def test_what_a_drawn_network_cannot_have_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_narrow_boundary_of_drawn_directions_trains(tmp_path: Path) -> None:
    model = small(split=Split(1, rank=8, method="identity"))
    stages = build(model, 2, where(tmp_path, max_length=16))
    loss_of(stages, batch_of(*TEXTS)).backward()
    assert stages[0].cut is not None and next(stages[1].cut.parameters()).shape[-1] in (8, WIDTH)


def test_more_tokens_than_the_network_has_are_refused(tmp_path: Path) -> None:
    ids = TokenIds(size=WORDS + 1, pad=0, bos=1, eos=2, mask=3)
    at = replace(where(tmp_path, max_length=16), vocabularies={"text": ids})
    with pytest.raises(ConfigError, match=r"model\.scratch\.vocab_size, which is 40"):
        small().build_stage(0, 1, at)


def written(
    path: Path, tokens: Any, magic: int = MAGIC, version: int = 1, claimed: int = -1
) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if claimed < 0 else claimed
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())


def folder_of_tokens(folder: Path) -> TokenFiles:
    folder.mkdir(exist_ok=True)
    written(folder / "x_train_000001.bin", range(100, 126))  # three windows of 8, one token over
    written(folder / "x_train_000002.bin", range(200, 216))  # one: behind the second is no token
    written(folder / "x_val_000000.bin", range(300, 341))
    return TokenFiles(path=str(folder), max_length=8, num_dev=2, num_test=3, vocab_size=400)


def test_windows_follow_each_other_and_are_guessed_up_to_the_next_one(tmp_path: Path) -> None:
    task = folder_of_tokens(tmp_path)
    written(tmp_path / "x_train_000000.bin", [])  # shifts nothing behind it
    task.check()
    data = task.load(frozenset({"text", "types", "label"}), seed=1)

    assert [data.num_samples(split) for split in ("train", "dev", "test")] == [4, 2, 3]
    batch = data.batch("train", torch.tensor([3, 0, 2]))
    assert batch["text"].tolist() == [[*range(s, s + 8)] for s in (200, 100, 116)]
    assert torch.equal(batch["label"], batch["text"] + 1)
    assert not batch["types"].any()
    assert data.batch("dev", torch.tensor([1]))["text"][0, 0] == 308
    assert data.batch("test", torch.tensor([0]))["text"][0, 0] == 316
    assert data.weight(torch.tensor([0, 1])) == 16
    assert data.vocabularies["text"].size == 400
    scores = data.score("dev", {0: [8_000_000, 8], 1: [16_000_000, 8]})
    assert scores.values["loss"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("name", "is_named"),
    [("x_extra.bin", True), ("train.npy", True), ("train.txt", True), ("README.md", False)],
)
def test_files_beside_token_files_that_are_not_read_are_named(
    name: str, is_named: bool, tmp_path: Path
) -> None:
    task = folder_of_tokens(tmp_path)
    (tmp_path / name).write_bytes(b"x")
    said = task.load(frozenset(["text"]), seed=0).describe()
    expected = f", not read, beside what is: {name}" if is_named else "windows of 8 tokens"
    assert said.endswith(expected)


def test_token_files_are_known_by_their_number_of_tokens_and_by_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xcloud.tasks.token_files.DIGEST_TOKENS", 3)
    task = folder_of_tokens(tmp_path)
    found = []
    for tokens in ([*range(41)], [*range(41), 41], [9, *range(1, 41)], [*range(40), 9]):
        written(tmp_path / "x_val_000000.bin", tokens)
        data = task.load(frozenset({"text"}), seed=1)
        assert data.own_digests().keys() == {
            "tokens of x_train_000001.bin", "tokens of x_train_000002.bin",
            "tokens of x_val_000000.bin",
        }  # fmt: skip
        found.append(data.own_digests()["tokens of x_val_000000.bin"])
    assert len(set(found)) == 4
    written(tmp_path / "x_val_000000.bin", [*range(20), 9, *range(21, 41)])
    data = task.load(frozenset({"text"}), seed=1)
    assert data.own_digests()["tokens of x_val_000000.bin"] == found[0], "its middle is not read"
    name = f"tokens ({tmp_path.name})"
    assert data.describe() == f"{name}: 4 train, 2 dev, 3 test windows of 8 tokens"
    assert data.sentences("text") == data.batch("train", torch.arange(4))["text"].tolist()
    assert data.vocabularies["text"].eos == data.vocabularies["text"].bos == 399
    assert data.sample_outputs("test", Scores({}, {}), count=3) == ""


def test_predictions_of_windows_that_are_not_there_are_refused(tmp_path: Path) -> None:
    data = folder_of_tokens(tmp_path).load(frozenset({"label"}), seed=1)
    for wrong in ({}, {2: [1, 1]}, {-1: [1, 1]}):
        with pytest.raises(ValueError, match=f"{len(wrong)} predictions of dev, which has 2"):
            data.score("dev", wrong)
    data.score("dev", {1: [1, 1]})


def test_a_rank_sees_its_fields_alone_and_one_without_fields_opens_no_file(tmp_path: Path) -> None:
    task = folder_of_tokens(tmp_path)
    views = [task.load(frozenset(fields), seed=1) for fields in ((), ("text",), ("label",))]
    sizes = {"train": 4, "dev": 2, "test": 3}
    views.append(replace(task, path="nowhere", sizes=sizes).load(frozenset(), seed=1))

    assert len({view.fingerprint() for view in views}) == 1
    assert [sorted(v.batch("train", torch.tensor([0]))) for v in views] == [
        ["ids"], ["ids", "text"], ["ids", "label"], ["ids"],
    ]  # fmt: skip
    assert views[2].vocabularies == {} and not views[0].own_digests()
    other = replace(task, vocab_size=399).load(frozenset(), seed=1)
    assert other.fingerprint() != views[0].fingerprint()
    before = views[1].own_digests()
    written(tmp_path / "x_val_000000.bin", [*range(300, 340), 0])
    assert task.load(frozenset({"text"}), seed=1).own_digests() != before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: written(d / "x_val_000000.bin", range(41), magic=20240801), "20240801 and 1"),
        (lambda d: written(d / "x_val_000000.bin", range(41), version=2), "20240520 and 2"),
        (lambda d: written(d / "x_val_000000.bin", range(41), claimed=42), "promises 42 tokens"),
        (lambda d: written(d / "x_val_000000.bin", range(41), claimed=40), "82 bytes follow"),
        (lambda d: (d / "x_val_000000.bin").write_bytes(b"x" * (HEADER_BYTES - 1)), "1023 bytes"),
        (lambda d: (d / "x_val_000000.bin").write_bytes(b""), "is empty"),
        (lambda d: (d / "x_val_000000.bin").write_bytes(b"<html> not found"), "a web page"),
        (lambda d: (d / "x_val_000000.bin").unlink(), "no file like"),
        (lambda d: written(d / "x_val_000000.bin", range(40)), "test has 2 windows"),
        (lambda d: written(d / "x_val_000000.bin", [*range(40), 400]), "token 400 stands"),
        (lambda d: (d / "x_train_val.bin").touch(), "is empty"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Any, said: str) -> None:
    task = folder_of_tokens(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=said) as raised:
        task.check()
        task.load(frozenset({"label"}), 1).batch("test", torch.tensor([0, 1, 2]))
    assert "x_" in str(raised.value) or str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "nowhere"}, "does not exist"),
        ({"train": "*.bin"}, "share no file"),
        ({"sizes": {"train": 5, "dev": 2, "test": 3}}, "differ from the data"),
        ({"train": "../*.bin"}, "not of folders"),
        ({"sizes": {"train": 5}}, "task.sizes must be"),
        ({"vocab_size": 2**16 + 1}, "task.vocab_size"),
    ],
)
def test_a_wrong_setting_of_token_files_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    task = folder_of_tokens(tmp_path)
    with pytest.raises((ConfigError, DataError), match=said):
        replace(task, **changes).load(frozenset({"text"}), 1)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_paper_profile_trains_from_token_files_over_clouds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cloud between the ends reads no field, so it opens no file and learns the sizes."""
    data = tmp_path / "data"
    data.mkdir()
    tokens = np.arange(4_000) * 7 % WORDS
    written(data / "x_train_1.bin", tokens)
    written(data / "x_val_0.bin", tokens[:1_000])
    config = composed(
        "+exp=protocol_gpt", "profile=paper", "cluster=three_clouds", "cluster/wan=free",
        "tracker=none", f"task.path={data}", "task.max_length=16", f"task.vocab_size={WORDS}",
        "task.num_dev=8", "task.num_test=8", "training.max_steps=4", "training.batch_size=8",
        "schedule.num_micro_batches=2", "training.until=null", "training.precision=fp32",
        f"model.scratch.vocab_size={WORDS}", "model.scratch.hidden=32",
        "model.scratch.num_heads=2",
    )  # fmt: skip
    in_threads(tmp_path / "run", config, monkeypatch)
    found = losses(tmp_path / "run")

    assert len(found) == 4 and found[-1] < found[0]
