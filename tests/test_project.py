"""The files for those who join or cite the project say what is so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from merlin_cowclip.workflows.training.runs import environment

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_workflows_call_targets_that_there_are():
    called = []
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        runs = [step["run"] for step in steps if "run" in step]
        assert all(run.startswith("make ") for run in runs), "what a workflow does, anyone can"
        called += [run.split()[1] for run in runs]
    assert {"test", "test-ranks", "release-check"} <= set(called)
    for target in called:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_both_pythons_are_tested():
    text = (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8")
    assert {"3.10", "3.11"} <= set(re.findall(r'"(3\.\d+)"', text))


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == environment()["versions"]["merlin-cowclip"]
    assert cited["license"] == "Apache-2.0"
    assert len(cited["references"][0]["authors"]) == 15


def test_links_of_the_project_files_lead_somewhere():
    for name in ("SECURITY.md", ".github/pull_request_template.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)", text):
            assert (ROOT / target).exists(), (name, target)


def test_no_data_is_committed():
    """Real rows may not be, and NVTabular writes what it fits to the working folder."""
    listed = ["git", "ls-files", "*.parquet", "*.csv", "*.gz", "*.pkl", "categories"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not in a checkout of git")
    assert done.stdout.split() == []
