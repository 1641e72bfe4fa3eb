"""A manifest knows a folder's files again; hashlib, pandas and the file system are the oracle."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.manifest import SMALL, check_manifest, manifest_of

LARGE = 3 * SMALL


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "with spaces, ünïcode"
    (folder / "inside" / ".hidden").mkdir(parents=True)
    pd.DataFrame({"a": range(7)}).to_parquet(folder / "inside" / "part.parquet")
    (folder / "inside" / ".hidden" / "text").write_text("text", encoding="utf-8")
    (folder / "empty").touch()
    (folder / "large").write_bytes(np.random.default_rng(0).bytes(LARGE))
    (folder / "left out").mkdir()
    (folder / "left out" / "log").touch()
    return folder


@pytest.fixture
def manifest(folder) -> dict:
    return manifest_of(folder, without={"left out"})


def check(folder, manifest) -> None:
    check_manifest(folder, manifest, "a folder", "Write it again")


def test_a_manifest_has_size_rows_and_sha256(folder, manifest):
    assert list(manifest) == ["empty", "inside/.hidden/text", "inside/part.parquet", "large"]
    assert manifest["inside/part.parquet"]["rows"] == 7
    for name, entry in manifest.items():
        content = (folder / name).read_bytes()
        assert entry["bytes"] == len(content)
        if len(content) > SMALL:
            content = content[: SMALL // 2] + content[-SMALL // 2 :]
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()


def test_a_folder_as_it_was_passes_wherever_it_is(folder, manifest, tmp_path):
    (folder / "another").touch()
    shutil.rmtree(folder / "left out")
    check(folder, manifest)
    check(Path(shutil.copytree(folder, tmp_path / "copied")), manifest)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("empty", Path.unlink, r"empty cannot be read \(No such file"),
        ("empty", lambda p: p.write_bytes(b"x"), r"empty has changed \(1 bytes; it had 0\)"),
        ("inside/.hidden/text", lambda p: p.write_text("test"), "text has changed"),
        ("large", lambda p: flip(p, 0), "large has changed"),
        ("large", lambda p: flip(p, LARGE - 1), "large has changed"),
    ],
)
def test_what_changed_is_named(folder, manifest, name, damage, message):
    damage(folder / name)
    with pytest.raises(UserError, match=f"^a folder must .*{message}.* Write it again$"):
        check(folder, manifest)
