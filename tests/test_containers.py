"""The containers' programs, and what NVIDIA's image lacks."""

import re
import subprocess

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from merlin_cowclip.workflows.commands.main import cli
from tests.test_project import ROOT, pinned, project

CONTAINERS = ROOT / "containers"
# NVIDIA's image is built around these.
IMAGE = {"tensorflow", "numpy", "pandas", "pyarrow", "numba", "protobuf", "pynvml", "setuptools"}
IMAGE |= {"merlin-core", "merlin-dataloader", "merlin-models", "nvtabular"}
IMAGE |= {"dask", "distributed", "dask-cuda"}


def program(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ([], "merlin-cowclip"),
        (["export", "RUN"], "merlin-cowclip export RUN"),
        (["merlin-cowclip", "train", "a b"], "merlin-cowclip train a b"),
        (["bash", "-c", "echo $0 $1", "x", "y"], "x y"),
    ],
)
def test_the_entry_point(tmp_path, words, runs):
    program(tmp_path / "merlin-cowclip", 'echo merlin-cowclip "$@"')
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    argv = ["sh", CONTAINERS / "entrypoint.sh", *words]
    assert subprocess.check_output(argv, env=path, text=True).strip() == runs
    text = (CONTAINERS / "entrypoint.sh").read_text(encoding="utf-8")
    (programs,) = re.findall(r"^  (.* \| .*)\) ;;", text, re.MULTILINE)
    assert cli.commands.keys().isdisjoint(programs.split(" | "))


def test_what_nvidias_image_lacks_is_listed():
    lines = (CONTAINERS / "ngc-requirements.txt").read_text(encoding="utf-8").splitlines()
    listed = [Requirement(line.split("#")[0]) for line in lines if not line.startswith("#")]
    pins = pinned("constraints-ngc.txt")
    assert all(one.specifier.contains(pins[canonicalize_name(one.name)]) for one in listed)
    needed = [*project()["dependencies"], *project()["optional-dependencies"]["workflows"]]
    names = {canonicalize_name(Requirement(text).name) for text in needed}
    assert names - IMAGE <= {canonicalize_name(one.name) for one in listed}


@pytest.mark.parametrize(("image", "inside"), [("", ""), ("x", "apptainer exec --nv x ")])
def test_the_slurm_job_asks_for_the_hosts_that_it_got(tmp_path, image, inside):
    program(tmp_path / "scontrol", "printf 'a\\nb\\n'")
    program(tmp_path / "horovodrun", 'echo "$@"')
    given = {"SLURM_JOB_NODELIST": "[a-b]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    given |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "IMAGE": image}
    argv = ["bash", CONTAINERS / "slurm.sbatch", "DATA", "RUN"]
    assert subprocess.check_output(argv, env=given, text=True) == (
        f"-np 8 -H a:4,b:4 {inside}merlin-cowclip train DATA --out RUN --batch-size 131072\n"
    )
