"""An object with weights: a snapshot, which has all values of a stage, or a patch, which has those
that have changed since an earlier step. Pure bytes; where they lie is store.py's.

An object: magic "XCW1" | bytes of the head u32, little-endian | head, JSON | for each tensor of
the head its data | for each file of the head its bytes. A tensor's data are its coded changes
(codec.py), or all its values, 2 bytes each, where it was not there before or that is smaller.

Whoever reads an object trusts nothing in it: no memory is taken before its size is known to be
that of bytes that are there, and the weights that come of it must have the digest in its head.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xcloud.base.errors import DataError
from xcloud.contracts.architecture import checked_architecture
from xcloud.features.weight_patches.codec import Bits, ValueChanges, decode_changes, encode_changes

_MAGIC = b"XCW1"
_LENGTH = struct.Struct("<I")
_MAX_HEAD_BYTES = 64 << 20
_MAX_TENSORS = 1_000_000  # a mixture of 128 experts in 94 blocks has some 36,000
_MAX_FILES = 1_000  # tokenizers have ten
_FILE_NAME = re.compile(r"(?:\w[\w.-]{0,59}/){0,3}\w[\w.-]{0,59}")
"""A file, or one in folders: nothing that leads out of where it is written, or that no disk takes
(a character has four bytes at most)."""
_MAX_VALUES = 1 << 40

_Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
_Text = Annotated[str, Field(max_length=1000)]
Files = Mapping[str, bytes]


class TensorHead(BaseModel):
    """A tensor of an object: its changes, or, where num_changed is None, all its values.

    gap_bytes, value_bytes: sizes of its data, one after the other.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    name: _Text
    shape: Annotated[list[_Whole], Field(max_length=8)]
    num_changed: _Whole | None
    gap_bytes: _Whole
    value_bytes: _Whole


class ObjectHead(BaseModel):
    """What an object says of itself.

    run: name of the run.
    attempt: number of this beginning of the run.
    base: the step of the weights that a patch changes; None for a snapshot.
    is_last: it has the weights after the last update of the run.
    digest: SHA-256 of the weights that come of it.
    architecture, files: of a snapshot, the stage's description, and files beside its weights
        with their sizes (tokenizers).
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    run: _Text
    attempt: _Whole
    stage: _Whole
    step: _Whole
    base: _Whole | None
    is_last: bool
    digest: Annotated[str, Field(max_length=64)]
    tensors: Annotated[list[TensorHead], Field(max_length=_MAX_TENSORS)]
    architecture: dict[str, Any]
    files: Annotated[dict[_Text, _Whole], Field(max_length=_MAX_FILES)]


@dataclass(frozen=True)
class StageWeights:
    """The weights of one stage after a step, by name, as a follower has them."""

    head: ObjectHead
    tensors: Mapping[str, Bits]
    architecture: Mapping[str, Any]
    files: Files


def encode(
    tensors: Mapping[str, Bits],
    before: Mapping[str, Bits] | None,
    architecture: Mapping[str, Any],
    files: Files,
    **about: Any,
) -> bytes:
    """Return an object: a patch of the tensors before, or, where these are None, a snapshot.

    architecture, files: only a snapshot has them.
    about: run, attempt, stage, step, base and is_last of the head.
    """
    heads: list[dict[str, Any]] = []
    data: list[bytes] = []
    for name, bits in tensors.items():
        one = {"name": name, "shape": list(bits.shape), "num_changed": None, "gap_bytes": 0}
        parts = [bits.astype("<u2", copy=False).tobytes()]
        if before is not None:
            changes = encode_changes(before[name], now=bits)
            # After a large step nearly all values differ, and coding them costs more than they
            # are.
            if len(changes.gaps) + len(changes.differences) < len(parts[0]):
                one |= {"num_changed": changes.num_changed, "gap_bytes": len(changes.gaps)}
                parts = [changes.gaps, changes.differences]
        heads.append(one | {"value_bytes": len(parts[-1])})
        data += parts
    is_snapshot = before is None
    head = {
        **about,
        "digest": digest_of(tensors),
        "tensors": heads,
        "architecture": dict(architecture) if is_snapshot else {},
        "files": {name: len(content) for name, content in files.items()} if is_snapshot else {},
    }
    text = json.dumps(head).encode()
    rest = files.values() if is_snapshot else ()
    return b"".join([_MAGIC, _LENGTH.pack(len(text)), text, *data, *rest])


def digest_of(tensors: Mapping[str, Bits]) -> str:
    """Return the SHA-256 of weights: of their names, shapes and BF16 values."""
    shapes = [[name, list(bits.shape)] for name, bits in tensors.items()]
    digest = hashlib.sha256(json.dumps(shapes).encode())
    for bits in tensors.values():
        digest.update(np.ascontiguousarray(bits.astype("<u2", copy=False)).data)
    return digest.hexdigest()


def decode(data: bytes, before: StageWeights | None) -> StageWeights:
    """Return the weights that come of an object.

    before: those that a patch changes; a snapshot needs none.
    Raises DataError for an object that is damaged, has another base or gives other weights than
    its digest says.
    """
    # Checked in the order in which something costs memory: head, sum of sizes, each tensor, and
    # the digest of all at last.
    head, begin = _read_head(data)
    rest = memoryview(data)[begin:]
    architecture: Mapping[str, Any] = {}
    if head.base is None:
        before = None
        architecture = checked_architecture(head.architecture)
    elif before is None or before.head.step != head.base:
        have = "none" if before is None else f"step {before.head.step}"
        raise DataError(f"it changes the weights of step {head.base}, and here is {have}")
    # Names in their order: the digest is over this order.
    elif [*before.tensors] != [one.name for one in head.tensors]:
        raise DataError("it has other tensors than the weights that it changes")
    expected = sum(one.gap_bytes + one.value_bytes for one in head.tensors)
    expected += sum(head.files.values())
    if expected != len(rest):
        raise DataError(f"it has {len(rest):,} bytes of data, its head says {expected:,}")
    tensors: dict[str, Bits] = {}
    for one in head.tensors:
        earlier = None if before is None else before.tensors[one.name]
        gaps = rest[: one.gap_bytes]
        values = rest[one.gap_bytes : one.gap_bytes + one.value_bytes]
        rest = rest[one.gap_bytes + one.value_bytes :]
        tensors[one.name] = _decoded(one, earlier, gaps=gaps, values=values)
    if len(tensors) < len(head.tensors):
        raise DataError("it has two tensors of one name")
    if digest_of(tensors) != head.digest:
        raise DataError("the weights that come of it have another digest than it says")
    files: dict[str, bytes] = {}
    check_no_folder([*head.files])
    for name, size in head.files.items():
        # Written below a folder later: `..` or `/` would lead out of it.
        if not _FILE_NAME.fullmatch(name):
            raise DataError(f"it has a file {name!r:.100}, which is no plain name")
        files[name] = bytes(rest[:size])
        rest = rest[size:]
    if before is not None:
        return StageWeights(head, tensors, before.architecture, files=before.files)
    return StageWeights(head, tensors, architecture, files=files)


def check_no_folder(names: Collection[str]) -> None:
    """Raise DataError for a file whose name is that of another file's folder."""
    folders = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
    if clash := folders.intersection(names):
        raise DataError(f"{min(clash)!r:.100} is a file and the folder of another one")


def _decoded(one: TensorHead, before: Bits | None, gaps: memoryview, values: memoryview) -> Bits:
    num_values = math.prod(one.shape)
    # numpy lays out no shape beyond 63 bits, though a size of 0 leaves nothing in it.
    if math.prod(max(1, size) for size in one.shape) > _MAX_VALUES:
        raise DataError(f"{one.name!r:.100} is {one.shape}, larger than any tensor")
    if before is not None and list(before.shape) != one.shape:
        raise DataError(f"{one.name!r:.100} is {one.shape}, before it was {list(before.shape)}")
    if one.num_changed is None:
        if len(gaps) or len(values) != 2 * num_values:
            raise DataError(f"{one.name!r:.100} is {one.shape} in {len(values):,} bytes")
        return np.frombuffer(values, dtype="<u2").astype(np.uint16).reshape(one.shape)
    if before is None:
        raise DataError(f"{one.name!r:.100} has changes, and a snapshot has all values")
    changes = ValueChanges(one.num_changed, bytes(gaps), differences=bytes(values))
    try:
        return decode_changes(before, changes)
    except DataError as error:
        raise DataError(f"{one.name!r:.100}: {error}") from None


def _read_head(data: bytes) -> tuple[ObjectHead, int]:
    """Return the head of an object, and where its data begin."""
    begin = len(_MAGIC) + _LENGTH.size
    if data[: len(_MAGIC)] != _MAGIC or len(data) < begin:
        raise DataError("it does not begin as an object with weights does")
    (size,) = _LENGTH.unpack_from(data, len(_MAGIC))
    if size > min(_MAX_HEAD_BYTES, len(data) - begin):
        raise DataError(f"its head should have {size:,} bytes")
    try:
        head = ObjectHead.model_validate_json(data[begin : begin + size])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"its head is damaged: {where:.100}: {first['msg']:.100}") from None
    return head, begin + size
