"""`python -m xcloud approve EXPERIMENT`: show what a file asks of this cloud, and approve it.

A file is known by the SHA-256 of its bytes. The policy of each owner lists the files that may run
there. Owners compare one number by phone, of the file and of their certificates.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from xcloud.base.errors import ConfigError
from xcloud.base.settings import PACKAGED
from xcloud.base.terminal import is_terminal, say
from xcloud.job.config import Settings, policy_file, this_clouds_keys, this_clouds_policy
from xcloud.job.given import read_to_approve
from xcloud.job.strict_policy import places_of
from xcloud.layout import num_ranks_in_words
from xcloud.line.keys import Certificate, describe
from xcloud.line.mailbox import Mailbox, local_folder
from xcloud.record.files import replace_text
from xcloud.security.places import leads_of
from xcloud.security.policy import Meter, Policy, constructors, plain_text, targets_of, value_at

_USES = {
    "read": "reads", "write": "writes", "hub": "fetches", "address": "contacts",
    "line": "dials, or listens at", "command": "runs",
}  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Show what an experiment file would read, write, send and need here, and one number of the
    file and of the certificates of its clouds, which the owners compare by phone. Then ask whether
    it may run in this cloud."""
    parser = argparse.ArgumentParser("python -m xcloud approve", description=main.__doc__)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--yes", action="store_true", help="approve it without a question")
    given = parser.parse_args(words)
    asked = read_to_approve(given.experiment)
    policy = this_clouds_policy()
    where = policy_file()
    if asked.settings is not None:
        say("\n".join(_described(asked.settings)))
    else:  # to say more, what is refused would have to be read or fetched
        say("\n".join(_uses(asked.plain, policy.me)))
    # Shown first and refused then: an owner is to see what a file asked for.
    if asked.refusal is not None:
        say(f"{where} would refuse it: {asked.refusal}")
        return 1
    assert asked.settings is not None, "what is not refused is built"
    certificates: list[Certificate] = []
    if asked.settings.job.cluster.between_owners:
        # Without keys there is nothing to compare, and the file can be shown all the same.
        try:
            keys = this_clouds_keys()
        except ConfigError as error:
            say(f"certificates: {error}")
        else:
            every = [keys.own, *chain.from_iterable(keys.peers.values())]
            # Certificates of clouds that take no part would make another number in each cloud.
            certificates = [c for c in every if c.cloud in asked.settings.job.cluster.clouds]
    if certificates:
        number = number_of(asked.digest, certificates)
        say(f"\nto compare by phone with the other owners:\n{number}\nif it differs, compare:")
        for certificate in certificates:
            say(f"certificate of {describe(certificate)}")
    # Four lines of four groups of hexadecimal digits, to be read out aloud.
    groups = [asked.digest[n : n + 4] for n in range(0, 64, 4)]
    digest = "\n".join("  " + " ".join(groups[n : n + 4]) for n in range(0, 16, 4))
    say(f"SHA-256 of {given.experiment.name}\n{digest}\n")
    # An earlier approval holds for the same bytes.
    if asked.digest in (policy.approved or ()):
        say(f"approved in {where}")
    elif given.yes or _agrees(where, policy):
        approve(where, digest=asked.digest)
        say(f"approved in {where} now")
    return 0


def _agrees(where: Path, policy: Policy) -> bool:
    if not is_terminal(sys.stdin):
        say(f"not approved: nobody can be asked here; --yes puts it into {where}")
        return False
    # With the first entry the policy changes its meaning: so far everything within its bounds ran.
    if policy.approved is None:
        say(
            f"So far {where} approves any file that keeps to its bounds; then only those it names."
        )
    return input("Approve it in this cloud? [y/N] ").strip().lower() in ("y", "yes")


def number_of(digest: str, certificates: Iterable[Certificate]) -> str:
    """Return one number of an experiment file and of the certificates of all its clouds, the same
    in each cloud: 60 decimal digits, of which two files or keys have the same by no search that
    anybody could afford (2 to the power of 99)."""
    # Sorted, since each cloud reads them in another order.
    parts = sorted(f"{one.cloud} {one.fingerprint}" for one in certificates)
    hashed = hashlib.sha256("\n".join([digest, *parts]).encode()).hexdigest()
    # 199 bits: 60 digits have as many ways, which a person can still read out aloud.
    digits = f"{int(hashed, 16) % 10**60:060}"
    # Groups of five digits, four of them a line.
    groups = [digits[n : n + 5] for n in range(0, 60, 5)]
    return "\n".join("  " + " ".join(groups[n : n + 4]) for n in range(0, 12, 4))


def _described(settings: Settings) -> Iterator[str]:
    """Yield, line by line, what a job asks of the clouds that run it."""
    job = settings.job
    yield job.headline
    yield from _uses(settings.plain, this_clouds_policy().me)
    yield f"{'keeps':<10}{'; '.join(_kept(settings))}"
    join_h = job.cluster.liveness.join_within_s / 3600
    waits = f"ports open for up to {join_h:g} h until all have joined"
    if value_at(job, "cluster.relay") is not None:
        waits = f"a relay that clouds dial, for up to {join_h:g} h until all have joined"
    if job.cluster.wan == "sealed":
        waits += f", then up to {job.cluster.reconnect_s:g} s after each outage"
    # A mailbox is a folder or a bucket that both read and write: nobody listens.
    if isinstance(job.cluster.wan, Mailbox):
        waits = f"no port open; waits for up to {join_h:g} h until all have joined"
    yield f"{'needs':<10}{job.cluster.describe()}; {job.max_steps} steps; {waits}"
    if isinstance(job.cluster.wan, Mailbox):
        folder = local_folder(job.cluster.wan.url)
        if folder is not None and not os.path.isdir(folder):
            yield f"{'lacks':<10}there is no folder {folder} here: make it before you join"
    for cloud, settings_of_cloud in job.cluster.clouds.items():
        ranks = num_ranks_in_words(settings_of_cloud.num_ranks)
        yield f"\n{cloud}: {ranks}, device {settings_of_cloud.device}"
        for what, words in (("holders", "reads the fields"), ("weights", "holds the weights of")):
            held = job.held_by(cloud, what)
            if held is None:
                continue
            others = [name for name in job.cluster.clouds if name != cloud]
            # What a cloud holds that no other one does is what its owner gives away by joining.
            stays = held.difference(*(job.held_by(name, what) or () for name in others))
            yield f"  {words} {_names(held) or 'none'}; only here: {_names(stays) or 'none'}"
        sent = [message for message in job.leaving() if message.sender == cloud]
        if not sent:
            yield "  sends nothing to another cloud"
        for message in sent:
            yield f"  sends {message.to} {message.in_words}"


def _uses(plain: Mapping[str, Any], me: str | None) -> Iterator[str]:
    """Yield, line by line, what a file leads to and calls, all of it, whether allowed or not.

    me: the name of this cloud.
    """
    known = this_clouds_policy().constructors
    targets = targets_of(plain)
    # The order of uses is that of places_of; a command is seldom there, so only one that is asked
    # for is shown.
    found = places_of(plain, lambda target: target in constructors() or target in known)
    for use, names in found.items():
        if use == "line":
            yield from _lines(plain, me)
        elif use != "command" or names:
            yield f"{_USES[use]:<10}{_names(names - PACKAGED.keys()) or 'nothing'}"
    yield f"{'calls':<10}{_names(targets - constructors()) or 'nothing but xcloud'}"


def _lines(plain: Mapping[str, Any], me: str | None) -> Iterator[str]:
    """Yield where clouds listen on sealed lines, and are dialled by the others."""
    # Classes that the policy has not allowed are not imported to ask what they would contact.
    for lead in leads_of(plain, may_import=lambda target: target in constructors()):
        if lead.to == "line":
            if lead.where == "cluster.relay":
                yield f"{'dials':<10}{lead.value} (relay)"
                continue
            # The key is cluster.clouds.NAME.address or the like.
            cloud = lead.where.removeprefix("cluster.clouds.").rpartition(".")[0]
            is_own = cloud == me
            yield f"{'listens' if is_own else 'dials':<10}{lead.value} ({cloud})"


def _kept(settings: Settings) -> Iterator[str]:
    """Yield what stays on this machine's disk beside the figures of the run."""
    job = settings.job
    yield "the trained part of the model, and samples of its answers, in the run folder"
    checkpoints = value_at(job, "training.checkpoint.keep")
    if checkpoints is not None:
        yield f"up to {checkpoints} checkpoints"
    meter = value_at(job, "security.meter")
    # The meter is the one part of a run that may write texts.
    if isinstance(meter, Meter):
        what = f"a meter: of the last {meter.last_steps} updates up to {meter.max_rows} rows"
        if getattr(meter, "keep", False):
            yield (
                f"{what} of each kind of message, and TEXT AND LABELS of those batches IN PLAIN, "
                "in observations/ (security.meter.keep)"
            )
        else:
            yield f"{what} and their text, in memory until the run ends (security.meter)"
    cache = value_at(job, "training.activation_cache_mb")
    if cache:
        yield f"up to {cache} MB of received activations, for later epochs"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def approve(file: Path, digest: str) -> None:
    """Add a digest to `approved` of a policy file, which is made where there is none.

    All else in the file stays as it is, comments too. Raises ConfigError for a file that is no
    policy.
    """
    # A policy may be a link; replacing it by name would leave two files.
    target = Path(os.path.realpath(file))
    text = plain_text(target) if target.exists() else ""
    changed = with_approved(text, digest)
    try:
        # The changed text is parsed as a policy before it replaces the old one.
        Policy.of(yaml.safe_load(changed), target)
    except yaml.YAMLError as error:  # such as all of it in one pair of braces
        more = f"approved: ['{digest}']"
        raise ConfigError(f"{target} cannot be added to; write {more} into it") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, text=changed)


def with_approved(text: str, digest: str) -> str:
    """Return the text of a policy with one more digest in `approved`."""
    # Composed, not loaded: nodes know their places in the text, so comments and order can stay.
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    value = next((value for key, value in pairs if key.value == "approved"), None)
    if value is None:
        # A file that ends without a line feed.
        start = text if text.endswith("\n") or not text else f"{text}\n"
        return f"{start}approved: ['{digest}']\n"
    # `approved:` without a value, or an empty list in brackets.
    if not isinstance(value, yaml.SequenceNode) or not value.value:
        before = text[: value.start_mark.index]
        return f"{before} ['{digest}']{text[value.end_mark.index :]}"
    last = value.value[-1].end_mark.index
    # A list in brackets grows in its line, one of lines by a line of the same depth.
    if value.flow_style:
        return f"{text[:last]}, '{digest}'{text[last:]}"
    rest_of_line, newline, below = text[last:].partition("\n")
    # A comment may stand behind the last entry.
    indent = " " * value.start_mark.column
    return f"{text[:last]}{rest_of_line}\n{indent}- '{digest}'{newline or chr(10)}{below}"
