"""Greedy and beam search. Independent of the scoring network.

Shapes: N live hypotheses, B unfinished sentences, K beams (N = B*K), V token ids, L tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from xcloud.base.settings import NotNegativeFloat, Positive, settings
from xcloud.contracts.model import TokenIds


class StepDecoder(Protocol):
    """Scores the next token of many hypotheses at once and caches their past."""

    def step(self, tokens_N: Tensor) -> Tensor:
        """Append one token to each hypothesis; return next-token scores [N, V], a new tensor."""

    def keep(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        """Hypothesis i continues the former hypothesis rows[i]; sentence j is the former sentence
        sentences[j] (None: unchanged). All sentences have equally many, adjacent hypotheses.
        """


@settings("decoding")
class Limits:
    """A sentence ends after at most length_ratio * (source tokens) + length_extra tokens. Else a
    half-trained network rambles on to the task's maximum length.
    """

    length_ratio: NotNegativeFloat = 2.0
    length_extra: Positive = 10

    def limits(self, source_counts: Tensor, longest: int) -> Tensor:
        """Maximum output tokens per sentence, eos included, int64 [B]; at most `longest`."""
        wanted = (source_counts * self.length_ratio).long() + self.length_extra
        return wanted.clamp(max=longest)


@settings("Greedy")
class Greedy(Limits):
    """The most probable token at each step."""

    def search(self, decoder: StepDecoder, limits: Tensor, ids: TokenIds) -> list[list[int]]:
        """Token ids of each sentence, without bos and eos. limits: int64 [B]."""
        num_sentences, longest = len(limits), int(limits.max())
        written = limits.new_full((num_sentences, longest), ids.eos)
        alive = torch.arange(num_sentences, device=limits.device)
        tokens = torch.full_like(alive, ids.bos)
        for position in range(longest):
            tokens = _without_special(decoder.step(tokens), ids).argmax(1)
            written[alive, position] = tokens
            going = ((tokens != ids.eos) & (limits[alive] > position + 1)).nonzero()[:, 0]
            if not len(going):
                break
            if len(going) < len(alive):
                decoder.keep(going, going)
                alive, tokens = alive[going], tokens[going]
        return _texts(written, ids.eos)


@settings("Beam")
class Beam(Limits):
    """Beam search of width `size`; score = log-probability / length ** length_penalty.

    A sentence is done once `size` hypotheses have ended and no live one is better, or no live one
    can still win. The bookkeeping (2K candidates, of which at most K end) is that of fairseq's
    SequenceGenerator, which stops at `size` ends regardless. Beam(size=1) is Greedy.
    """

    size: Positive = 4
    length_penalty: NotNegativeFloat = 1.0

    def search(self, decoder: StepDecoder, limits: Tensor, ids: TokenIds) -> list[list[int]]:
        beams, longest = self.size, int(limits.max())
        alive = torch.arange(len(limits), device=limits.device)
        best = torch.full(limits.shape, -torch.inf, device=limits.device)
        best_written = limits.new_full((len(limits), longest), ids.eos)
        num_ended = torch.zeros_like(limits)

        decoder.keep(alive.repeat_interleave(beams))
        tokens_N = limits.new_full((len(limits) * beams,), ids.bos)
        written_BKL = limits.new_full((len(limits), beams, longest), ids.eos)
        # All beams start equal; only one of them may be continued.
        total_BK = torch.full((len(limits), beams), -torch.inf, device=limits.device)
        total_BK[:, 0] = 0.0

        for position in range(longest):
            scores_NV = _without_special(decoder.step(tokens_N), ids).float().log_softmax(1)
            num_words = scores_NV.shape[1]
            grown = total_BK[:, :, None] + scores_NV.view(len(alive), beams, num_words)
            candidates, flat = grown.flatten(1).topk(2 * beams, dim=1)
            parent, word = flat // num_words, flat % num_words
            ends = word == ids.eos

            # Ended hypotheses, and all at the limit, compete to be the sentence's best.
            at_limit = limits[alive] == position + 1
            ended = (ends | at_limit[:, None])[:, :beams] & candidates[:, :beams].isfinite()
            scaled = candidates[:, :beams] / (position + 1) ** self.length_penalty
            score, winner = scaled.masked_fill(~ended, -torch.inf).max(1, keepdim=True)
            score, better = score[:, 0], score[:, 0] > best[alive]
            line = written_BKL[torch.arange(len(alive)), parent.gather(1, winner)[:, 0]]
            line[:, position] = word.gather(1, winner)[:, 0]
            best_written[alive[better]] = line[better]
            best[alive] = torch.maximum(best[alive], score)
            num_ended[alive] += ended.sum(1)

            # At most K of the 2K candidates end, so K remain.
            total_BK, pick = candidates.masked_fill(ends, -torch.inf).topk(beams, dim=1)
            word, parent = word.gather(1, pick), parent.gather(1, pick)
            now = total_BK[:, 0] / (position + 1) ** self.length_penalty
            reachable = total_BK[:, 0] / limits[alive] ** self.length_penalty
            enough = (num_ended[alive] >= beams) & (best[alive] >= now)
            done = at_limit | enough | (best[alive] >= reachable)
            going = (~done).nonzero()[:, 0]
            if not len(going):
                break
            rows_BK = going[:, None] * beams + parent[going]
            decoder.keep(rows_BK.flatten(), going if len(going) < len(alive) else None)
            alive, total_BK, tokens_N = alive[going], total_BK[going], word[going].flatten()
            written_BKL = written_BKL.flatten(0, 1)[rows_BK]
            written_BKL[:, :, position] = word[going]
        return _texts(best_written, ids.eos)


Search = Greedy | Beam


def _without_special(scores_NV: Tensor, ids: TokenIds) -> Tensor:
    """Exclude pad, bos and mask, which never occur in a text. In place."""
    scores_NV[:, sorted({ids.pad, ids.bos, ids.mask} - {ids.eos})] = -torch.inf
    return scores_NV


def _texts(written: Tensor, eos: int) -> list[list[int]]:
    return [line[: line.index(eos)] if eos in line else line for line in written.tolist()]
