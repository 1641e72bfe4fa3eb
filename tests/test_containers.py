"""The container files: pinned bases, users, labels, services."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from merlin_cowclip.workflows.commands.main import cli
from tests.test_project import MAKEFILE, ROOT, pinned, project

CONTAINERS = ROOT / "containers"
ENTRYPOINT = (CONTAINERS / "entrypoint.sh").read_text(encoding="utf-8")
DOCKERFILES = ("cpu.Dockerfile", "ngc.Dockerfile")


def instructions(name: str) -> list[tuple[str, str]]:
    """Of a Dockerfile: word and value."""
    text = (CONTAINERS / name).read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    split = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word.upper(), value) for word, value in split]


def values(name: str, instruction: str) -> list[str]:
    return [value for word, value in instructions(name) if word == instruction]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_base_user_labels_and_entry_point(name):
    base, *_ = values(name, "ARG")
    image, _, digest = base.removeprefix("BASE=").partition("@")
    assert values(name, "FROM") == ["${BASE}"]
    assert "." in image.split("/")[0]  # named in full, as Podman and Buildah need it
    assert re.search(r":.*\d", image)
    assert re.fullmatch(r"(sha256:[0-9a-f]{64})?", digest)
    user, runs = values(name, "USER")[-1], values(name, "RUN")
    assert int(user) > 0
    order = [word for word, _ in instructions(name)]
    assert "RUN" not in order[len(order) - order[::-1].index("USER") :]
    assert any(f"useradd --uid {user} " in run for run in runs)
    (folders,) = re.findall(r"install -d -m 1777 -o \w+ -g \w+ (.*)", runs[0])  # for every user
    assert {"/home/cowclip", "/home/cowclip/data", "/home/cowclip/runs"} <= set(folders.split())
    assert {"HOME=/home/cowclip", "USER=cowclip"} <= set(values(name, "ENV")[-1].split())
    words = [w.split("=", 1) for value in values(name, "LABEL") for w in shlex.split(value)]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in words}
    assert (labels["title"], labels["version"]) == (project()["name"], "${VERSION}")
    (entry,) = values(name, "ENTRYPOINT")
    assert json.loads(entry) == ["merlin-cowclip-entrypoint"]
    assert values(name, "HEALTHCHECK") == []  # of a command that ends
    copied = {path for run in runs for path in re.findall(r"containers/\S+", run)}
    admitted = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert copied <= {rule[1:] for rule in admitted if rule.startswith("!")}
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ([], "merlin-cowclip"),
        (["--help"], "merlin-cowclip --help"),
        (["export", "RUN"], "merlin-cowclip export RUN"),
        (["merlin-cowclip", "train", "a b"], "merlin-cowclip train a b"),
        (["bash", "-c", "echo $0 $1", "x", "y"], "x y"),
        (["/bin/echo", "x"], "x"),
    ],
)
def test_the_entry_point(tmp_path, words, runs):
    ours = tmp_path / "merlin-cowclip"
    ours.write_text('#!/bin/sh\necho merlin-cowclip "$@"\n', encoding="utf-8")
    ours.chmod(0o755)
    done = subprocess.run(
        ["sh", CONTAINERS / "entrypoint.sh", *words],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == runs
    (programs,) = re.findall(r"^  (.* \| .*)\) ;;", ENTRYPOINT, re.MULTILINE)
    assert cli.commands.keys().isdisjoint(programs.split(" | "))


# NVIDIA's image is built around these.
IMAGE = {"tensorflow", "numpy", "pandas", "pyarrow", "numba", "protobuf", "pynvml", "setuptools"}
IMAGE |= {"merlin-core", "merlin-dataloader", "merlin-models", "nvtabular"}
IMAGE |= {"dask", "distributed", "dask-cuda"}


def test_what_nvidias_image_lacks_is_listed():
    lines = (CONTAINERS / "ngc-requirements.txt").read_text(encoding="utf-8").splitlines()
    listed = [Requirement(line.split("#")[0]) for line in lines if not line.startswith("#")]
    pins = pinned("constraints-ngc.txt")
    assert all(one.specifier.contains(pins[canonicalize_name(one.name)]) for one in listed)
    extras = project()["optional-dependencies"]
    needed = [*project()["dependencies"], *extras.get("workflows", [])]
    names = {canonicalize_name(Requirement(text).name) for text in needed}
    assert names - IMAGE <= {canonicalize_name(one.name) for one in listed}


def test_the_services():
    parsed = yaml.safe_load((CONTAINERS / "compose.yaml").read_text(encoding="utf-8"))
    services = parsed["services"]
    assert services.keys() == {"demo", "notebooks", "test", "serve", "demo-cpu"}
    for name, service in services.items():
        assert (CONTAINERS / service["build"]["context"]).resolve() == ROOT
        dockerfile = Path(service["build"]["dockerfile"])
        assert service["image"] == f"merlin-cowclip:{dockerfile.stem}"
        made = " ".join(values(dockerfile.name, "RUN"))
        for volume in service["volumes"]:
            source, folder, *_ = volume.split(":")
            if source != "..":
                assert source in parsed["volumes"]
                assert folder in made  # writable, before the volume is mounted
        assert ("deploy" in service) == (name != "demo-cpu")
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for name in ("demo", "demo-cpu"):
        words = services[name]["command"]
        cli.commands[words[0]].make_context(words[0], words[1:])
    recipe = re.search(r"^test-gpu:.*\n\t@(.*)$", MAKEFILE, re.MULTILINE)
    of_make = recipe.group(1).replace("$(GPU_PYTHON)", "python3").split()
    settings = [f"{key}={value}" for key, value in services["test"]["environment"].items()]
    words = services["test"]["command"]
    assert [*settings, *words[:3], words[-1]] == of_make


@pytest.mark.extended
def test_gpu_tests_need_only_pytest():
    """It has pytest, and neither pytest-xdist nor hypothesis."""
    lacking = "import sys; sys.modules.update(dict.fromkeys(('xdist', 'hypothesis')))"
    words = ["-p", "no:cacheprovider", "tests/gpu", "--collect-only", "-q"]
    call = f"{lacking}; import pytest; sys.exit(pytest.main({words}))"
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_slurm_job_asks_for_the_hosts_that_it_got(tmp_path):
    for name, body in {"scontrol": "printf 'a\\nb\\n'", "horovodrun": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    given = {"SLURM_JOB_NODELIST": "[a-b]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    for image, inside in (("", ""), ("x.sif", "apptainer exec --nv x.sif ")):
        done = subprocess.run(
            ["bash", CONTAINERS / "slurm.sbatch", "DATA", "RUN"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "IMAGE": image, **given},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == (
            f"-np 8 -H a:4,b:4 {inside}merlin-cowclip train DATA --out RUN --batch-size 131072\n"
        )
