"""The embedded Spanish-English corpus: sentence pairs made by a seeded grammar, no download.

The English follows from the Spanish by rule: a silent subject is never a third person, "su" is
the subject's, "lo" is a person after verbs of people and a thing after others, an imperfect is
"used to", and so on; so BLEU measures the model and not the corpus. The grammar is in demo/.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from xcloud.checks import check_int
from xcloud.errors import ConfigError
from xcloud.tasks.corpus.demo import feelings, joined, nested, sentences, states
from xcloud.tasks.corpus.demo.phrases import Dice
from xcloud.tasks.corpus.text import Parallel, Rows
from xcloud.tasks.task import Split

MAX_PAIRS = 200_000
WORDS = range(4, 26)

# The kinds of sentences and how often each is tried.
KINDS: tuple[tuple[Callable[[Dice], tuple[str, str]], float], ...] = (
    (sentences.statement, 20.0), (sentences.helped, 8.0), (sentences.question, 6.0),
    (sentences.open_question, 6.0), (sentences.giving, 5.0), (sentences.command, 5.0),
    (sentences.doing_it, 2.5), (sentences.object_in_place, 3.0),
    (sentences.routine_of_things, 2.0), (sentences.since, 2.0), (sentences.passive, 2.5),
    (feelings.liking, 5.0), (feelings.pain, 1.5), (states.description, 6.0),
    (states.copula_question, 3.0), (states.identity, 5.0), (states.existence, 3.0),
    (states.exclamation, 1.5), (states.time_and_weather, 2.0), (states.quantity, 3.0),
    (states.feeling, 2.0), (joined.because, 6.0), (joined.when_future, 4.0),
    (joined.unreal, 4.0), (joined.meanwhile, 4.0), (joined.purpose, 3.5), (joined.and_it, 3.5),
    (joined.conjoined, 3.5), (nested.reported, 5.0), (nested.indirect_question, 3.0),
    (nested.wanting, 3.0), (nested.relative, 5.0), (nested.comparison, 4.0),
    (nested.evaluation, 3.0),
)  # fmt: skip


@dataclass(frozen=True)
class DemoGrammar:
    """`num_pairs` different sentence pairs of 4 to 25 words, train, dev and test together.

    No Spanish and no English sentence occurs twice, so the splits share none. The same seed gives
    the same pairs on every machine; the experiment's seed does not change them.
    """

    num_pairs: int = 24_000
    seed: int = 7
    num_dev: int = 1_000
    num_test: int = 1_000

    def __post_init__(self) -> None:
        check_int("task.num_dev", self.num_dev, 1)
        check_int("task.num_test", self.num_test, 1)
        check_int("task.num_pairs", self.num_pairs, self.num_dev + self.num_test + 1, MAX_PAIRS)
        check_int("task.corpus_seed", self.seed, 0)

    def describe(self) -> str:
        return "demo grammar"

    def check(self, source: str, target: str) -> None:
        if {source, target} != {"es", "en"}:
            raise ConfigError(
                f"the demo grammar has es and en only, got source={source!r}, target={target!r}; "
                "for other languages take profile=files and give task.path"
            )

    def read(self, source: str, target: str, visible: frozenset[str]) -> Parallel:
        self.check(source, target)
        pairs = demo_pairs(self.num_pairs, self.seed)
        sides = {"es": [es for es, _ in pairs], "en": [en for _, en in pairs]}
        ends = (self.num_pairs - self.num_dev - self.num_test, self.num_pairs - self.num_test)
        slices: dict[Split, slice] = {
            "train": slice(0, ends[0]), "dev": slice(*ends), "test": slice(ends[1], None)
        }  # fmt: skip
        splits = {
            split: Rows(len(pairs[part]), {lang: sides[lang][part] for lang in visible})
            for split, part in slices.items()
        }
        # The text is public, so its digest may show that two clouds run the same grammar.
        digest = hashlib.sha256("\n".join(es + "\t" + en for es, en in pairs).encode())
        agreed = {"demo_grammar": digest.hexdigest(), "seed": self.seed}
        return Parallel(self.describe(), splits, [f"seed {self.seed}"], agreed)


def demo_pairs(num_pairs: int, seed: int) -> tuple[tuple[str, str], ...]:
    """(Spanish, English), all different on both sides, in an order without meaning."""
    dice, seen = Dice(seed), set[str]()
    pairs: list[tuple[str, str]] = []
    while len(pairs) < num_pairs:
        es, en = dice.weighted(KINDS)(dice)
        if es in seen or en in seen:
            continue
        if len(es.split()) in WORDS and len(en.split()) in WORDS:
            seen.update((es, en))
            pairs.append((es, en))
    return tuple(pairs)
