"""Where an encoder is cut, and how: the settings. The parts themselves are in low_rank_cut.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xcloud.checks import check_choice, check_int
from xcloud.errors import ConfigError

METHODS = ("svd", "identity", "pca", "orthogonal")
LINEARS = ("feed_forward_output", "attention_output")
ANCHORS = ("none", "mean", "position")
USUAL_ANCHOR = {"svd": "none", "identity": "none", "pca": "mean", "orthogonal": "position"}


@dataclass(frozen=True)
class Split:
    """Where the encoder is cut, and what is done so that only `rank` features of a row cross.

    layer: block that is cut, from 0. null: the unsplit model, the reference: rows cross whole
        behind block 0, and nothing below acts.
    rank: features that cross; null: all of them cross behind the block, and nothing is lost.
    method:
      svd: one linear layer of the block, W = U S V by truncated SVD, all three trained, cut
        between S and V; the skip connection around that sub-layer is gone: its rows stay behind.
        As published: Shi et al., arXiv:2211.16703; Pan et al., ZTE 2023(4), section 2.2.2.
      identity: the block stays whole; its output h crosses as E h and goes on as D E h, E with
        random orthonormal rows, D = E' at the start: a low-rank identity path across the cut,
        after ResBM, arXiv:2604.11947. Difference: linear, nothing beside that path.
      pca: as identity, but E and D are the principal components of h.
      orthogonal: as pca, and E and D stay orthonormal while they are trained; the mean of h at
        each position is taken out before and put back behind, after MAPL, arXiv:2606.05484.
        Difference: MAPL's anchor is that of the token, which the other cloud must not know.
      LoRA's down projection (section 1.2 of the paper) is none of them: in y = W x + B A x the
      other cloud needs W x besides A x, so x must cross whole, or W be given up. Given up, it is
      the cut of svd with weights that know nothing at the start.
    linear: which W (svd only): the last of the feed-forward sub-layer, or that of attention.
    anchor: what is taken out before E and put back behind D: none, mean (of h),
        position (its mean at each position); null = none for identity, mean for pca, position for
        orthogonal. Trained behind D.
    whiten: scale the features that cross to variance 1, so that one scale fits all
        of them when they are quantised.
    freeze_bottom: all before the cut, V or E included, keeps its weights, without dropout: then no
        gradient comes back over the border.
    calibration: the text that basis and anchor are measured on. own: the owner's training text;
        the other cloud gets D and the anchor in one message before the first step (4 K H bytes,
        and 4 H or 4 P H), which tells it the second moments of h. public: text that every cloud
        has; nothing crosses, and the basis fits less well.
    calibration_texts: how many of these texts.
    calibration_pairs: whether public texts are joined to pairs, for a task of pairs. The owner's
        own samples are what they are.
    head_rank: features of what crosses to the head where that is a stage of its own; null = all.
        The bottleneck is part of the model whatever the number of stages.
    """

    layer: int | None
    rank: int | None = 8
    method: Literal["svd", "identity", "pca", "orthogonal"] = "svd"
    linear: Literal["feed_forward_output", "attention_output"] = "feed_forward_output"
    anchor: Literal["none", "mean", "position"] | None = None
    whiten: bool = False
    freeze_bottom: bool = False
    calibration: Literal["own", "public"] = "own"
    calibration_texts: int = 2000
    calibration_pairs: bool = False
    head_rank: int | None = None

    def __post_init__(self) -> None:
        if self.layer is not None:
            check_int("split.layer", self.layer, 0)
        for name in ("rank", "head_rank"):
            if getattr(self, name) is not None:
                check_int(f"split.{name}", getattr(self, name), 1)
        check_choice("split.method", self.method, METHODS)
        check_choice("split.linear", self.linear, LINEARS)
        check_choice("split.anchor", self.anchor, (None, *ANCHORS))
        for name in ("whiten", "freeze_bottom", "calibration_pairs"):
            check_choice(f"split.{name}", getattr(self, name), (True, False))
        check_choice("split.calibration", self.calibration, ("own", "public"))
        check_int("split.calibration_texts", self.calibration_texts, 1)
        if self.method == "svd":
            self._refuse(
                f"belongs to the methods {', '.join(METHODS[1:])}; svd has none: leave it out, or "
                "choose one of them",
                anchor=(None, "none"), whiten=(False,), calibration=("own",),
            )  # fmt: skip
        elif self.linear != "feed_forward_output":
            raise ConfigError(
                "split.linear says which linear layer split.method=svd replaces; "
                f"{self.method} cuts behind the whole block: leave it out"
            )
        if self.whiten and self.method in ("identity", "orthogonal"):
            raise ConfigError(
                f"split.whiten scales the principal components of split.method=pca, not "
                f"{self.method}"
            )

        if self.rank is None:
            self._refuse(
                "does nothing where all features cross (split.rank=null): leave it out",
                linear=("feed_forward_output",), anchor=(None,), whiten=(False,),
                calibration=("own",),
            )  # fmt: skip

    def _refuse(self, why: str, **usual: tuple[object, ...]) -> None:
        """Raise ConfigError for a setting that would be accepted and ignored."""
        for name, allowed in usual.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"split.{name} {why}")

    @property
    def is_low_rank(self) -> bool:
        """Whether anything is left out at the cut."""
        return self.layer is not None and self.rank is not None

    @property
    def block(self) -> int:
        """The block that the cut is in, or behind."""
        return self.layer or 0

    @property
    def anchor_kind(self) -> str:
        return self.anchor or USUAL_ANCHOR[self.method]

    @property
    def is_measured(self) -> bool:
        """Whether a basis or an anchor is measured before training."""
        if not self.is_low_rank:
            return False
        return self.method in ("pca", "orthogonal") or self.anchor_kind != "none"

    @property
    def needs_public_text(self) -> bool:
        return self.is_measured and self.calibration == "public"

    @property
    def hands_over(self) -> bool:
        """Whether the owner measures, and tells the other cloud its half."""
        return self.is_measured and self.calibration == "own"

    @property
    def kept_head_rank(self) -> int | None:
        return self.head_rank if self.layer is not None else None

    def describe(self) -> str:
        if self.layer is None:
            return "unsplit (split.layer=null: nothing else of split acts)"
        if self.rank is None:
            return f"cut behind block {self.layer}, full width"
        return f"cut in block {self.layer}, rank {self.rank} by {self.method}"


def num_places(anchor: str, max_length: int) -> int:
    return {"none": 0, "mean": 1, "position": max_length}[anchor]


def check_rank(split: Split, hidden: int) -> None:
    """Raise ConfigError when more features than there are would cross."""
    if split.is_low_rank:
        assert split.rank is not None
        if split.rank > hidden:
            raise ConfigError(
                f"split.rank is {split.rank}, but the encoder has {hidden} features; give at most "
                f"{hidden}, or null to let all cross"
            )
    if split.kept_head_rank is not None and split.kept_head_rank > hidden:
        raise ConfigError(
            f"split.head_rank is {split.head_rank}, but the encoder has {hidden} features; give "
            f"at most {hidden}, or null"
        )
