"""Where the project lies, what its owner and its child processes find there, and which commit it
is. Reads files and asks git; changes nothing."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from xcloud.base.errors import ConfigError

GIT_TIMEOUT_S = 10.0
POLICY_FILE = "policy.yaml"  # what this machine's owner allows
MODEL_DIR = "model"  # in a run's folder: the trained parts


def project_root() -> Path:
    """The folder with pyproject.toml beside the package, or the current directory when xcloud
    is installed elsewhere. Never raises."""
    return _checkout() or Path.cwd()


def checkout(why: str) -> Path:
    """Return the folder of the clone that xcloud runs from. Raises ConfigError where it is
    installed without one. why: the reason, for the message."""
    found = _checkout()
    if found is None:
        raise ConfigError(f"this needs a clone of xcloud, and none is here: {why}")
    return found


def this_owners_file(name: str) -> Path:
    """Return where this machine's owner keeps a file such as the policy: in the checkout, else in
    ~/.config/xcloud. Never the current directory, which may be a folder that came from
    elsewhere."""
    # Settled by where the package lies, not by where a command was started.
    return (_checkout() or Path.home() / ".config" / "xcloud") / name


def python_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module in a child process. -P: a file that lies in the
    current directory, which may have come from elsewhere, is not taken for a module."""
    return [sys.executable, "-P", "-m", module, *words]


def module_paths() -> dict[str, str]:
    """Return the environment in which such a child finds what this process does: xcloud, and the
    user's own modules in the checkout and on PYTHONPATH."""
    # The checkout first, as Python has it for the parent.
    folders = [str(_checkout() or ""), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, folders))
    return {"PYTHONPATH": paths} if paths else {}


def conf_dir() -> Path:
    """Return the folder of Hydra's groups: `conf/` of a checkout, which wheels carry too."""
    return (Path(__file__).parent.parent / "conf").resolve()


def run_command() -> str:
    """Return what a user types before the settings of a run: "python run.py" in a checkout,
    "xcloud run" where only the package is installed."""
    return "python run.py" if _checkout() else "xcloud run"


def in_project(path: str) -> Path:
    return project_root() / Path(path).expanduser()


def commit() -> str:
    """Short git commit of xcloud's own sources, e.g. "1a2b3c4" or "1a2b3c4-dirty".

    Dirty means that `git status` lists anything, new files included: a new class that only a
    YAML names can decide a run as well as a changed line. Records, which are results, do not
    count. "unknown" outside git. Never raises.
    """
    root = _checkout()
    if root is None:  # Installed: the repository around the current directory is another one.
        return "unknown"
    head = _git(root, "rev-parse", "--short", "HEAD")
    status = _git(root, "status", "--porcelain", "--", ".", ":(exclude)records")
    if not head or status is None:
        return "unknown"
    return f"{head}-dirty" if status else head


def code_digests(package: Path = Path(__file__).parent.parent) -> dict[str, str]:
    """A digest of every .py file of the package, by its path in it ("launch/local.py")."""
    return {
        file.relative_to(package).as_posix(): file_digest(file)
        for file in sorted(package.rglob("*.py"))
    }


def file_digest(file: Path) -> str:
    """Return a digest of a text file; line ends do not count."""
    return hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()[:16]


def _checkout() -> Path | None:
    # The package's own folder, whatever the current directory is.
    beside_package = Path(__file__).resolve().parents[2]
    if (beside_package / "pyproject.toml").is_file():
        return beside_package
    return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            # Reading the status must not take the index lock from somebody's commit.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
