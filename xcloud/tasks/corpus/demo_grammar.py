"""The sentence pairs of xcloud/demo_corpus as a translation corpus: no download, no files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError
from xcloud.contracts.task import Split
from xcloud.demo_corpus import MAX_PAIRS
from xcloud.demo_corpus import pairs as demo_pairs
from xcloud.tasks.corpus.text import Parallel, Rows


@dataclass(frozen=True)
class DemoGrammar:
    """`num_pairs` different sentence pairs of 4 to 25 words, train, dev and test together.

    No sentence occurs twice in either language, so the splits are disjoint. The same seed gives
    the same pairs on every machine, whatever the experiment's seed.

    num_monolingual: further sentences in each language that have no translation in the other and
    occur in no pair: texts for tokenizers and for backbones to be pretrained on.
    """

    num_pairs: int = 24_000
    seed: int = 7
    num_dev: int = 1_000
    num_test: int = 1_000
    num_monolingual: int = 0

    def __post_init__(self) -> None:
        check_int("task.num_dev", self.num_dev, 1)
        check_int("task.num_test", self.num_test, 1)
        check_int("task.num_pairs", self.num_pairs, self.num_dev + self.num_test + 1, MAX_PAIRS)
        most = (MAX_PAIRS - self.num_pairs) // 2
        check_int("task.num_monolingual", self.num_monolingual, 0, most)
        check_int("task.corpus_seed", self.seed, 0)

    def describe(self) -> str:
        return "demo grammar"

    def check(self, source: str, target: str) -> None:
        if {source, target} != {"es", "en"}:
            raise ConfigError(
                f"the demo grammar has es and en only, got source={source!r}, target={target!r}; "
                "for other languages set profile=files and task.path"
            )

    def read(self, source: str, target: str, visible: frozenset[str]) -> Parallel:
        self.check(source, target)
        generated = demo_pairs(self.num_pairs + 2 * self.num_monolingual, self.seed)
        pairs, others = generated[: self.num_pairs], generated[self.num_pairs :]
        # Of the other pairs one half lends its Spanish, the other half its English.
        alone = {
            "es": [es for es, _ in others[: self.num_monolingual]],
            "en": [en for _, en in others[self.num_monolingual :]],
        }
        sides = {"es": [es for es, _ in pairs], "en": [en for _, en in pairs]}
        ends = (self.num_pairs - self.num_dev - self.num_test, self.num_pairs - self.num_test)
        slices: dict[Split, slice] = {
            "train": slice(0, ends[0]), "dev": slice(*ends), "test": slice(ends[1], None)
        }  # fmt: skip
        splits = {
            split: Rows(len(pairs[part]), {lang: sides[lang][part] for lang in visible})
            for split, part in slices.items()
        }
        # The text is public, so a digest of it can show that all clouds run the same grammar.
        digest = hashlib.sha256("\n".join(es + "\t" + en for es, en in generated).encode())
        agreed = {"demo_grammar": digest.hexdigest(), "seed": self.seed}
        remarks = [f"seed {self.seed}"]
        if self.num_monolingual:
            remarks.insert(0, f"{self.num_monolingual:,} further sentences in each language")
        monolingual = {language: alone[language] for language in visible}
        return Parallel(self.describe(), splits, remarks, agreed, monolingual)
