"""Public English text as token ids, for what every cloud must compute identically without seeing
private text: a pretrained start, the basis of a cut. Reads no private corpus.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import TokenIds
from xcloud.demo_corpus import public_sentences
from xcloud.tasks.classification import public_tokenizer
from xcloud.tasks.corpus.files import read_lines
from xcloud.tasks.tokenizer import Tokenizer, TokenizerChoice


@dataclass(frozen=True)
class PublicText:
    """Sentences of the demo grammar, or the lines of a file that every cloud has.

    tokenizer: same as the task's and the encoder's. path: one text per line, UTF-8, may be .gz;
    null: the demo grammar. seed: selects the sentences or lines.
    """

    tokenizer: TokenizerChoice
    path: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("public_text.seed", self.seed, 0)
        if self.path is not None and (not isinstance(self.path, str) or not self.path):
            raise ConfigError(f"public_text.path must be a file or null, got {self.path!r}")

    def describe(self) -> str:
        return "public sentences of the demo grammar" if self.path is None else self.path

    def token_ids(self, cache_dir: Path) -> TokenIds:
        return self._tokenizer(cache_dir).token_ids

    def sentences(self, num: int, cache_dir: Path) -> Sequence[Sequence[int]]:
        return self._tokenizer(cache_dir).encode(self._texts(num))

    def _tokenizer(self, cache_dir: Path) -> Tokenizer:
        return public_tokenizer(self.tokenizer, str(cache_dir))

    def _texts(self, num: int) -> list[str]:
        if self.path is None:
            return public_sentences(num, self.seed)
        try:
            found = [line.strip() for line in read_lines(Path(self.path).expanduser())]
        except DataError as error:
            raise DataError(
                f"public_text.path {error}; give a UTF-8 file with one text per line, the same in "
                "every cloud, or null for the demo grammar"
            ) from error
        lines = [line for line in found if line]
        if len(lines) < num:
            raise DataError(
                f"public_text.path {self.path} has {len(lines)} lines, but {num} are needed: "
                "lower model.split.calibration_texts (twice as many lines are read with "
                "calibration_pairs) or the backbone's num_texts, or use a longer file"
            )
        return random.Random(self.seed).sample(lines, num)
