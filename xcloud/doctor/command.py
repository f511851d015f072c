"""`python -m xcloud doctor EXPERIMENT`: look whether this cloud can take part in a run."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from xcloud.base.errors import ConfigError
from xcloud.base.terminal import say
from xcloud.doctor import machine as this_machine
from xcloud.doctor.case import Case
from xcloud.doctor.finding import Finding, FindingState
from xcloud.doctor.lines import check_lines
from xcloud.doctor.mailbox import check_mailbox
from xcloud.doctor.owners import check_certificate, check_file, check_name, check_own_key
from xcloud.job.config import policy_file, this_clouds_policy
from xcloud.job.given import read_to_approve
from xcloud.launch.join import ALONE, Machine
from xcloud.layout import ClusterLayout, host_and_port
from xcloud.line.keys import read_line_keys
from xcloud.line.mailbox import Mailbox
from xcloud.show.tables import Column, console_of, print_table


def main(words: Sequence[str]) -> int:
    """Look whether this cloud can take part in a run: keys, the file, this machine, the line to
    other clouds or the mailbox between them. Run it in all clouds at the same time: what is said
    of a line is measured between two doctors. Nothing is changed, but that an object is written
    into a mailbox and deleted again. Exit code 1 if a finding is red."""
    parser = argparse.ArgumentParser("python -m xcloud doctor", description=main.__doc__)
    parser.add_argument("experiment", type=Path, help="experiment file, the same in all clouds")
    parser.add_argument("--cloud", help="this cloud (default: `me` of its policy)")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs"), help="where the run would be written"
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="S",
        help="seconds to wait for the doctors of other clouds (default: 60)",
    )  # fmt: skip
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="where to listen, if not at this cloud's address"
    )
    several = parser.add_argument_group("a cloud of several machines, in the words of `join`")
    several.add_argument("--nnodes", type=int, default=1, help="how many machines it has")
    several.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument("--json", action="store_true", help="print the findings for a program")
    given = parser.parse_args(words)
    # NaN compares as false, so it is refused as well.
    if not 0 <= given.wait < math.inf:
        raise ConfigError(f"--wait must be a number of seconds from 0 on, got {given.wait:g}")
    listen = None
    if given.listen is not None:
        try:
            listen = host_and_port(given.listen)
        except ValueError:
            raise ConfigError(f"--listen must be HOST:PORT, got {given.listen}") from None
    if not 0 <= given.node_rank < given.nnodes:
        raise ConfigError(f"--node-rank must be from 0 to {given.nnodes - 1}, below --nnodes")
    case = read_case(
        given.experiment,
        cloud=given.cloud,
        run_dir=given.run_dir,
        machine=Machine(given.node_rank, given.nnodes),
    )
    findings = examine(case, wait_s=given.wait, listen=listen)
    if given.json:
        say(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print_findings(findings)
    return int(any(finding.state is FindingState.RED for finding in findings))


def read_case(file: Path, cloud: str | None, run_dir: Path, machine: Machine = ALONE) -> Case:
    """Read the file as this cloud's policy allows. cloud: as given; None: what the policy says.

    Raises ConfigError for what is no experiment file, names what this cloud may not call, has
    clouds of one owner, no such cloud, or other machines of it.
    """
    asked = read_to_approve(file)
    # Nothing was built, so nothing can be looked at: the refusal is the finding.
    if asked.settings is None:  # the policy lets nothing be built of what the file names
        assert asked.refusal is not None
        raise asked.refusal
    if not asked.settings.job.cluster.between_owners:
        raise ConfigError(
            f"{file} has another cluster.wan than sealed or mailbox, and the doctor is for clouds "
            "of several owners: write it with cluster/wan=sealed, or with cluster/wan=mailbox"
        )
    policy = this_clouds_policy()
    name = cloud or policy.me
    if name is None:
        raise ConfigError("give --cloud, or say in the policy of this cloud which it is (me)")
    layout = asked.settings.job.cluster
    assert isinstance(layout, ClusterLayout), "other layouts refuse several owners"
    # Asked here, as a cloud that is not there would fail in every check.
    machine.ranks_of(layout, name)  # raises for a cloud that is not there
    return Case(
        file=file,
        digest=asked.digest,
        settings=asked.settings,
        refusal=asked.refusal,
        cloud=name,
        policy=policy,
        policy_file=policy_file(),
        run_dir=run_dir,
        machine=machine,
    )


def examine(case: Case, wait_s: float, listen: tuple[str, int] | None = None) -> list[Finding]:
    """Make all checks. wait_s, listen: see check_lines."""
    own, keys = check_own_key(case)
    # The other owners' certificates, each by itself: one may be missing where others are fine.
    certificates = {peer: check_certificate(case, peer=peer, own=keys) for peer in case.peers}
    findings = [check_file(case), check_name(case), own, *certificates.values()]
    findings += [check(case) for check in this_machine.CHECKS]
    # A mailbox has no lines: each cloud reaches it by itself.
    if isinstance(case.layout.wan, Mailbox):
        return [*findings, check_mailbox(case)]
    # A certificate that is not valid would end the talk to all.
    usable = {
        peer: case.policy.peers[peer]
        for peer, finding in certificates.items()
        if finding.state is not FindingState.RED
    }
    if keys is not None and usable:
        known = read_line_keys(case.cloud, peers=usable, policy_file=case.policy_file)
        findings += check_lines(case, keys=known, wait_s=wait_s, listen=listen)
    return findings


def print_findings(findings: Iterable[Finding]) -> None:
    """Print a table of findings, and below it what to do about those that are not ok."""
    findings = list(findings)
    console = console_of()
    columns = [Column("", right=False), Column("check", right=False)]
    columns.append(Column("finding", right=False, wraps=True))
    rows = [(finding.state.value, finding.name, finding.fact) for finding in findings]
    print_table(console, columns=columns, rows=rows)
    for finding in findings:
        if finding.advice:
            say(f"{finding.state.value:<5}{finding.name}: {finding.advice}")
    num_red = sum(finding.state is FindingState.RED for finding in findings)
    say(f"{num_red} red" if num_red else "nothing is red")
