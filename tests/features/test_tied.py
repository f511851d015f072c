"""A matrix tied over the first and the last stage is trained as one, wherever the stages are."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.causal_models import batch_of, build, loss_of, saved, where, words
from tests.configs import composed
from tests.pipelines import D, TiedToy
from tests.trainers import Rank, ranks, update
from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import PerTensor
from xcloud.comm.compressor import Chain
from xcloud.comm.sparsify import TopK, TopRows
from xcloud.features.tied.feature import TiedEnds
from xcloud.features.tied.gradients import TiedGradients
from xcloud.job.config import Settings
from xcloud.layout import Cloud, ClusterLayout
from xcloud.models.causal import CausalLM
from xcloud.pipeline.settings import Optimizer, Training

LAYOUTS = {
    "one rank": ClusterLayout({"local": Cloud(1, [0, 1, 2])}, "free"),
    "three clouds": ClusterLayout({"a": Cloud(), "b": Cloud(), "c": Cloud()}),
    "lanes": ClusterLayout({"a": Cloud(2), "b": Cloud(), "c": Cloud(2)}),
    "both ends in one cloud": ClusterLayout({"a": Cloud(1, [0, 2]), "b": Cloud(1, [1])}),
}
CLIPPED = Training(9, batch_size=8, optimizer=Optimizer(0.1, 1, clip_norm=0.5))


def ends(job: list[Rank]) -> list[torch.Tensor]:
    modules = [module for rank in job for module in rank.trainer.pipeline.stages.values()]
    return [tied.detach() for module in modules if (tied := module.tied()) is not None]


def trained(layout: ClusterLayout, compression: Compression | None = None) -> list[Rank]:
    job = ranks(layout, CLIPPED, compression, toy=TiedToy)
    for step in range(1, 4):
        update(job, step)
    return job


def test_both_ends_stay_equal_and_are_trained_as_one_wherever_they_are() -> None:
    """The norm that gradients are clipped to counts the matrix once."""
    whole = ranks(LAYOUTS["one rank"], CLIPPED, toy=TiedToy)[0].trainer
    stages = whole.pipeline.stages
    stages[2].words = stages[0].words  # one parameter, as in an uncut model
    whole_model = nn.ModuleList(stages.values())
    parameters = list(whole_model.parameters())
    optimizer = CLIPPED.optimizer.build(whole_model)
    norms = []
    for step in range(1, 4):
        optimizer.zero_grad()
        ids = whole.feed.plan.ids(step)
        batch, message = whole.feed.fetch(ids), None
        for number in range(3):
            output = stages[number](message, batch)
            message = output.send
        (output.loss / len(ids)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = CLIPPED.optimizer.learning_rate_at(step, 9)
        optimizer.step()

    found = {}
    for name, layout in LAYOUTS.items():
        job = ranks(layout, CLIPPED, toy=TiedToy)
        reports = [update(job, step)[0] for step in range(1, 4)]
        assert [report.grad_norm for report in reports] == pytest.approx(norms, rel=1e-5), name
        found[name] = ends(job)
        assert all(torch.equal(end, found[name][0]) for end in found[name]), name
        torch.testing.assert_close(found[name][0], stages[0].words.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found["three clouds"][0], found["one rank"][0])


def test_a_lossy_compressor_leaves_both_ends_equal_and_its_bytes_are_counted() -> None:
    lossy = Compression(Chain(), Chain(), averaging=TopK(0.1))
    for name in ("three clouds", "lanes"):
        job = trained(LAYOUTS[name], lossy)
        found = ends(job)
        assert all(torch.equal(end, found[0]) for end in found), name
        assert not torch.equal(found[0], ends(trained(LAYOUTS[name]))[0])
        links = [links for rank in job for links in rank.wiring.averaging]
        assert [link.raw_bytes for link in links] == [3 * 4 * D * D] * 2


def test_the_tied_matrix_gets_the_compressor_of_embeddings() -> None:
    chosen = PerTensor(TopK(0.5), embeddings=TopRows(0.2))
    job = ranks(LAYOUTS["three clouds"], CLIPPED, Compression(averaging=chosen), toy=TiedToy)
    codecs = [
        rank.hook(TiedGradients).averager._codecs["all"]  # type: ignore[union-attr]
        for rank in job
        if rank.wiring.averaging
    ]
    assert ["toprows(0.2)" in " ".join(codec.carries) for codec in codecs] == [True, True]


def test_a_gradient_that_is_not_finite_at_one_end_is_skipped_at_both() -> None:
    skip = Training(9, batch_size=8, optimizer=Optimizer(0.1, 1), on_divergence="skip")
    for bad in (0, 2):
        job = ranks(LAYOUTS["three clouds"], skip, toy=TiedToy)
        before = [end.clone() for end in ends(job)]
        (hooked,) = (
            r.trainer.pipeline.stages[bad] for r in job if bad in r.trainer.pipeline.stages
        )
        handle = hooked.tied().register_hook(lambda gradient: gradient * math.nan)
        reports = update(job, 1)
        assert all(report.skipped for report in reports)
        assert all(torch.equal(a, b) for a, b in zip(ends(job), before, strict=True))
        handle.remove()
        update(job, 2)
        first, second = ends(job)
        assert torch.equal(first, second) and not torch.equal(first, before[0])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_a_causal_model_ties_its_embeddings_and_its_head(tmp_path: Path, kind: str) -> None:
    network = saved(kind, tmp_path, tie_word_embeddings=True)
    model = CausalLM(checkpoint=str(tmp_path), embeddings="tie")
    assert model.ties_ends(2) and not model.ties_ends(1)
    stages = build(model, 3, where(tmp_path))
    held = [stage.tied() for stage in stages]
    assert held[0] is not None and held[1] is None and held[2] is not None
    assert torch.equal(held[0], held[2]) and held[0] is not held[2]
    assert build(model, 1, where(tmp_path))[0].tied() is None

    line = words(9, 1)
    loss_of([stage.train() for stage in stages], batch_of([line])).backward()
    ids = torch.tensor([line])
    (network(ids, labels=ids).loss * (len(line) - 1)).backward()
    expected = network.get_input_embeddings().weight.grad
    torch.testing.assert_close(held[0].grad + held[2].grad, expected, rtol=1e-3, atol=1e-4)
    saved(kind, tmp_path / "two", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"embeddings=tie.*two matrices already"):
        CausalLM(checkpoint=str(tmp_path / "two"), embeddings="tie").boundary(0, 2, 16)


@pytest.mark.parametrize(
    ("layout", "ways"),
    [("three clouds", [("a", "c"), ("c", "a")]), ("both ends in one cloud", [])],
)
def test_the_ends_are_said_to_send_each_other_gradients(
    layout: str, ways: list[tuple[str, str]]
) -> None:
    job = Mock(cluster=LAYOUTS[layout])
    said = TiedEnds(join_ends=Mock()).leaving(job)
    assert [(message.sender, message.to) for message in said] == ways


def test_ties_are_refused_where_their_gradients_would_tell_the_words() -> None:
    tied = ["+exp=lora_clm", "model.lora=null", "model.embeddings=tie", "model.own.tied=true"]
    Settings.of(composed(*tied))
    Settings.of(composed(*tied, "cluster=u_shape", "security=owner_keeps_text_and_labels"))
    with pytest.raises(
        ConfigError, match=r"needs both ends in every update, but strategy=local_updates"
    ):
        Settings.of(composed(*tied, "strategy=local_updates"))
    for holders in ("{text: [cloud_a]}", "{label: [cloud_b]}"):
        with pytest.raises(ConfigError, match="gradients that show which words"):
            Settings.of(composed(*tied, f"+security.holders={holders}"))
