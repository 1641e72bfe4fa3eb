"""Adds this package to NVIDIA's Merlin image, and changes nothing that is in it.

    python3 containers/add.py [--dry-run] SOURCE

Of what the package requires, only what the image lacks is installed, with the image's own
versions as constraints; then the package itself, without looking at its requirements. A plain
``pip install`` would look at TensorFlow's, too: NVIDIA copies that from another image, beside
packages that do not fit what its metadata asks for. Where a version of the image is outside our
ranges, that is told, and the version stays. Python 3.10, pip and packaging are all that this needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from importlib import invalidate_caches, metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import InvalidVersion, Version

PACKAGE = canonicalize_name("merlin-cowclip")
# What makes it NVIDIA's image; never installed here.
THE_IMAGES_OWN = frozenset(
    canonicalize_name(name)
    for name in (
        *("tensorflow", "horovod", "cudf", "dask-cudf", "dask-cuda", "dask", "distributed"),
        *("merlin-core", "merlin-dataloader", "merlin-models", "nvtabular"),
        *("numpy", "pandas", "pyarrow"),
    )
)
MODULES = {"scikit-learn": "sklearn", "protobuf": "google.protobuf"}


def pip(*arguments: str) -> None:
    """Run this Python's pip, which is heard only where it fails.

    Raises:
        SystemExit: it did.
    """
    call = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout)
        sys.exit(f"add.py: error: pip {arguments[0]} failed; what it says is above")


def installed() -> dict[NormalizedName, str]:
    """The version of every package that is installed, without this one."""
    invalidate_caches()
    found: dict[NormalizedName, str] = {}
    for one in metadata.distributions():
        if one.metadata["Name"] is not None:  # the remains of one that was removed have none
            found.setdefault(canonicalize_name(one.metadata["Name"]), one.version)
    found.pop(PACKAGE, None)
    return found


def required(wheel: Path) -> list[Requirement]:
    """What a wheel requires here, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    asked = [Requirement(line) for line in headers.get_all("Requires-Dist", [])]
    return [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]


def importable(name: str) -> bool:
    """Whether there is a module for it: some of the image's packages have no metadata."""
    dotted = name.replace("-", ".")
    if dotted.split(".")[0] in sys.stdlib_module_names:  # importlib-metadata is not importlib's
        dotted = name.replace("-", "_")
    candidates = (MODULES.get(name), name.replace("-", "_"), dotted)
    for module in candidates:
        try:
            if module is not None and find_spec(module) is not None:
                return True
        except ModuleNotFoundError:  # of the package that it is in
            continue
    return False


def constraints(versions: dict[NormalizedName, str]) -> str:
    """Every version that pip can compare, as it is; it leaves alone what it cannot."""
    lines = []
    for name, version in sorted(versions.items()):
        try:
            lines.append(f"{name}=={Version(version)}\n")
        except InvalidVersion:
            continue
    return "".join(lines)


def add(source: str, *, dry_run: bool) -> None:
    """Install the package at `source`, or tell what that would install.

    Raises:
        SystemExit: nothing is at `source`, not NVIDIA's image, pip failed, or a package of the
            image changed.
    """
    if not Path(source).exists():  # pip would take a word for a package of its index
        print(f"add.py: error: neither a folder nor a wheel: {source!r}", file=sys.stderr)
        sys.exit(2)
    before = installed()
    with tempfile.TemporaryDirectory() as folder:
        pip("wheel", "--no-deps", "--wheel-dir", folder, str(Path(source).absolute()))
        (wheel,) = Path(folder).glob("*.whl")
        missing = []
        for one in required(wheel):
            name = canonicalize_name(one.name)
            if name in before:
                if not one.specifier.contains(before[name], prereleases=True):
                    print(f"{name} stays {before[name]}: tested with {one.specifier}")
            elif not importable(name):
                missing.append(one)
        if lacking := sorted({one.name for one in missing} & THE_IMAGES_OWN):
            print(
                f"add.py: error: not NVIDIA's Merlin image: {', '.join(lacking)} not found. "
                "Elsewhere: pip install --constraint constraints.txt .",
                file=sys.stderr,
            )
            sys.exit(2)
        own = Path(folder, "own.txt")
        own.write_text(constraints(before), encoding="utf-8")
        report = Path(folder, "report.json")
        how = ("--dry-run", "--report", str(report)) if dry_run else ("--no-cache-dir",)
        if missing:
            pip("install", *how, "--constraint", str(own), *map(_plain, missing))
        if dry_run:
            added = _reported(report) if missing else {}
            changed = {name: added[name] for name in added.keys() & before.keys()}
        else:
            # Forced: pip would leave an older checkout's code where the version is the same.
            pip("install", "--force-reinstall", "--no-deps", "--no-cache-dir", str(wheel))
            after = installed()
            added = {name: after[name] for name in after.keys() - before.keys()}
            changed = {
                name: after.get(name, "removed")
                for name in before
                if after.get(name) != before[name]
            }
    for name in sorted(added):
        print(f"{'would add' if dry_run else 'added'} {name} {added[name]}")
    if changed:
        told = ", ".join(f"{name} {before[name]} → {changed[name]}" for name in sorted(changed))
        sys.exit(f"add.py: error: packages of the image changed: {told}")
    print(f"{len(before)} packages of the image, none changed")


def _plain(one: Requirement) -> str:
    """A requirement whose marker has been looked at."""
    return f"{one.name}{one.specifier}"


def _reported(report: Path) -> dict[NormalizedName, str]:
    """What pip would install."""
    listed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in listed
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", help="the repository, or a wheel of it")
    parser.add_argument("--dry-run", action="store_true", help="tell, install nothing; pip 22.2")
    arguments = parser.parse_args()
    add(arguments.source, dry_run=arguments.dry_run)
