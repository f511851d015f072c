"""`python -m xcloud policy --new EXPERIMENT`: a policy that allows one experiment and no more."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from xcloud.base.errors import ConfigError
from xcloud.base.project import POLICY_FILE, this_owners_file
from xcloud.base.settings import PACKAGED
from xcloud.base.terminal import say
from xcloud.job.given import read_settings
from xcloud.security.places import is_named, is_place, leads_of
from xcloud.security.policy import Policy, bounded_settings, constructors, targets_of, value_at

HEADER = """\
# Written by `python -m xcloud policy --new {file!a}`: allows that file and no other.
# What each key says: docs/security.md
"""


def strict_policy(file: Path, cloud: str) -> dict[str, Any]:
    """Return the keys of a policy under which `cloud` runs this experiment file and no other.

    The file is built to see what it holds, so it may name no constructor that the policy in force
    does not allow. Raises ConfigError.
    """
    found: list[bytes] = []  # what is approved is what is built: the file is read once
    settings = read_settings(file, approve=lambda data, _: found.append(data))
    job = settings.job
    clouds = list(job.cluster.clouds)
    if cloud not in clouds:
        raise ConfigError(f"--cloud is {cloud!r}; the clouds of {file} are {', '.join(clouds)}")

    allowed = places_of(settings.plain)
    # Every bound is what this file asks for and no more.
    keys: dict[str, Any] = {
        "me": cloud,
        "approved": [hashlib.sha256(found[0]).hexdigest()],
        "constructors": sorted(targets_of(settings.plain) - constructors()),
        "read": sorted(allowed["read"]),
        "write": sorted(allowed["write"]),
        # Packaged models are part of xcloud and fetched from nowhere.
        "hub": sorted(allowed["hub"] - PACKAGED.keys()),
        "addresses": sorted(allowed["address"] | allowed["line"]),
        "clouds": clouds,
        "max_ranks": job.cluster.num_ranks,
    }
    for what in ("holders", "weights"):
        # What each cloud holds in this file, and so may hold.
        held = {name: job.held_by(name, what) or frozenset() for name in clouds}
        names = sorted(frozenset[str]().union(*held.values()))
        if names:
            keys[what] = {name: [c for c in clouds if name in held[c]] for name in names}
    bounds = {
        setting: {"max": value}
        for setting in bounded_settings(settings.kept)
        # A setting that the job has not is no bound.
        if (value := value_at(job, setting)) is not None
    }
    keys["require"] = {"job": type(job).__name__, **bounds}
    return keys


def places_of(
    settings: Mapping[str, Any], may_import: Callable[[object], bool] = is_named
) -> dict[str, set[str]]:
    """Return what an experiment leads to, by what is done there: "read", "write", "hub",
    "address", "line".

    may_import: a function that tells whether a constructor may be looked at.
    """
    places: dict[str, set[str]] = {
        use: set() for use in ("read", "write", "hub", "address", "line", "command")
    }
    for lead in leads_of(settings, may_import):
        value = lead.value
        to = lead.to
        if to == "hub":
            # A name on the hub that is a folder here is read from the disk.
            to = "read" if is_place(value) else "hub"
        if to == "hub" and lead.revision:
            value = f"{value}@{lead.revision}"
        places[to].add(value)
    return places


def main(words: Sequence[str]) -> int:
    """Write a policy that allows this experiment and no other, once you have read it."""
    parser = argparse.ArgumentParser("python -m xcloud policy", description=main.__doc__)
    parser.add_argument("--new", type=Path, required=True, metavar="EXPERIMENT")
    parser.add_argument("--cloud", required=True, help="the name of this cloud in it")
    parser.add_argument("--out", type=Path, help=f"default: where {POLICY_FILE} is looked for")
    given = parser.parse_args(words)
    out: Path = given.out or this_owners_file(POLICY_FILE)
    keys = strict_policy(given.new, cloud=given.cloud)
    # Its own text must be a policy, before a file of that name exists.
    Policy.of(keys, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        # "x": a policy that is there is never overwritten.
        with out.open("x", encoding="utf-8") as file:
            file.write(HEADER.format(file=given.new.name) + yaml.safe_dump(keys, sort_keys=False))
    except FileExistsError:
        raise ConfigError(f"{out} is there already; move it away, or give --out") from None
    say(out)
    return 0
