"""Documents of any length into samples of at most a given length. Knows no tokenizer.

Shapes: B samples, S positions, T all tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from xcloud.contracts.model import NO_LABEL, NO_TOKEN
from xcloud.tasks.causal_tokenizer import Document

OPEN = 64  # samples that a document is tried in; more fill little better


def pieces_of(documents: Iterable[Document], max_length: int, split: bool) -> Iterator[Document]:
    """Documents of at most max_length tokens with something to guess. split: a longer one becomes
    several; else its end is lost, as a chat's second half is no chat."""
    for ids, learned in documents:
        starts = range(0, len(ids) if split else 1, max_length)
        for start in starts:
            part = Document(ids[start : start + max_length], learned[start : start + max_length])
            if any(part.learned[1:]):
                yield part


def pack(documents: Iterable[Document], max_length: int) -> list[list[Document]]:
    """Samples of whole documents: each goes into the first of the last OPEN samples that has room.
    The same for the same documents in every cloud."""
    samples: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        size = len(document.ids)
        first = max(0, len(samples) - OPEN)
        place = next((i for i in range(first, len(samples)) if room[i] >= size), None)
        if place is None:
            samples.append([])
            room.append(max_length)
            place = len(samples) - 1
        samples[place].append(document)
        room[place] -= size
    return samples


class PackedTable:
    """Samples as flat tensors; only what the `fields` (text, types, label) need is kept."""

    def __init__(self, samples: Sequence[Sequence[Document]], fields: frozenset[str]) -> None:
        lengths = torch.tensor([sum(len(d.ids) for d in documents) for documents in samples])
        self._offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        whole = [(n, d) for documents in samples for n, d in enumerate(documents)]
        made = {
            "text": lambda: [token for _, d in whole for token in d.ids],
            "types": lambda: [n for n, d in whole for _ in d.ids],
            "label": lambda: [label for _, d in whole for label in _labels(d)],
        }
        self._flat_T = {
            name: torch.tensor(made[name](), dtype=torch.int32) for name in sorted(fields)
        }

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[-1])

    def padded(self, ids: Tensor) -> dict[str, Tensor]:
        """int64 [B, S] of each kept field."""
        if not len(ids):
            return {name: torch.zeros((0, 1), dtype=torch.int64) for name in self._flat_T}
        lengths_B = self._offsets[ids + 1] - self._offsets[ids]
        positions_S = torch.arange(int(lengths_B.max()))
        inside_BS = positions_S < lengths_B[:, None]
        index_BS = (self._offsets[ids][:, None] + positions_S) * inside_BS
        beyond = {"text": NO_TOKEN, "types": 0, "label": NO_LABEL}
        return {
            name: torch.where(inside_BS, flat[index_BS].long(), beyond[name])
            for name, flat in self._flat_T.items()
        }

    def of(self, name: str, sample: int) -> list[int]:
        """A field of one sample."""
        start, end = self._offsets[sample : sample + 2].tolist()
        values: list[int] = self._flat_T[name][start:end].tolist()
        return values

    def num_guessed(self, ids: Tensor) -> int:
        return int((self.padded(ids)["label"] != NO_LABEL).sum())


def _labels(document: Document) -> Iterator[int]:
    """At each place the token that follows, if it is to be guessed."""
    for token, learned in zip(document.ids[1:], document.learned[1:], strict=True):
        yield token if learned else NO_LABEL
    yield NO_LABEL
