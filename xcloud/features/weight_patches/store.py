"""Where objects with weights lie, how they are called there, and which of them lead to the newest
weights.

An object is stored in pieces, URL/patches/ATTEMPT-STEP-FROM-STAGE-NUMBER-COUNT: FROM is the step
that a patch changes, or "whole" for a snapshot. Where a reader is named, each piece is sealed to
its certificate and signed (line/sealing.py), bound to its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xcloud.base.errors import DataError, SealError
from xcloud.line.keys import Certificate, LineKeys, read_key
from xcloud.line.mailbox import ObjectStore
from xcloud.line.sealing import open_sealed, seal, sealed_bytes

FOLDER = "patches"
PIECE_BYTES = 1 << 28
MAX_BYTES = 1 << 38
"""Of an object, which a follower holds in memory: 100 billion weights of one stage."""
_NAME = re.compile(r"(\d{1,19})-(\d{1,12})-(\d{1,12}|whole)-(\d{1,4})-(\d{1,4})-(\d{1,4})")


class WeightObject(NamedTuple):
    """An object with the weights of a stage. base: the step that it changes; None for a
    snapshot."""

    attempt: int
    step: int
    base: int | None
    stage: int

    def name(self, number: int, count: int) -> str:
        """Return the name of one of its pieces."""
        begins = "whole" if self.base is None else f"{self.base:08}"
        return f"{self.attempt:019}-{self.step:08}-{begins}-{self.stage:04}-{number:04}-{count:04}"

    @property
    def in_words(self) -> str:
        what = "the snapshot" if self.base is None else f"the patch from step {self.base}"
        return f"{what} to step {self.step} of stage {self.stage}"


class Stored(NamedTuple):
    """An object that is there with all its pieces: their names in order, and their bytes."""

    pieces: tuple[str, ...]
    num_bytes: int


Protect = Callable[[bytes, str], bytes]
"""Seals or opens a piece: of its bytes, its name."""


def plain(data: bytes, name: str) -> bytes:
    return data


def sealing(keys: LineKeys, reader: str) -> Protect:
    """Return what seals pieces to the newest certificate of a reader, which may be this cloud."""
    key = read_key(keys.key_file)
    # A policy lists old and new certificates of a cloud while one replaces the other.
    certificate = _certificates(keys, reader)[-1]
    return lambda data, name: seal(data, certificate, key, context=_context(name))


def opening(keys: LineKeys, cloud_of: Callable[[int], str]) -> Protect:
    """Return what opens pieces that were sealed to this cloud by the cloud that holds their stage.

    It raises SealError for any other piece.
    """
    key = read_key(keys.key_file)

    def opened(data: bytes, name: str) -> bytes:
        match = _NAME.fullmatch(name)
        assert match is not None, "it was listed by its name"
        cloud = cloud_of(int(match[4]))
        failure = SealError(f"`peers` in this cloud's policy names no certificate of {cloud}")
        # Any of them may have signed: writers change their key in their own time.
        for sender in _certificates(keys, cloud):
            try:
                return open_sealed(data, key, keys.own, sender, context=_context(name))
            except SealError as error:
                failure = error
        raise failure

    return opened


def _certificates(keys: LineKeys, cloud: str) -> Sequence[Certificate]:
    """Return the certificates of a peer or of this cloud; none of a cloud that is neither."""
    return [keys.own] if cloud == keys.own.cloud else keys.peers.get(cloud, ())


def _context(name: str) -> bytes:
    return f"xcloud weights {name}".encode()


@dataclass(frozen=True)
class PatchStore:
    """The objects of a run in a folder or bucket. protect: seals pieces, or opens them."""

    store: ObjectStore
    protect: Protect

    def put(self, one: WeightObject, data: bytes) -> Stored:
        """Write an object. Raises LinkClosed if that fails for a minute."""
        # Pieces are sealed and sent one by one, so memory beyond the object is that of one piece.
        starts = range(0, len(data), PIECE_BYTES)
        names = [one.name(number, len(starts)) for number in range(len(starts))]
        num_bytes = 0
        for name, start in zip(names, starts, strict=True):
            piece = self.protect(data[start : start + PIECE_BYTES], name)
            self.store.put(f"{FOLDER}/{name}", piece)
            num_bytes += len(piece)
        return Stored(tuple(names), num_bytes)

    def pieces(self) -> Iterator[tuple[WeightObject, int, str, int]]:
        """Yield the pieces that are there: object, how many pieces it has, name and bytes."""
        for name, size in self.store.sizes(FOLDER).items():
            if (match := _NAME.fullmatch(name)) is not None:
                base = None if match[3] == "whole" else int(match[3])
                one = WeightObject(int(match[1]), int(match[2]), base, stage=int(match[4]))
                number, count = int(match[5]), int(match[6])
                # Only names as `name` writes them: "1" and "01" would be one object with two
                # pieces. Nor is a sixth piece of one the whole of it.
                if one.name(number, count) == name and number < count:
                    yield one, count, name, size

    def listed(self) -> dict[WeightObject, Stored]:
        """Return the objects that are there with all their pieces."""
        found: dict[tuple[WeightObject, int], dict[str, int]] = {}
        for one, count, name, size in self.pieces():
            found.setdefault((one, count), {})[name] = size
        return {
            one: Stored(tuple(sorted(sizes)), num_bytes=sum(sizes.values()))
            for (one, count), sizes in found.items()
            if len(sizes) == count
        }

    def get(self, stored: Stored) -> bytes | None:
        """Return an object; None if it has been deleted meanwhile.

        Raises DataError for one that is too large, SealError for one that is not its writer's.
        """
        if stored.num_bytes > MAX_BYTES:
            raise DataError(f"it has {stored.num_bytes:,} bytes; at most {MAX_BYTES:,} are read")
        pieces = []
        for name in stored.pieces:
            piece = self.store.get(f"{FOLDER}/{name}", sealed_bytes(PIECE_BYTES))
            if piece is None:
                return None
            pieces.append(self.protect(piece, name))
        return b"".join(pieces)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.store.delete(f"{FOLDER}/{name}")


class PatchRoute(NamedTuple):
    """The objects that lead every stage to a step, in order."""

    attempt: int
    step: int
    objects: Mapping[int, list[WeightObject]]


At = tuple[int, int]
"""An attempt at a run, and a step of it."""


def best_route(
    there: Mapping[WeightObject, Stored], at: Mapping[int, At], num_stages: int
) -> PatchRoute | None:
    """Return the way to the newest step that all stages can be brought to; None if there is none
    that is newer than where they are.

    at: the weights that a follower has, by stage.
    A resumed run is another attempt, which may begin at an earlier step: the newest one counts.
    """
    attempt = max((one.attempt for one in there), default=0)
    by_stage = [
        {one: stored for one, stored in there.items() if one[0] == attempt and one.stage == stage}
        for stage in range(num_stages)
    ]
    for step in steps_of_all(by_stage):
        if all(at.get(stage) == (attempt, step) for stage in range(num_stages)):
            return None
        ways = {
            stage: _way(objects, at.get(stage), (attempt, step))
            for stage, objects in enumerate(by_stage)
        }
        found = {stage: way for stage, way in ways.items() if way is not None}
        if len(found) == num_stages:
            return PatchRoute(attempt, step, found)
    return None


def steps_of_all(by_stage: Iterable[Iterable[WeightObject]]) -> list[int]:
    """Return the steps of which every stage has an object, the newest first."""
    steps = [{one.step for one in objects} for objects in by_stage]
    return sorted(set.intersection(*steps), reverse=True)


def _way(there: Mapping[WeightObject, Stored], at: At | None, to: At) -> list[WeightObject] | None:
    """Return the objects of fewest bytes that lead to a step: patches of what is there already, or
    the last snapshot and the patches behind it."""
    patches: list[WeightObject] = []
    ways: list[list[WeightObject]] = []
    attempt, step = to
    by_step = {(one.step, one.base is None): one for one in there}
    # Backwards from the step that is wanted, patch by patch, to where this stage stands; on the
    # way the last snapshot is noted. Each base lies before its patch, so it ends.
    while True:
        if at == (attempt, step):
            ways.append(patches)
            break
        if (snapshot := by_step.get((step, True))) is not None and not ways:
            ways.append([snapshot, *patches])
        if (patch := by_step.get((step, False))) is None or patch.base is None:
            break
        if patch.base >= step:  # no writer makes one
            break
        patches = [patch, *patches]
        step = patch.base
    # Many small patches may be more bytes than one snapshot.
    return min(ways, key=lambda way: sum(there[one].num_bytes for one in way), default=None)
