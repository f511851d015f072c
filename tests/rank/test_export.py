"""What a rank writes of its trained stage, and what is said where it cannot."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from xcloud.base.errors import DataError, RunFailed
from xcloud.rank.export import exporting, learned_file, read_learned


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"No space left on device.*; the disk of that folder has [\d,]+ MB free"),
        (errno.EFBIG, r"File too large.*; that is a limit of this user's \(ulimit -f, a quota\)"),
        (errno.EDQUOT, r"quota exceeded.*; that is a limit of this user's"),
    ],
)
def test_a_model_that_cannot_be_written_fails_the_run_and_names_the_disk(
    number: int, said: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "not" / "yet"
    with pytest.raises(RunFailed) as failed, exporting(run_dir):
        raise OSError(number, os.strerror(number))
    start = f"the trained model could not be written to {run_dir / 'model'}: "
    assert str(failed.value).startswith(start)
    assert re.search(said, str(failed.value), re.IGNORECASE)


def test_other_errors_are_no_matter_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a defect"), exporting(tmp_path):
        raise ValueError("a defect")


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ('{"n": 3}', {"n": 3}),
        ("{}", {}),
        (None, "has no whole numbers by name"),
        ("[3]", "has no whole numbers by name"),
        ('{"n": true}', "has no whole numbers by name"),
        ('{"n": 3, "m": 0.5}', "has no whole numbers by name"),
    ],
)
def test_what_compressors_have_learned_comes_back_or_is_no_file_of_ours(
    numbers: str | None, found: Any, tmp_path: Path
) -> None:
    assert read_learned(tmp_path, stage=1) is None
    about = None if numbers is None else {"numbers": numbers}
    save_file({"basis": torch.ones(2)}, tmp_path / learned_file(1), metadata=about)
    if isinstance(found, str):
        with pytest.raises(DataError, match=found):
            read_learned(tmp_path, stage=1)
    else:
        read = read_learned(tmp_path, stage=1)
        assert read is not None and torch.equal(read.pop("basis"), torch.ones(2))
        assert read == found
    assert read_learned(tmp_path, stage=0) is None
