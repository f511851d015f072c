"""Made-up results of sweeps over the layer and the rank of a split, for tests of tables and
pictures. No model and no config: settings as experiment.flatten gives them."""

from __future__ import annotations

from pathlib import Path

from tests.sweep_runs import summary_of
from xcloud.study.results import Result


def split_run(
    layer: int | None,
    rank: int | None = 8,
    seed: int = 1,
    accuracy: float = 85.0,
    name: str = "bert_split_sst2",
    summary: dict[str, object] | None = None,
    **settings: object,
) -> Result:
    """settings: further ones, "__" for ".": model__split__method="pca"."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    label = "unsplit" if layer is None else f"layer={layer} rank={rank}"
    found = {
        "name": name,
        "seed": seed,
        "label": label,
        "model.split": "LowRankSplit",
        "model.split.layer": layer,
        "model.split.rank": rank,
        "cluster.name": "two_clouds",
        **dotted,
    }
    figures = summary_of(quality={"accuracy": accuracy}, **(summary or {}))
    return Result("s", Path("nowhere"), found, figures)


def fig_9() -> list[Result]:
    """Two ranks at three layers, two seeds; accuracies that a reader can work out."""
    runs = [split_run(None, 8, seed, 90 + 2 * (seed - 1)) for seed in (1, 2)]
    for layer in (0, 2, 4):
        for rank in (8, 16):
            for seed in (1, 2):
                accuracy = 70 + 2 * layer + 0.1 * rank + 2 * (seed - 1)
                runs.append(split_run(layer, rank, seed, accuracy))
    return runs
