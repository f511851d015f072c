"""The keys by which the records of what crossed are signed, and by which their signatures are
checked: those of this cloud's policy."""

from __future__ import annotations

from xcloud.base.errors import ConfigError
from xcloud.job.config import policy_file, this_clouds_policy
from xcloud.line.keys import Certificate, read_certificate, read_key
from xcloud.line.sealing import sign
from xcloud.security.audit import Sign


def audit_signer(cloud: str) -> Sign | None:
    """Return what signs the records of a cloud's ranks; None where its key does not lie beside the
    policy. Raises ConfigError for a key that cannot be used."""
    policy = this_clouds_policy()
    key_file = policy_file().parent / f"{cloud}.key"
    # The key of another cloud, or a cloud without keys: then records are not signed.
    if policy.me != cloud or not key_file.exists():
        return None
    key = read_key(key_file)
    certificate = read_certificate(key_file.with_suffix(".pem"))
    # A certificate beside another key would make signatures that nobody can check.
    if certificate.public_key.public_numbers() != key.public_key().public_numbers():
        raise ConfigError(f"{key_file.with_suffix('.pem')} is not the certificate of {key_file}")

    return lambda data: {
        "cloud": cloud,
        "certificate": certificate.fingerprint,
        "signature": sign(data, key).hex(),
    }


def known_certificates() -> dict[str, list[Certificate]]:
    """Return the certificates that this cloud's policy names, by cloud, and its own. One that has
    expired still shows who signed before."""
    policy = this_clouds_policy()
    folder = policy_file().parent
    # peers are the others; this cloud's own records are signed by its own.
    files = {cloud: list(names) for cloud, names in policy.peers.items()}
    if policy.me is not None and (folder / f"{policy.me}.pem").exists():
        files[policy.me] = [f"{policy.me}.pem"]
    return {
        cloud: [read_certificate(folder / name) for name in names]
        for cloud, names in files.items()
    }
