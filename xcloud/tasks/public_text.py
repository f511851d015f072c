"""Public English text as token ids, for what every cloud must compute identically without seeing
private text: a pretrained start, the basis of a cut. Reads no private corpus.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from xcloud.base.errors import DataError
from xcloud.base.project import in_project
from xcloud.base.settings import NotNegative, settings
from xcloud.contracts.model import TokenIds
from xcloud.demo_corpus import public_sentences
from xcloud.tasks.corpus.folder import read_lines
from xcloud.tasks.corpus.rows import Text
from xcloud.tasks.tokenizer import Tokenizer, TokenizerChoice

TOKENIZER_TEXTS, TOKENIZER_SEED = 10_000, 0


def public_tokenizer(choice: TokenizerChoice, cache_dir: str) -> Tokenizer:
    """The tokenizer, trained on public sentences if needed."""
    texts = public_sentences(TOKENIZER_TEXTS, TOKENIZER_SEED) if choice.is_trained else ()
    return choice.prepare(texts, in_project(cache_dir))


@settings("public_text")
class PublicText:
    """Sentences of the demo grammar, or the lines of a file that every cloud has.

    tokenizer: same as the task's and the encoder's. path: one text per line, UTF-8, may be .gz;
    null: the demo grammar. seed: selects the sentences or lines.
    """

    tokenizer: TokenizerChoice
    path: Text | None = None
    seed: NotNegative = 0

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
            texts = [line.strip() for line in read_lines(Path(self.path).expanduser())]
        except DataError as error:
            raise DataError(
                f"public_text.path {error}; give a UTF-8 file with one text per line, the same in "
                "every cloud, or null for the demo grammar"
            ) from error
        lines = [line for line in texts if line]
        if len(lines) < num:
            raise DataError(
                f"public_text.path {self.path} has {len(lines)} lines, but {num} are needed: "
                "lower model.split.calibration_texts (twice as many lines are read with "
                "calibration_pairs) or the backbone's num_texts, or use a longer file"
            )
        return random.Random(self.seed).sample(lines, num)
