"""Load a saved NVTabular workflow, which runs code, if a manifest confirms all of its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.manifest import check_manifest, check_nothing_else

if TYPE_CHECKING:
    import nvtabular as nvt

FOLDER = "workflow"
NEEDED = (f"{FOLDER}/workflow.pkl", f"{FOLDER}/metadata.json")


def check_workflow(
    home: Path, manifest: Mapping[str, Mapping[str, Any]], what: str, again: str, trust: str
) -> None:
    """Raise UserError if a file of ``home/workflow`` is not as in the manifest.

    ``what`` is the folder's kind ("a run"), ``again`` the remedy, ``trust`` how to load it anyway.
    """
    members = {name: m for name, m in manifest.items() if name.startswith(f"{FOLDER}/")}
    remedy = f"{again} Or, if you trust it all the same, whose code loading it runs: {trust}"
    check_manifest(home, members, what, remedy, NEEDED)
    check_nothing_else(home / FOLDER, home, members, what, remedy)


def load_confirmed(
    home: Path, manifest: Mapping[str, Mapping[str, Any]], what: str, again: str, *, trust: bool
) -> nvt.Workflow:
    """Load ``home/workflow`` after `check_workflow`, or without it if ``trust``.

    Raises:
        UserError: as `check_workflow`, or it does not load here.
    """
    if not trust:
        check_workflow(home, manifest, what, again, "workflow(trust=True)")
    from merlin_cowclip.workflows.data.adopt.graph import load_saved

    return load_saved(home / FOLDER)
