"""Loading a saved NVTabular workflow, which runs code: only if a manifest confirms all of it.

NVTabular saves by cloudpickle, and Python runs what a pickle says while it loads it. It is the one
such file among ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.data.adopt.graph import load_saved
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.manifest import check_manifest, check_nothing_else

if TYPE_CHECKING:
    import nvtabular as nvt

FOLDER = "workflow"
NEEDED = (f"{FOLDER}/workflow.pkl", f"{FOLDER}/metadata.json")


def check_workflow(
    home: Path, manifest: Mapping[str, Mapping[str, Any]], what: str, again: str, trust: str
) -> None:
    """Refuse a workflow of which a file is not as the manifest says, or not in it.

    Args:
        home: the folder that has it, and the manifest.
        manifest: as `manifest_of` made it.
        what: whose it is: "a run".
        again: how to come by another.
        trust: how to load it all the same.

    Raises:
        UserError: names the first such file, and says both.
    """
    members = {name: m for name, m in manifest.items() if name.startswith(f"{FOLDER}/")}
    remedy = f"{again} Or, if you trust it all the same, whose code loading it runs: {trust}"
    check_manifest(home, members, what, remedy, NEEDED)
    check_nothing_else(home / FOLDER, home, members, what, remedy)


def load_confirmed(
    home: Path,
    manifest: Mapping[str, Mapping[str, Any]],
    what: str,
    again: str,
    *,
    trust: bool,
) -> nvt.Workflow:
    """A folder's workflow, once `check_workflow` has found it as it was written, at this moment.

    Args:
        home: the folder.
        manifest: its own.
        what: whose it is: "a run".
        again: how to come by another.
        trust: load it in any case.

    Raises:
        UserError: it is not, or does not load here.
    """
    if not trust:
        check_workflow(home, manifest, what, again, "workflow(trust=True)")
    try:
        return load_saved(home / FOLDER)
    except Exception as error:  # it runs whatever was pickled
        raise UserError(
            f"the workflow of {what} must load in this environment. Received: {home / FOLDER}: "
            f"{type(error).__name__}: {error}. Install what it needs. {again}"
        ) from error
