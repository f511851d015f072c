"""The leak meter of a run, and of what its replicas average, too:

    python run.py +exp=... security/meter=attack \\
        security.meter._target_=experiments.gradient_leaks.meter.AveragesMeter

Every rank keeps the last gradients or weight changes that other replicas gave to an averaging, and
attacks them itself when training is over, as it has the weights: which tokens and texts they were
made from (F1 of distinct tokens, ROUGE-2). Also where all replicas may read all texts: it says
what one without them would learn. One update or one merge at a time: what several of them show
together is not tried.

For a run on several machines, first copy the observations folders into one, then
    python -m experiments.gradient_leaks.meter RUN_DIR
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from experiments.gradient_leaks.gradient_attacks import (
    TEXTS,
    Victim,
    attack_layers,
    changed_rows,
    raised_words,
    score,
)
from xcloud.base.errors import XcloudError
from xcloud.base.settings import Positive, settings
from xcloud.features.leak_meter.meter import (
    OBSERVATIONS_DIR,
    LeakMeter,
    entries,
    main,
    read_observations,
)
from xcloud.features.leak_meter.observers import Observer, ReadingStage


@settings("security.meter")
class AveragesMeter(LeakMeter):
    """averaging_steps: attack the gradients or weight changes that other replicas gave to so many
    averagings, the last ones. Each keeps a copy of the stage that reads the text."""

    averaging_steps: Positive = 3

    def averaged(
        self, observer: Observer, stage: ReadingStage, num_others: int
    ) -> AveragesObserver:
        victim = Victim(**vars(stage))
        return AveragesObserver(observer, victim, self.averaging_steps * num_others)

    def measure(self, run_dir: Path) -> dict[str, Any]:
        averages = measure_averages(run_dir)
        found = super().measure(run_dir)
        leakage = found["leakage"] | averages.pop("leakage")
        return found | averages | {"leakage": leakage}


@dataclass
class _Seen:
    step: int
    replica: int
    changes: dict[str, Tensor]
    weights: dict[str, Tensor]


class AveragesObserver:
    """Of one rank. most: contributions of other replicas that it keeps, the last ones."""

    def __init__(self, observer: Observer, victim: Victim, most: int) -> None:
        self._observer, self._victim = observer, victim
        self._seen: deque[_Seen] = deque(maxlen=most)
        self._batches: dict[int, list[int]] = defaultdict(list)

    def batch(self, step: int, ids: Tensor) -> None:
        if self._observer.wants(step):
            self._batches[step] += ids.tolist()

    def received(self, step: int, replica: int, tensors: Mapping[str, Tensor]) -> None:
        """Another replica's gradient or weight change, as decoded, by "stage.name"; the victim is
        stage 0. A tensor of which only a part came (a share of its rows) is left out."""
        if not self._observer.wants(step - self._victim.covers + 1):
            return
        own = dict(self._victim.module.named_parameters())
        changes = {
            name: tensors[f"0.{name}"].detach().float().cpu().clone()
            for name, parameter in own.items()
            if f"0.{name}" in tensors and tensors[f"0.{name}"].shape == parameter.shape
        }
        known = [seen.weights for seen in self._seen if seen.step == step]
        weights = known[0] if known else {n: p.detach().clone() for n, p in own.items()}
        self._seen.append(_Seen(step, replica, changes, weights))

    def guesses(self) -> Iterator[dict[str, Any]]:
        """What each attack on each contribution recovers."""
        for seen in self._seen:
            with _holding(self._victim.module, seen.weights):
                for attack, texts in self._attacked(seen):
                    yield {"step": seen.step, "of": seen.replica, "attack": attack, "texts": texts}

    def finish(self, run_dir: Path) -> None:
        rank = self._observer
        notes = {
            "cloud": rank.cloud, "replica": rank.replica, "batches": self._batches,
            "covers": self._victim.covers, "guesses": list(self.guesses()),
        }  # fmt: skip
        (run_dir / OBSERVATIONS_DIR).mkdir(exist_ok=True)
        path = run_dir / OBSERVATIONS_DIR / f"averages{rank.rank}.json"
        path.write_text(json.dumps(notes), encoding="utf-8")

    def _attacked(self, seen: _Seen) -> Iterator[tuple[str, list[list[int]]]]:
        victim = self._victim
        num_words = int(victim.words_N.max()) + 1
        for name, module in victim.module.named_modules():
            change = seen.changes.get(f"{name}.weight")
            if change is None or len(change) < num_words:
                continue
            if isinstance(module, nn.Embedding):
                before = seen.weights[f"{name}.weight"].cpu() if victim.covers > 1 else None
                yield "embedding_rows", [changed_rows(change, before).tolist()]
            elif isinstance(module, nn.Linear):
                yield "head_rows", [raised_words(change).tolist()]
        found = attack_layers(victim, seen.changes)
        yield "layer_inputs", [found.tokens.tolist()]
        yield TEXTS, found.texts


@contextmanager
def _holding(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The module with the weights of another step."""
    own = {name: (parameter, parameter.data) for name, parameter in module.named_parameters()}
    try:
        for name, (parameter, _) in own.items():
            parameter.data = weights[name]
        yield
    finally:
        for parameter, data in own.values():
            parameter.data = data


@dataclass
class _Notes:
    """guesses: by cloud, then (replica, attack), then step. batches: sample ids by replica and
    step."""

    guesses: dict[str, dict[tuple[int, str], dict[int, list[list[int]]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    batches: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    covers: int = 1

    @classmethod
    def read(cls, run_dir: Path) -> _Notes:
        notes = cls()
        for path in sorted((run_dir / OBSERVATIONS_DIR).glob("averages*.json")):
            found = json.loads(path.read_text("utf-8"))
            notes.covers = found["covers"]
            for step, ids in found["batches"].items():
                notes.batches[found["replica"], int(step)].update(ids)
            for one in found["guesses"]:
                by_step = notes.guesses[found["cloud"]][one["of"], one["attack"]]
                by_step[one["step"]] = one["texts"]
        return notes

    def batch(self, replica: int, step: int) -> set[int]:
        """The samples that the replica trained on in the updates that its contribution at `step`
        sums up; none where not all of them were noted."""
        steps = range(step - self.covers + 1, step + 1)
        batches = [self.batches.get((replica, number), set()) for number in steps]
        return set[int]().union(*batches) if all(batches) else set()


def measure_averages(run_dir: Path) -> dict[str, Any]:
    """For summary.json: the best attack's figures, None if there is nothing to recover; under
    "leakage" the scores of all, by cloud."""
    observed, notes = read_observations(run_dir), _Notes.read(run_dir)
    results: dict[str, dict[str, dict[str, float]]] = {}
    fields = [name for name in observed.truth if name in observed.special_ids]
    # An averaging is attacked where one text is read.
    special = set(observed.special_ids[fields[0]]) if len(fields) == 1 else set[int]()
    rows = observed.truth[fields[0]] if len(fields) == 1 else {}
    words = {
        sample: [token for token in tokens.tolist() if token not in special]
        for sample, tokens in rows.items()
    }
    for cloud, attacks in notes.guesses.items() if words else ():
        for (replica, attack), by_step in sorted(attacks.items()):
            guessed = {
                step: [[token for token in text if token not in special] for text in texts]
                for step, texts in by_step.items()
            }
            batches = {step: notes.batch(replica, step) for step in guessed}
            judged = set[int]().union(*batches.values())
            truth = {
                step: [words[i] for i in sorted(ids)]
                for step, ids in batches.items()
                if ids and ids <= words.keys()
            }
            others = [tokens for sample, tokens in words.items() if sample not in judged]
            if (found := score(attack, guessed, truth, others)) is not None:
                results.setdefault(cloud, {})[f"{attack} of replica {replica}"] = found
    scores = list(entries(results))
    best = max(scores, key=lambda entry: entry["tokens"], default={})
    orders = [entry["order"] for entry in scores if "order" in entry]
    return {
        "averaging_token_recovery": best.get("tokens"),
        "averaging_token_recovery_baseline": best.get("baseline"),
        "averaging_order_recovery": max(orders, default=None),
        "leakage": {"averaging": results},
    }


if __name__ == "__main__":
    try:
        main(meter=AveragesMeter(keep=True))
    except XcloudError as error:
        sys.exit(f"xcloud: {error}")
