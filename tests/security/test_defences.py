"""Noise at the boundary: what it promises, where it acts, and that nobody else can draw it
again."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pipelines import D, in_threads, pipelines, samples, wired_job
from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.features.leak_meter.meter import auc, norm_attack
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.batch_plan import cut
from xcloud.pipeline.pipeline import Pipeline
from xcloud.pipeline.schedule import GPipe
from xcloud.security.defences import (
    Defence,
    GaussianNoise,
    Marvell,
    MaxNorm,
    NoiseShape,
    noise_shape,
)
from xcloud.security.policy import Visibility

COUNTS = torch.tensor([3, 1, 2, 4])
LABELS = torch.tensor([0, 1, 1, 0])
DEFENCES = [GaussianNoise(1.0, 0.5), MaxNorm(), Marvell(4.0)]


def chance(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def norms(rows: Tensor, counts: Tensor) -> Tensor:
    return torch.stack([piece.norm() for piece in rows.split(counts.tolist())])


@pytest.mark.parametrize("defence", DEFENCES, ids=lambda d: d.label)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_what_is_sent_differs_keeps_its_shape_and_repeats(defence: Defence, scale: float) -> None:
    rows = scale * torch.randn(10, 6, generator=drawn(1))
    once, again, other = (
        defence.protect(rows, COUNTS, LABELS, chance(seed)) for seed in (5, 5, 6)
    )

    assert isinstance(defence, Defence)
    assert once.shape == rows.shape and once.dtype == rows.dtype
    assert bool(once.isfinite().all())
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert not torch.equal(once, rows)


@pytest.mark.parametrize("defence", DEFENCES, ids=lambda d: d.label)
@pytest.mark.parametrize(
    ("rows", "counts", "labels"),
    [
        (torch.zeros(10, 6), COUNTS, LABELS),
        (torch.randn(1, 6), torch.tensor([1]), torch.tensor([1])),
        (torch.randn(4, 6), None, LABELS),
        (torch.randn(4, 6), None, torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64), LABELS[:0]),
    ],
    ids=["zeros", "one row", "a row a sample", "one class", "nothing"],
)
def test_degenerate_messages_stay_finite(
    defence: Defence, rows: Tensor, counts: Tensor | None, labels: Tensor
) -> None:
    sent = defence.protect(rows, counts, labels, chance())

    assert sent.shape == rows.shape and bool(sent.isfinite().all())


def test_gaussian_noise_has_its_clip_and_its_deviation() -> None:
    rows = torch.randn(2000, 32, generator=drawn(1)) * torch.linspace(0.1, 10, 2000)[:, None]
    clipped = GaussianNoise(2.0, 0.0, "absolute").protect(rows, None, None, chance())
    noised = GaussianNoise(2.0, 0.5, "absolute").protect(rows, None, None, chance())

    assert float(clipped.norm(dim=1).max()) == pytest.approx(2.0, rel=1e-5)
    short = rows.norm(dim=1) <= 2
    assert torch.equal(clipped[short], rows[short]) and bool(short.any())
    assert float((noised - clipped).std()) == pytest.approx(1.0, rel=0.02)
    relative = GaussianNoise(1.0, 0.1).protect(rows, None, None, chance())
    longest = float(rows.norm(dim=1).max())
    assert float((relative - rows).std()) == pytest.approx(0.1 * longest, rel=0.02)


def test_the_gradient_goes_through_the_clip() -> None:
    """What comes back is the gradient of what was sent, not of what was meant."""
    rows = torch.tensor([[3.0, 4.0]], requires_grad=True)
    sent = GaussianNoise(1.0, 0.1, "absolute").protect(rows, None, None, chance())
    sent.backward(torch.tensor([[3.0, 4.0]]))  # along the row: no longer row leaves a trace

    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, torch.zeros(1, 2), atol=1e-6, rtol=0)


def test_what_no_clip_touches_has_the_gradient_of_what_was_sent() -> None:
    """The longest row too, whose norm is the default clip itself."""
    rows, passed = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    sent = GaussianNoise(1.0, 0.0).protect(rows, None, None, chance())
    sent.backward(passed)

    assert torch.equal(sent, rows) and torch.equal(rows.grad, passed)


def test_max_norm_gives_every_sample_the_longest_norm_in_the_mean_and_keeps_its_line() -> None:
    rows = torch.randn(10, 6, generator=drawn(1))
    rows[3] = 0  # the sample of one row has no direction
    longest = float(norms(rows, COUNTS).max())
    sent = [MaxNorm().protect(rows, COUNTS, None, chance(seed)) for seed in range(4000)]
    squares = torch.stack([norms(s, COUNTS).square() for s in sent]).mean(0)

    torch.testing.assert_close(squares, torch.full((4,), longest**2), rtol=0.15, atol=0)
    for before, after in zip(rows.split([3, 1, 2, 4]), sent[0].split([3, 1, 2, 4]), strict=True):
        if bool(before.any()):
            line = torch.cosine_similarity(before.flatten(), after.flatten(), dim=0)
            assert abs(float(line)) == pytest.approx(1.0, abs=1e-5)


def divergence(shape: NoiseShape, u: float, v: float, size: int, gap: float) -> float:
    a1, a2 = u + shape.along_0, u + shape.across_0
    b1, b2 = v + shape.along_1, v + shape.across_1
    return (size - 1) * (a2 / b2 + b2 / a2) + (a1 + gap) / b1 + (b1 + gap) / a1


@pytest.mark.parametrize("seed", range(12))
def test_no_noise_of_the_same_power_hides_more_than_marvells(seed: int) -> None:
    draw = random.Random(seed)
    u, v, gap = (draw.expovariate(1) for _ in range(3))
    size, share, power = (
        draw.choice([1, 2, 40]),
        draw.uniform(0.05, 0.95),
        gap * 10 ** draw.uniform(-1, 1),
    )
    best = noise_shape(u, v, size, gap, share, power)

    def spent(shape: NoiseShape) -> float:
        of_0 = shape.along_0 + (size - 1) * shape.across_0
        return share * (shape.along_1 + (size - 1) * shape.across_1) + (1 - share) * of_0

    assert spent(best) == pytest.approx(power, rel=1e-6)
    assert best.along_0 >= best.across_0 >= 0 and best.along_1 >= best.across_1 >= 0
    least = divergence(best, u, v, size, gap)
    for _ in range(2000):
        raw = [draw.random() ** 3 * draw.choice([0, 1, 1]) for _ in range(4)]
        if not spent(NoiseShape(*raw)):
            continue
        other = NoiseShape(*(x * power / spent(NoiseShape(*raw)) for x in raw))
        if other.along_0 >= other.across_0 and other.along_1 >= other.across_1:
            assert least <= divergence(other, u, v, size, gap) * (1 + 1e-9)


def test_marvell_spends_its_power_and_hides_a_norm_and_a_direction() -> None:
    generator = drawn(3)
    labels = (torch.rand(512, generator=generator) < 0.3).long()
    mean = torch.zeros(16)
    mean[0] = 3.0
    rows = torch.randn(512, 16, generator=generator) * 0.3 + labels[:, None] * mean
    gap = float((rows[labels == 1].mean(0) - rows[labels == 0].mean(0)).square().sum())
    is_1 = labels == 1
    assert norm_attack(rows.norm(dim=1), is_1) > 0.95

    aucs = []
    for power in (0.25, 4.0, 100.0):
        sent = Marvell(power).protect(rows, None, labels, chance())
        spent = float((sent - rows).square().sum(1).mean())
        assert spent == pytest.approx(power * gap, rel=0.25)
        aucs.append(max(norm_attack(sent.norm(dim=1), is_1), auc(sent @ mean, is_1)))
    assert aucs[0] > aucs[1] > aucs[2]
    assert aucs[2] < 0.62


@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 1, 2, 1]), torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.ones(4, 3)]
)
def test_marvell_refuses_labels_that_are_not_binary(labels: Tensor) -> None:
    with pytest.raises(ConfigError, match="needs integers 0 and 1"):
        Marvell(1.0).protect(torch.randn(4, 6), None, labels, chance())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GaussianNoise(0.0, 1.0), "GaussianNoise.clip"),
        (lambda: GaussianNoise(1.0, -1.0), "GaussianNoise.sigma"),
        (lambda: GaussianNoise(1.0, 1.0, "median"), "GaussianNoise.unit"),  # type: ignore[arg-type]
        (lambda: Marvell(0.0), "Marvell.power"),
        (lambda: Visibility(defences={"backward": "marvell"}), "must be a Defence"),  # type: ignore[dict-item]
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(make, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_labels_that_marvell_cannot_hide_are_refused_when_they_are_known() -> None:
    marvell = Marvell(1.0)
    marvell.check_labels("classes", 2)
    MaxNorm().check_labels("span", 2)
    for kind, num_outputs in (("classes", 3), ("value", 1), ("span", 2)):
        with pytest.raises(ConfigError, match=f"of kind '{kind}' with {num_outputs} outputs"):
            marvell.check_labels(kind, num_outputs)


def test_a_defence_acts_where_what_it_protects_leaves_its_cloud() -> None:
    both: dict[str, Defence] = {"forward": GaussianNoise(1, 1), "backward": MaxNorm()}

    def acts(*held_by: str) -> list[set[str]]:
        stages = {name: [s for s, n in enumerate(held_by) if n == name] for name in held_by}
        layout = ClusterLayout({name: Cloud(stages=own) for name, own in stages.items()})
        job = wired_job(layout, {}, Compression(), GPipe(1), 1, security=Visibility(defences=both))
        return [set(job.defences_at(stage, 0)) for stage in range(len(held_by) - 1)]

    assert acts("a", "b") == [{"forward", "backward"}]
    assert acts("a", "a") == [set()]
    assert acts("owner", "other", "owner") == [{"forward"}, {"backward"}]
    assert acts("a", "b", "c") == [{"forward"}, {"backward"}]
    assert acts("a", "a", "b") == [set(), {"forward", "backward"}]


def defended(backward: Defence | None = None, forward: Defence | None = None) -> list[Pipeline]:
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()})
    chosen = {"forward": forward, "backward": backward}
    return pipelines(layout, defences={way: d for way, d in chosen.items() if d is not None})


def step(ranks: list[Pipeline], micro_batches: int = 4) -> dict[str, Tensor]:
    pieces = dict(enumerate(cut(torch.arange(12), micro_batches)))
    batches = {i: {**samples(ids), "label": ids % 2} for i, ids in pieces.items()}
    schedule = GPipe(micro_batches)
    in_threads([lambda r=rank: r.step(schedule, batches, 1, weight=12.0) for rank in ranks])
    return {f"{s}.{name}": p.grad.clone() for rank in ranks for s, m in rank.stages.items()
            for name, p in m.named_parameters()}  # fmt: skip


@pytest.mark.parametrize("defence", DEFENCES, ids=lambda d: d.label)
def test_noise_on_gradients_changes_the_first_stage_only(defence: Defence) -> None:
    plain, noised = step(defended()), step(defended(defence))

    for name in plain:
        assert torch.equal(noised[name], plain[name]) == name.startswith("1.")


@pytest.mark.parametrize("defence", DEFENCES, ids=lambda d: d.label)
def test_the_noise_cannot_be_drawn_from_what_the_receiver_knows(defence: Defence) -> None:
    """Seed, step, micro-batch and stage are the same; one message, so that no order plays in."""
    one, other = step(defended(defence), 1), step(defended(defence), 1)

    assert not any(torch.equal(one[name], other[name]) for name in one if name[0] == "0")


def test_noise_on_activations_is_there_at_evaluation_too() -> None:
    found = []
    for defence in (None, GaussianNoise(1.0, 0.5)):
        ranks = defended(forward=defence)
        rows: list[Tensor] = []
        ranks[1].stages[1].predict = lambda received, batch, rows=rows: [  # type: ignore[method-assign]
            rows.append(received["hidden"].clone()) or [0] for _ in batch["ids"]
        ]
        in_threads([lambda r=r: r.predict([torch.arange(4)], samples, 3) for r in ranks])
        found.append(rows[0])

    assert found[0].shape == found[1].shape == (10, D)
    assert not torch.equal(found[0], found[1])


def test_gradients_of_noised_activations_fit_what_was_sent() -> None:
    """One process with the same noise inside the model has the same gradients."""
    clip = GaussianNoise(0.5, 0.0, "absolute")
    found = step(defended(forward=clip), micro_batches=1)

    (one,) = pipelines(ClusterLayout({"local": Cloud(1, [0, 1])}, "free"))
    batch = samples(torch.arange(12))
    sent = one.stages[0](None, batch).send
    sent["hidden"] = clip.protect(sent["hidden"], sent["counts"], None, chance())
    (one.stages[1](sent, batch).loss / 12.0).backward()

    for stage in (0, 1):
        for name, parameter in one.stages[stage].named_parameters():
            torch.testing.assert_close(found[f"{stage}.{name}"], parameter.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("defence", DEFENCES, ids=lambda d: d.label)
def test_defences_work_where_the_tensor_is(defence: Defence) -> None:
    rows = torch.randn(10, 6, device="cuda")
    sent = defence.protect(rows, COUNTS, LABELS, chance())

    assert sent.device == rows.device and bool(sent.isfinite().all())
    assert not torch.equal(sent, rows)


@pytest.mark.parametrize("spread", [(1.0, 3.0), (3.0, 1.0)])
def test_marvells_noise_follows_the_spread_of_each_class_and_not_where_they_lie(
    spread: tuple[float, float],
) -> None:
    is_1 = torch.arange(64) % 2 == 1
    flat = torch.randn(64, 6, dtype=torch.float64) * torch.tensor(spread)[is_1.long(), None]
    flat[is_1] += 2.0
    noise = Marvell(1.0).noise(flat, is_1, chance())
    moved = Marvell(1.0).noise(flat + 100.0, is_1, chance())
    assert noise.std() > 0.1
    torch.testing.assert_close(moved, noise, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("label", [0, 1])
def test_marvell_spends_its_power_on_a_message_of_one_class(label: int) -> None:
    """The power is times the mean squared norm, over all directions alike."""
    flat = torch.full((4000, 4), 3.0, dtype=torch.float64)
    noise = Marvell(0.25).noise(flat, torch.full((4000,), bool(label)), chance())
    assert float(noise.square().sum(1).mean()) == pytest.approx(0.25 * 4 * 3.0**2, rel=0.05)
    assert noise.square().mean(0).tolist() == pytest.approx([0.25 * 3.0**2] * 4, rel=0.1)
