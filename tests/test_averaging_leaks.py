"""From what replicas gave to an averaging to the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from experiments.gradient_leaks.gradient_attacks import Victim, score
from experiments.gradient_leaks.meter import AveragesMeter, AveragesObserver
from tests.causal_models import WORDS as NUM_WORDS
from tests.gradient_texts import TEXTS, as_batch, causal, gradients, run
from tests.pipelines import in_threads
from tests.replicas import connected
from xcloud.comm.compressor import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.contracts.model import NO_TOKEN
from xcloud.features.leak_meter.observers import Observer
from xcloud.features.replicas.averaging import AllToAll, ReplicaLinks, Terms
from xcloud.models.causal_network import Lora

BOS = 1
LAST_STEP = 5


def watched(
    meter: AveragesMeter, replica: int, victim: Victim
) -> tuple[Observer, AveragesObserver]:
    """Of one of two replicas, each a rank in a cloud of its own."""
    fields = {"text": (NO_TOKEN, (BOS,))}
    observer = Observer(
        replica,
        f"cloud {replica}",
        2,
        LAST_STEP - meter.last_steps + 1,
        100,
        fields,
        {"text"},
        replica,
    )
    return observer, meter.averaged(observer, victim, 1)


def test_text_is_read_from_an_averaged_gradient_without_a_word_of_it(tmp_path: Path) -> None:
    stage = causal("llama", tmp_path, Lora(r=8))
    meter = AveragesMeter()
    victim = Victim(stage, lambda ids: run(stage, ids), torch.arange(NUM_WORDS), 6)
    batch = as_batch([[BOS, *TEXTS[0]], TEXTS[1]])
    batches = [as_batch([[30, 4, 31]]) | {"ids": torch.tensor([9])}, batch]
    changes = gradients([stage], batch)
    both = [watched(meter, replica, victim) for replica in (0, 1)]
    for (observer, averaged), own in zip(both, batches, strict=True):
        observer.batch(LAST_STEP, own)
        averaged.batch(LAST_STEP, own["ids"])
    attacker = both[0][1]
    attacker.received(LAST_STEP, 1, {f"0.{name}": change for name, change in changes.items()})
    before = [parameter.clone() for parameter in stage.parameters()]
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(1.0)  # training goes on; the attack is on the weights of the step
    for observer, averaged in both:
        averaged.finish(tmp_path)
        observer.write(tmp_path)
    found = meter.measure(tmp_path)
    entry = found["leakage"]["averaging"]["cloud 0"]["texts of replica 1"]

    # The last word of each text reaches no loss: 9 of 11 (and 20, 21), which another text has.
    assert entry["tokens"] == found["averaging_token_recovery"] > 0.9
    assert found["averaging_token_recovery_baseline"] < 0.9
    assert found["averaging_order_recovery"] == pytest.approx(2 * 3 / (3 + 5), abs=0.01)
    assert found["token_recovery"] is None and len(found) == 9
    assert all(torch.equal(p, b + 1) for p, b in zip(stage.parameters(), before, strict=True))


def test_only_the_last_averagings_are_kept_and_only_where_their_texts_are_known() -> None:
    stage = torch.nn.Embedding(8, 2)
    victim = Victim(stage, stage, torch.arange(8), 4, covers=2)
    _, attacker = watched(AveragesMeter(last_steps=3, averaging_steps=2), 0, victim)
    for step in range(1, LAST_STEP + 1):  # texts are noted from step 3 on, so steps 4 and 5 fit
        attacker.received(step, 1, {"0.weight": torch.ones(8, 2)})

    assert {guess["step"] for guess in attacker.guesses()} == {4, 5}


def test_an_averager_tells_what_others_contribute() -> None:
    told: list[tuple[int, int, dict[str, list[float]]]] = []

    def take(links: ReplicaLinks) -> None:
        codec = TensorCodec({"a": torch.Size([2])}, lambda name, shape: Chain(), 1, False)
        watch = None
        if links.replica == 0:
            watch = lambda step, replica, tensors: told.append(  # noqa: E731
                (step, replica, {name: tensor.tolist() for name, tensor in tensors.items()})
            )
        averager = AllToAll(links, codec, Terms(watch=watch))
        averager.start(7, [torch.full((2,), float(links.replica))])
        averager.finish(7)

    in_threads([lambda own=own: take(own) for own in connected(3)])

    assert told == [(7, 1, {"a": [1.0, 1.0]}), (7, 2, {"a": [2.0, 2.0]})]


def test_scores_are_means_over_the_steps_that_can_be_judged() -> None:
    truth: dict[int, Sequence[Sequence[int]]] = {1: [[4, 5, 6]], 2: [[7, 8]]}
    guesses: dict[int, Sequence[Sequence[int]]] = {1: [[4, 5, 6]], 2: [[]], 3: [[1]]}

    assert score("texts", guesses, truth, [[4, 4, 4, 5, 9]]) == {
        "tokens": 0.5, "baseline": pytest.approx((4 / 6 + 0) / 2, abs=1e-4), "order": 0.5,
        "num_updates": 2,
    }  # fmt: skip
    assert score("texts", {3: [[1]]}, truth, []) is None
