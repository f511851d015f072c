"""Checks of what the owners have agreed on: keys, certificates, names, and the file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from xcloud.base.errors import ConfigError
from xcloud.doctor.case import Case
from xcloud.doctor.finding import Finding, ok, red, warn
from xcloud.line.keys import Certificate, LineKeys, read_line_keys

_ENDS_SOON = timedelta(days=30)


def check_file(case: Case) -> Finding:
    """Look whether the file may run in this cloud."""
    short = f"SHA-256 {case.digest[:16]}…"
    approve = f"read what it asks for with `python -m xcloud approve {case.file}`"
    # The policy's own reasons come first: an approval would not help.
    if case.refusal is not None:
        return red(
            "file",
            fact=str(case.refusal),
            advice=f"change the file in all clouds, or {case.policy_file} in this one",
        )
    # Without a list any file runs, which an owner may not want.
    if case.policy.approved is None:
        return warn(
            "file",
            fact=f"{short}: {case.policy_file} approves any file that keeps to its bounds",
            advice=f"{approve}, and approve this one",
        )
    if case.digest not in case.policy.approved:
        return red(
            "file",
            fact=f"{short} is not approved in {case.policy_file}",
            advice=f"{approve}, compare its number with the other owner's, and approve it",
        )
    return ok("file", fact=f"{short} is approved in {case.policy_file}")


def check_name(case: Case) -> Finding:
    """Look whether the policy says that this is the cloud that was given."""
    me = case.policy.me
    if me == case.cloud:
        return ok("this cloud", fact=f"{me}, as {case.policy_file} says")
    # Without `me` a file could call this machine any of its clouds.
    fact = f"--cloud is {case.cloud}, and {case.policy_file} does not say which cloud this is"
    if me is not None:
        fact = f"--cloud is {case.cloud}, but {case.policy_file} says me: {me}"
    return red("this cloud", fact=fact, advice=f"write me: {case.cloud} there, or give --cloud")


def check_own_key(case: Case) -> tuple[Finding, LineKeys | None]:
    """Look at this cloud's own key. Return it with no peers; None where it cannot be used."""
    folder = case.policy_file.parent
    renew = (
        f"move {case.cloud}.key and {case.cloud}.pem, if they are in {folder}, away, make others "
        f"with `python -m xcloud keys new {case.cloud} --folder {folder}`, and give the .pem to "
        "the other owners"
    )
    try:
        keys = read_line_keys(case.cloud, peers={}, policy_file=case.policy_file)
    except ConfigError as error:
        return red("own key", fact=str(error), advice=renew), None
    return _dated("own key", certificates=[keys.own], advice=renew), keys


def check_certificate(case: Case, peer: str, own: LineKeys | None) -> Finding:
    """Look at the certificates by which this cloud knows a peer."""
    name = f"certificate of {peer}"
    folder = case.policy_file.parent
    files = case.policy.peers.get(peer)
    get = f"get {peer}.pem from the owner of {peer}, put it into {folder}"
    if files is None:
        return red(
            name,
            fact=f"{case.policy_file} names none",
            advice=f"{get}, and write peers: {{{peer}: [{peer}.pem]}} into the policy",
        )
    # A certificate is read with this cloud's own key.
    if own is None:
        return warn(name, fact="not looked at", advice="first mend this cloud's own key")
    try:
        keys = read_line_keys(case.cloud, peers={peer: files}, policy_file=case.policy_file)
    except ConfigError as error:
        return red(name, fact=str(error), advice=f"{get}, and name it in `peers` of the policy")
    return _dated(
        name, certificates=keys.peers[peer], advice=f"ask the owner of {peer} for another one"
    )


def _dated(name: str, certificates: Sequence[Certificate], advice: str) -> Finding:
    # Of two certificates, on the day of a change, the one that ends first.
    until = min(one.parsed.not_valid_after_utc for one in certificates)
    left = until - datetime.now(UTC)
    fact = f"SHA-256 {certificates[-1].fingerprint[:16]}…, valid until {until:%Y-%m-%d}"
    if left < _ENDS_SOON:
        return warn(name, fact=f"{fact}, for {left.days} more days", advice=advice)
    return ok(name, fact=fact)
