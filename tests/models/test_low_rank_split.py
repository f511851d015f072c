"""The cut encoder: stages, boundaries, export, and the same training however it is spread."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.channels import InProcessLink
from tests.checkpoints import KINDS, SIZES, padded_ids, saved
from tests.nightly import NIGHTLY, each_once, first_daily
from tests.pipelines import in_threads, pipelines
from tests.translation_models import IDS, context
from tests.understanding_models import (
    CLASSES,
    HIDDEN,
    SPAN,
    VALUE,
    build,
    forward,
    model,
    predict,
    question,
    train,
    where,
)
from xcloud.base.errors import ConfigError, TrainingDiverged
from xcloud.comm.channel import Codec, Codecs, SendChannel
from xcloud.comm.compression import ChannelId
from xcloud.comm.compressor import Chain
from xcloud.comm.memory import NoMemory
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import BASES, Batch, Head, TokenIds
from xcloud.layout import Cloud, ClusterLayout
from xcloud.models.backbone import OwnBackbone, PretrainedBackbone
from xcloud.models.encoder import EncoderLayer, Packing
from xcloud.models.low_rank_split import LowRankSplit
from xcloud.models.split_point import Split
from xcloud.net.frame import Kind, MessageKey, TensorSpec
from xcloud.pipeline.batch_plan import cut
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward
from xcloud.pipeline.pipeline import hand_over
from xcloud.pipeline.schedule import GPipe

WAYS: dict[str, dict[str, Any]] = {
    "svd": {},
    "svd in attention": {"linear": "attention_output"},
    "identity": {"method": "identity"},
    "pca": {"method": "pca"},
    "pca, whitened, anchored": {"method": "pca", "whiten": True, "anchor": "position"},
    "orthogonal": {"method": "orthogonal"},
    "full width": {"rank": None},
    "unsplit": {"layer": None},
    "frozen bottom": {"method": "pca", "freeze_bottom": True},
}
OTHER_WAYS = [way for way in WAYS if way not in ("svd", "pca")]


def test_each_dropout_is_that_of_its_setting(tmp_path: Path) -> None:
    for dropout, frozen in ((0.0, False), (0.2, False), (0.2, True)):
        made = model(method="pca", freeze_bottom=frozen, dropout=dropout)
        made = replace(made, attention_dropout=0.1)
        for number, stage in enumerate(build(made, 2, where(tmp_path))):
            layers = [part for part in stage.modules() if isinstance(part, EncoderLayer)]
            found = {(layer.dropout.p, layer.attention.dropout) for layer in layers}
            off = frozen and number == 0
            assert found == {(0.0, 0.0) if off else (dropout, 0.1)}


def test_fields_are_those_of_the_owner() -> None:
    two, three = model(), model()

    assert [two.fields(s, 2) for s in range(2)] == [{"text", "types"}, {"label"}]
    assert [three.fields(s, 3) for s in range(3)] == [{"text", "types"}, set(), {"label"}]
    for wrong in (1, 4):
        with pytest.raises(ConfigError, match=f"2 stages .* or 3 .*, got {wrong}"):
            model().fields(0, wrong)


@pytest.mark.parametrize(("way", "num_stages"), each_once(WAYS, [2, 3], count=9))
def test_what_crosses_is_what_the_boundary_says(tmp_path: Path, way: str, num_stages: int) -> None:
    for output, head in (("sample", CLASSES), ("span", SPAN)):
        made = model(output, head_rank=3, **WAYS[way])
        stages = build(made, num_stages, where(tmp_path), head)
        batch = question(5, kind=head.kind)
        message = None
        for number, stage in enumerate(stages[:-1]):
            message = stage(message, batch).send
            boundary = made.boundary(number, num_stages, 16)
            assert list(message) == [field.name for field in boundary.fields]
            for field in boundary.fields:
                rows = 5 if field.rows == "samples" else int(message["counts"].sum())
                found = message[field.name]
                assert found.shape == (rows, *field.features) and found.dtype == field.dtype
            if "counts" in message:
                assert int(message["counts"].max()) <= boundary.max_rows_per_sample


def test_the_basis_of_private_text_is_handed_over_once_and_that_of_public_text_never(
    tmp_path: Path,
) -> None:
    own, public = model(method="pca"), model(method="pca", calibration="public")
    (bottom, top), (_, alone) = (
        build(made, 2, where(tmp_path), handed_over=False) for made in (own, public)
    )
    promised = own.boundary(0, 2, 16).start

    assert public.boundary(0, 2, 16).start == ()
    assert tuple(TensorSpec.of(tensor) for tensor in bottom.handed_over) == promised
    assert not top.state_dict()["layers.cut.linear.weight"].any(), "it sees no text to measure"
    top.take_over(bottom.handed_over)
    weight = top.state_dict()["layers.cut.linear.weight"]
    assert torch.equal(weight, bottom.handed_over[0])
    assert weight.shape == alone.state_dict()["layers.cut.linear.weight"].shape


def test_only_rank_features_of_a_row_cross() -> None:
    assert model(rank=4).boundary(0, 2, 16).fields[1].features == (4,)
    assert model(rank=None).boundary(0, 2, 16).fields[1].features == (HIDDEN,)
    assert model(layer=None).boundary(0, 2, 16).fields[1].features == (HIDDEN,)
    assert model(head_rank=2).boundary(1, 3, 16).fields[0].features == (2,)
    assert model(layer=None, head_rank=2).boundary(1, 3, 16).fields[0].features == (HIDDEN,)
    frozen = model(method="pca", freeze_bottom=True)
    for boundary, is_constant in (
        (model(method="pca").boundary(0, 3, 16), False),
        (frozen.boundary(0, 3, 16), True),
        (frozen.boundary(1, 3, 16), False),
    ):
        assert boundary.gradient_returns is not is_constant
        assert boundary.is_constant is is_constant


@pytest.mark.parametrize("way", WAYS)
def test_the_network_is_the_same_in_two_stages_and_in_three(tmp_path: Path, way: str) -> None:
    made = model(head_rank=5, **WAYS[way])
    batch = question(6)
    losses = [forward(build(made, n, where(tmp_path)), batch) for n in (2, 3)]

    assert torch.equal(losses[0], losses[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [way if way == "svd" else pytest.param(way, marks=pytest.mark.nightly) for way in WAYS],
)
def test_every_way_of_cutting_learns(tmp_path: Path, way: str) -> None:
    stages = build(model(pooling="mean", **WAYS[way]), 3, where(tmp_path))
    losses = train(stages, [question(32, seed) for seed in range(50)])

    # What a random frozen bottom lets through is hard to learn from.
    bound = 0.97 if way == "frozen bottom" else 0.85
    assert sum(losses[-10:]) < bound * sum(losses[:10]), losses[::10]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("head", [VALUE, SPAN], ids=lambda h: h.kind)
def test_values_and_spans_are_learnt(tmp_path: Path, head: Head) -> None:
    made = model("span" if head is SPAN else "sample", "mean", head_rank=8)
    stages = build(made, 3, where(tmp_path), head)
    losses = train(stages, [question(32, s, head.kind) for s in range(60)], 5e-3)

    assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), losses[::10]
    if head is SPAN:
        batch = question(20, 99, "span")
        right = [
            p[:2] == t[:2]
            for p, t in zip(predict(stages, batch), batch["label"].tolist(), strict=True)
        ]
        assert sum(right) > 10


def test_a_frozen_bottom_keeps_its_weights_and_drops_nothing_out(tmp_path: Path) -> None:
    made = model(method="pca", freeze_bottom=True, dropout=0.5)
    stages = build(made, 3, where(tmp_path))
    for stage in stages:
        stage.train()
    batch = question(4)

    assert not any(p.requires_grad for p in stages[0].parameters())
    first, again = (stages[0](None, batch).send["hidden"] for _ in range(2))
    assert torch.equal(first, again) and not first.requires_grad
    received = {"counts": stages[0](None, batch).send["counts"], "hidden": first}
    assert not torch.equal(*(stages[1](received, batch).send["pooled"] for _ in range(2)))


# --- the pipeline ---

LOCAL = ClusterLayout({"local": Cloud(1, [0, 1, 2])}, "free")
U_SHAPE = ClusterLayout({"owner": Cloud(1, [0, 2]), "other": Cloud(1, [1])})
LOCAL_2 = ClusterLayout({"local": Cloud(1, [0, 1])}, "free")
TWO_CLOUDS = ClusterLayout({"a": Cloud(), "b": Cloud()})


def updates(made: LowRankSplit, layout: ClusterLayout, cache: Path) -> list[dict[str, Any]]:
    """Two pipeline steps of 12 samples in 4 micro-batches; loss and gradients."""
    n = layout.num_stages
    parts = build(made, n, where(cache), handed_over=False)
    boundaries = {stage: made.boundary(stage, n, 16) for stage in range(n - 1)}
    ranks = pipelines(layout, boundaries=boundaries, stages=dict(enumerate(parts)))
    in_threads([lambda p=p: hand_over(p.stages, p.ports) for p in ranks])
    whole = question(12)

    def fetch(ids: torch.Tensor) -> Batch:
        return {name: value[ids] for name, value in whole.items()}

    found = []
    for number, schedule in enumerate((GPipe(4), OneForwardOneBackward(4)), 1):
        pieces = dict(enumerate(cut(torch.arange(12), 4)))
        batches = {i: fetch(ids) for i, ids in pieces.items()}
        loss = sum(
            in_threads([partial(rank.step, schedule, batches, number, 12.0) for rank in ranks])
        )
        gradients = {
            f"{stage}.{name}": p.grad.clone()
            for stage, part in enumerate(parts)
            for name, p in part.named_parameters()
            if p.grad is not None
        }
        found.append({"loss": loss, **gradients})
    return found


@pytest.mark.parametrize("way", ["svd", "pca", "orthogonal", "frozen bottom"])
@pytest.mark.parametrize(
    ("one", "many"),
    [(LOCAL, U_SHAPE), pytest.param(LOCAL_2, TWO_CLOUDS, marks=NIGHTLY)],
    ids=["3 stages", "2 stages"],
)
def test_clouds_are_bit_equal_to_one_process(
    tmp_path: Path, way: str, one: ClusterLayout, many: ClusterLayout
) -> None:
    # No dropout: ranks are threads here, and share torch's random state.
    made = model(head_rank=5, **WAYS[way])
    for alone, spread in zip(
        updates(made, one, tmp_path), updates(made, many, tmp_path), strict=True
    ):
        assert alone.keys() == spread.keys() and len(alone) > 5
        for name in alone:
            assert torch.equal(alone[name], spread[name]), name


# --- against transformers ---


@pytest.mark.parametrize("model_type", first_daily(["bert", "xlm-roberta", "electra"], count=2))
def test_unsplit_rows_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    whole = saved(tmp_path / "in", model_type)
    pad = whole.config.pad_token_id
    ids = padded_ids(pad)
    types = torch.zeros_like(ids)
    if whole.config.type_vocab_size > 1:
        types[:, 2:] = 1
    made = LowRankSplit(PretrainedBackbone(str(tmp_path / "in")), Split(0, None), dropout=0.0)
    vocabularies = {"text": TokenIds(IDS.size, pad, 1 - pad, 2, 3)}
    stages = build(made, 2, context(tmp_path, vocabularies=vocabularies))
    batch = {"text": ids, "types": types * (ids != pad), "ids": torch.arange(4)}
    with torch.no_grad():
        theirs = whole.base_model(
            input_ids=ids, attention_mask=(ids != pad).long(), token_type_ids=batch["types"]
        ).last_hidden_state
        sent = stages[0](None, batch).send
        rows = stages[1].layers["1"](sent["hidden"], Packing(sent["counts"]))

    torch.testing.assert_close(rows, Packing.of(ids, pad).pack(theirs), atol=1e-5, rtol=1e-5)


def test_the_unsplit_classifier_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        theirs = BertForSequenceClassification(BertConfig(**SIZES | KINDS["bert"], num_labels=3))
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.copy_(0.3 * torch.randn_like(parameter))
    theirs.eval().bert.save_pretrained(tmp_path / "in")
    made = LowRankSplit(PretrainedBackbone(str(tmp_path / "in")), Split(None), dropout=0.0)
    stages = build(made, 3, context(tmp_path, fields=["text"]), Head("classes", 3))
    answer = stages[2].answer
    answer.classifier.load_state_dict(theirs.classifier.state_dict())
    ids = padded_ids(0)
    batch = {
        "ids": torch.arange(4),
        "text": ids,
        "types": ((torch.arange(9) > 3) & (ids != 0)).long(),
        "label": torch.tensor([0, 2, 1, 1]),
    }
    with torch.no_grad():
        expected = theirs(
            input_ids=ids,
            attention_mask=(ids != 0).long(),
            token_type_ids=batch["types"],
            labels=batch["label"],
        )
        message = stages[1](stages[0](None, batch).send, batch).send
        loss = stages[2](message, batch).loss

    torch.testing.assert_close(loss / 4, expected.loss, atol=1e-5, rtol=1e-5)
    found = stages[2].predict(message, batch)
    assert found == [[int(best)] for best in expected.logits.argmax(1)]


def test_a_separate_head_names_the_checkpoint_only_where_it_has_its_pooler(tmp_path: Path) -> None:
    saved(tmp_path / "in", "bert")
    backbone = PretrainedBackbone(str(tmp_path / "in"))
    names = {}
    for output, head in (("sample", CLASSES), ("span", SPAN)):
        made = LowRankSplit(backbone, Split(None), output=output)
        stage = made.build_stage(2, 3, where(tmp_path, head))
        names[output] = " ".join(stage.architecture[BASES])

    assert "model.safetensors" in names["sample"]
    assert names["span"] == ""


# --- export, and what is refused ---


@pytest.mark.parametrize(
    ("num_stages", "way"),
    each_once([2, 3], ["svd", "svd in attention", "pca", "orthogonal", "unsplit"], count=5),
)
def test_an_exported_stage_comes_back(tmp_path: Path, way: str, num_stages: int) -> None:
    made = model(head_rank=5, **WAYS[way])
    stages = build(made, num_stages, where(tmp_path))
    train(stages, [question(8, seed) for seed in range(3)])
    again = []
    for number, stage in enumerate(stages):
        about = json.loads(json.dumps(stage.architecture))
        known = {"text": IDS} if number == 0 else {}
        at = where(tmp_path, vocabularies=known, architecture=about)
        empty = made.build_stage(number, num_stages, at)
        empty.load_state_dict(stage.state_dict())
        again.append(empty)

    assert predict(stages, question(9, 7)) == predict(again, question(9, 7))
    assert torch.equal(forward(stages, question(9, 7)), forward(again, question(9, 7)))


def test_the_head_must_be_that_of_the_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"predicts span, so set model\.output=span"):
        build(model(), 2, where(tmp_path), SPAN)
    with pytest.raises(ConfigError, match="choose task="):
        model().build_stage(2, 3, where(tmp_path, None))


def test_what_does_not_fit_the_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"split.layer must be 0\.\.2 or null.*got 3"):
        model(layer=3)
    with pytest.raises(ConfigError, match=r"split\.rank is 17, but the model has 16"):
        model(rank=17)
    with pytest.raises(ConfigError, match=r"split\.head_rank is 17"):
        model(head_rank=17)
    saved(tmp_path, "bert")
    made = LowRankSplit(PretrainedBackbone(str(tmp_path)), Split(2))
    with pytest.raises(ConfigError, match=r"0\.\.1 or null"):
        made.build_stage(0, 2, context(tmp_path, fields=["text"]))
    with pytest.raises(ConfigError, match=r"0\.\.1 or null"):
        made.boundary(0, 2, 16)  # what is checked before a rank starts
    wide = LowRankSplit(PretrainedBackbone(str(tmp_path)), Split(1, rank=17))
    with pytest.raises(ConfigError, match=r"split\.rank is 17, but the model has 16"):
        wide.boundary(0, 2, 16)
    # Where only the width is known, the rank alone can be checked.
    told = PretrainedBackbone("nowhere", hidden=16)
    assert LowRankSplit(told, Split(2)).boundary(0, 2, 16).fields[1].features == (8,)
    with pytest.raises(ConfigError, match="must be a PretrainedBackbone or a PublicBackbone"):
        LowRankSplit(OwnBackbone(), Split(0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"public needs model\.public_text"):
        LowRankSplit(
            PretrainedBackbone(str(tmp_path)), Split(1, method="pca", calibration="public")
        )


@pytest.mark.parametrize(
    ("way", "per_row"),
    [("svd", 4), ("pca", 4), ("full width", HIDDEN), ("unsplit", HIDDEN)],
)
def test_the_counted_ratio_of_a_cut_is_against_the_rows_of_the_uncut_model(
    way: str, per_row: int, tmp_path: Path
) -> None:
    """Bytes as a run counts them: FP32 bytes of whole rows over what is on the wire."""
    made = model(**WAYS[way])
    stage = build(made, 2, where(tmp_path))[0]
    batch = question(40)
    message = stage(None, batch).send
    assert message is not None
    num_rows = int(message["counts"].sum())
    fields = made.boundary(0, 2, 20).fields
    link = InProcessLink()
    uncompressed = Codecs([(None, Codec(Chain(), NoMemory()))])
    identity = ChannelId(7, 0, "forward", 0, 1)
    sender = SendChannel(link, fields, lambda: uncompressed, StepClock(), identity)
    sender.send(MessageKey(Kind.ACTIVATION, 1, 0), message, batch)

    assert message["hidden"].shape == (num_rows, per_row)
    assert sender.raw_bytes == 4 * num_rows * HIDDEN
    on_the_wire = link.record.num_bytes[Kind.ACTIVATION]
    overhead = on_the_wire - 4 * num_rows * per_row
    assert 2 * len(batch["ids"]) <= overhead < 2 * len(batch["ids"]) + 400, "counts and a header"
    assert sender.raw_bytes / on_the_wire == pytest.approx(HIDDEN / per_row, rel=0.25)


@pytest.mark.parametrize(
    ("odd", "head"), each_once([torch.nan, torch.inf], [CLASSES, VALUE, SPAN], count=3)
)
def test_a_model_that_has_diverged_is_said_to_have_when_it_is_scored(
    head: Head, odd: float, tmp_path: Path
) -> None:
    """Not: "cannot convert float NaN to integer", nor a class drawn from nonsense."""
    made = model("span" if head.kind == "span" else "sample")
    stages = build(made, 2, where(tmp_path, head), head)
    with torch.no_grad():
        stages[-1].answer.classifier.weight.fill_(odd)
    with pytest.raises(TrainingDiverged, match=r"not finite.*diverged.*learning_rate"):
        predict(stages, question(4, kind=head.kind))
