from __future__ import annotations

import subprocess
import sys

FILE = """
import pytest
def test_quick(): pass
@pytest.mark.extended
@pytest.mark.parametrize("n", [1, 2])
def test_extended(n): pass
"""


def test_every_test_has_one_tier(tiers, request):
    assert request.node.nodeid in tiers
    assert not {test: found for test, found in tiers.items() if len(found) != 1}


def test_four_quarters_are_all_extended_tests(tmp_path, request):
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text(FILE)
    ran = []
    for quarter in range(4):
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
        command += ["-c", "/dev/null", "--rootdir", tmp_path, "-v", tmp_path]
        command += ["-m", "extended", "--quarter", str(quarter)]
        done = subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        ran += [line.split()[0] for line in done.stdout.splitlines() if " PASSED" in line]
    assert len(ran) == len(set(ran)) == 12
    assert all("test_extended" in name for name in ran)
