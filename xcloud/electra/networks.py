"""ELECTRA's two networks: a generator that fills masked tokens, a discriminator that detects
replaced ones (Clark et al., arXiv:2003.10555). No optimizer, no data, no messages.

Differences: the networks share no embeddings, because only ids pass between them; special ids are
never sampled, and the outer bos and eos carry no loss.

Shapes: B samples, R rows (tokens, bos and eos included), M masked rows, C rows without the outer
bos and eos, V token ids, H features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.comm.ids import CorruptedTexts
from xcloud.contracts.model import TokenIds
from xcloud.models.encoder import Encoder, EncoderConfig, Packing

SAMPLED_TOGETHER = 2**24  # probabilities held at once during sampling


class Corrupted(NamedTuple):
    """loss: mean cross-entropy of the masked tokens, with graph. A masked token whose original id
    was sampled does not count as replaced."""

    ids_R: Tensor
    replaced_R: Tensor
    loss: Tensor


def corrupt(
    generator: Encoder,
    ids_R: Tensor,
    packing: Packing,
    masked_M: Tensor,
    special: TokenIds,
    temperature: float,
    draw: torch.Generator,
) -> Corrupted:
    """Mask these rows, sample replacements from the generator, and compute its loss.

    ids_R, masked_M: on the generator's device. draw: a CPU generator, so that random numbers do
    not depend on the device.
    """
    truth_M = ids_R[masked_M]
    hidden_RH = generator(ids_R.index_fill(0, masked_M, special.mask), packing)
    # The head is applied to masked rows only.
    scores_MV = generator.logits(hidden_RH.index_select(0, masked_M)).float()
    loss = F.cross_entropy(scores_MV, truth_M)
    words_M = sample_words(scores_MV.detach(), special, temperature, draw)
    corrupted_R = ids_R.index_copy(0, masked_M, words_M)
    return Corrupted(corrupted_R, corrupted_R != ids_R, loss)


@torch.no_grad()
def sample_words(
    scores_MV: Tensor, special: TokenIds, temperature: float, draw: torch.Generator
) -> Tensor:
    """Sample one id per row from softmax(scores / temperature), int64 [M], by inverse CDF: one
    random number per row. Special ids, and ids beyond the tokenizer's, are never drawn.
    """
    forbidden_V = torch.arange(scores_MV.shape[1], device=scores_MV.device) >= special.size
    forbidden_V[[special.pad, special.bos, special.eos, special.mask]] = True
    random_M = torch.rand(len(scores_MV), generator=draw).to(scores_MV.device)
    drawn = []
    rows = max(1, SAMPLED_TOGETHER // scores_MV.shape[1])
    for first in range(0, len(scores_MV), rows):
        scores, random = scores_MV[first : first + rows], random_M[first : first + rows]
        chances = (scores / temperature).masked_fill(forbidden_V, -torch.inf).softmax(1)
        sums = chances.cumsum(1)
        # Slightly below the total, or rounding could step past the last allowed id.
        wanted = (random * (1 - 1e-6))[:, None] * sums[:, -1:]
        drawn.append(torch.searchsorted(sums, wanted, right=True)[:, 0])
    return torch.cat(drawn)


class Discriminator(nn.Module):
    """Encoder without a masked-language head, and a score per token; positive means replaced.

    score = w . gelu(dense(x)) + b
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config, head=False)
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.score = nn.Linear(config.hidden, 1)
        for layer in (self.dense, self.score):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, ids_R: Tensor, packing: Packing) -> Tensor:
        """[R] -> [R]."""
        scores: Tensor = self.score(F.gelu(self.dense(self.encoder(ids_R, packing))))[:, 0]
        return scores


def detect_replaced(
    discriminator: Discriminator, texts: CorruptedTexts, special: TokenIds
) -> tuple[Tensor, list[int]]:
    """Of received tokens, whose outer bos and eos are added back: the loss, summed, with graph,
    and true positives, false positives and false negatives. A token counts as detected if its
    score is positive."""
    ids_C, counts_B, replaced_C = texts
    ids_R, inner_C = with_ends(ids_C, counts_B, special)
    scores_C = discriminator(ids_R, Packing(counts_B + 2)).index_select(0, inner_C).float()
    loss = F.binary_cross_entropy_with_logits(scores_C, replaced_C.float(), reduction="sum")
    detected_C = scores_C.detach() > 0
    hits, false_alarms = detected_C & replaced_C, detected_C & ~replaced_C
    misses = ~detected_C & replaced_C
    return loss, torch.stack((hits.sum(), false_alarms.sum(), misses.sum())).tolist()


def inner_rows(counts_B: Tensor) -> Tensor:
    """Rows that are neither first nor last in their sample, int64 [C]. counts_B: with bos, eos."""
    ends = counts_B.cumsum(0)
    is_inner = torch.ones(int(ends[-1]), dtype=torch.bool, device=counts_B.device)
    is_inner[ends - 1] = False
    is_inner[ends - counts_B] = False
    return is_inner.nonzero()[:, 0]


def with_ends(ids_C: Tensor, counts_B: Tensor, special: TokenIds) -> tuple[Tensor, Tensor]:
    """Add bos and eos around each sample: ids [R], and the new rows of the tokens [C]."""
    inner_C = inner_rows(counts_B + 2)
    ids_R = ids_C.new_full((len(ids_C) + 2 * len(counts_B),), special.eos)
    ids_R[(counts_B + 2).cumsum(0) - counts_B - 2] = special.bos
    ids_R[inner_C] = ids_C
    return ids_R, inner_C
