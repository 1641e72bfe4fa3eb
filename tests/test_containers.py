"""The container files: pinned bases, users, services, and how the package is added."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from merlin_cowclip.workflows.commands.main import command_line
from tests.test_project import MAKEFILE, ROOT, pinned, project, requirements

CONTAINERS = ROOT / "containers"
DOCKERFILES = ("cpu.Dockerfile", "ngc.Dockerfile")


class Instruction(NamedTuple):
    name: str
    value: str


def instructions(name: str) -> list[Instruction]:
    text = (CONTAINERS / name).read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    split = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [Instruction(word.upper(), value) for word, value in split]


def values(name: str, instruction: str) -> list[str]:
    return [one.value for one in instructions(name) if one.name == instruction]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_base_is_pinned_and_the_user_is_not_root(name):
    (base,) = values(name, "ARG")
    image, _, digest = base.removeprefix("BASE=").partition("@")
    assert values(name, "FROM") == ["${BASE}"]
    assert "." in image.split("/")[0]  # named in full, as Podman and Buildah need it
    assert re.search(r":.*\d", image)
    assert re.fullmatch(r"(sha256:[0-9a-f]{64})?", digest)
    user = values(name, "USER")[-1]
    assert int(user) > 0
    order = [one.name for one in instructions(name)]
    assert "RUN" not in order[len(order) - order[::-1].index("USER") :]
    assert any(f"useradd --uid {user} " in run for run in values(name, "RUN"))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_labels_and_entry_point(name):
    words = [w.split("=", 1) for value in values(name, "LABEL") for w in shlex.split(value)]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in words}
    assert labels["title"] == project()["name"]
    assert labels["version"] == project()["version"]
    (entry,) = values(name, "ENTRYPOINT")
    assert json.loads(entry) == ["merlin-cowclip-entrypoint"]
    copied = {path for run in values(name, "RUN") for path in re.findall(r"containers/\S+", run)}
    admitted = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert copied <= {rule[1:] for rule in admitted if rule.startswith("!")}
    assert all((ROOT / path).exists() for path in copied)


def test_the_tests_run_in_the_versions_of_nvidias_image():
    ours, recorded = pinned("constraints-ngc.txt"), image_versions()
    required = {one.name for one in requirements()}
    assert recorded.keys() >= {"tensorflow", "dask", "distributed", "numpy", "pandas", "pyarrow"}
    for name in recorded.keys() & required:
        assert recorded[name] == ours[name]


def image_versions() -> dict[str, str]:
    lines = (CONTAINERS / "ngc-image.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: version for name, version in split}


# add.py, on packages without code: no network, and not in this environment.


def a_wheel(folder: Path, name: str, version: str, *requires: str, code: str = "") -> Path:
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        archive.writestr(
            f"{info}/METADATA", "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires), ""])
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
        if code:
            archive.writestr(f"{name.replace('-', '_')}.py", code)
    return path


class Image:
    """A Python environment that says it holds what is recorded of NVIDIA's image."""

    def __init__(self, folder: Path, recorded: str):
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.venv], check=True)
        (self.site,) = self.venv.glob("lib/python*/site-packages")
        for name in ("pip", "packaging"):
            of = metadata.distribution(name)
            shutil.copytree(of.locate_file(name), self.site / name)
            info = f"{name}-{of.version}.dist-info"
            shutil.copytree(of.locate_file(info), self.site / info)
        sys.path.insert(0, str(CONTAINERS))
        try:
            import stand_in
        finally:
            sys.path.remove(str(CONTAINERS))
        stand_in.write(recorded, self.site)

    def add(self, wheel: Path | str, *options: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **{"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"},
            **{"PIP_FIND_LINKS": str(self.wheels), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        }
        return subprocess.run(
            [self.venv / "bin/python", CONTAINERS / "add.py", *options, wheel],
            env=environment,
            capture_output=True,
            text=True,
        )

    def packages(self) -> set[str]:
        return {path.name.removesuffix(".dist-info") for path in self.site.glob("*.dist-info")}


@pytest.fixture
def image(tmp_path) -> Image:
    return Image(tmp_path, (CONTAINERS / "ngc-image.txt").read_text(encoding="utf-8"))


@pytest.mark.extended
def test_only_what_is_missing_is_added(image, tmp_path):
    a_wheel(image.wheels, "tensorflow", "2.12.1")
    a_wheel(image.wheels, "dask-cuda", "23.2.0")
    a_wheel(image.wheels, "optuna", "4.2.0", "numpy", "mako")
    a_wheel(image.wheels, "mako", "1.3.0")
    a_wheel(image.wheels, "importlib_metadata", "6.8.0")  # not the standard library's module
    ours = a_wheel(
        *(tmp_path, "merlin-cowclip", "0.1.0"),
        *("tensorflow<2.13,>=2.12", "dask-cuda>=22.12", "numpy<1.22", "optuna>=4.2"),
        "importlib_metadata>=6",
        *("tomli>=2; python_version < '3'", "horovod; extra == 'horovod'"),
    )
    before = image.packages()
    told = image.add(ours, "--dry-run")
    assert told.returncode == 0, told.stderr
    assert image.packages() == before
    assert told.stdout.splitlines() == [
        "numpy stays 1.22.4: tested with <1.22",
        "would add importlib-metadata 6.8.0",
        *("would add mako 1.3.0", "would add optuna 4.2.0"),
        f"{len(before)} packages of the image, none changed",
    ]
    done = image.add(ours)
    assert done.returncode == 0, done.stderr
    added = {"importlib_metadata-6.8.0", "mako-1.3.0", "optuna-4.2.0", "merlin_cowclip-0.1.0"}
    assert image.packages() == before | added
    assert "added optuna 4.2.0\n" in done.stdout


@pytest.mark.extended
def test_a_package_of_the_image_that_would_change_is_refused(image, tmp_path):
    a_wheel(image.wheels, "numpy", "1.26.0")
    a_wheel(image.wheels, "optuna", "4.2.0", "numpy>=1.23")
    before = image.packages()
    done = image.add(a_wheel(tmp_path, "merlin-cowclip", "0.1.0", "optuna"))
    assert done.returncode == 1
    assert "numpy==1.22.4" in done.stderr  # pip's own words
    assert done.stderr.endswith("add.py: error: pip install failed; what it says is above\n")
    assert image.packages() == before


@pytest.mark.extended
def test_another_environment_is_refused(image, tmp_path):
    shutil.rmtree(image.site / "tensorflow-2.12.0.dist-info")
    before = image.packages()
    done = image.add(a_wheel(tmp_path, "merlin-cowclip", "0.1.0", "tensorflow>=2.12"))
    assert done.returncode == 2
    assert done.stderr == (
        "add.py: error: not NVIDIA's Merlin image: tensorflow not found. "
        "Elsewhere: pip install --constraint constraints.txt .\n"
    )
    assert image.packages() == before


# compose.yaml and Slurm


def services() -> dict[str, dict]:
    return yaml.safe_load((CONTAINERS / "compose.yaml").read_text(encoding="utf-8"))["services"]


def test_the_services():
    parsed = yaml.safe_load((CONTAINERS / "compose.yaml").read_text(encoding="utf-8"))
    assert parsed["services"].keys() == {"demo", "notebooks", "test", "serve", "demo-cpu"}
    for name, service in parsed["services"].items():
        assert (CONTAINERS / service["build"]["context"]).resolve() == ROOT
        dockerfile = Path(service["build"]["dockerfile"])
        assert service["image"] == f"merlin-cowclip:{dockerfile.stem}"
        made = " ".join(values(dockerfile.name, "RUN"))
        for volume in service["volumes"]:
            source, folder, *_ = volume.split(":")
            if source != "..":
                assert source in parsed["volumes"]
                assert folder in made  # owned by the user, before the volume is mounted
        assert ("deploy" in service) == (name != "demo-cpu")
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for name in ("demo", "demo-cpu"):
        command_line().parse_args(parsed["services"][name]["command"])


def test_the_service_test_is_make_test_gpu():
    recipe = re.search(r"^test-gpu:.*\n\t@(.*)$", MAKEFILE, re.MULTILINE)
    service = services()["test"]
    of_make = recipe.group(1).replace("$(GPU_PYTHON)", "python3").split()
    settings = [f"{name}={value}" for name, value in service["environment"].items()]
    assert [*settings, *service["entrypoint"], service["command"][-1]] == of_make


@pytest.mark.extended
def test_gpu_tests_need_only_pytest():
    """It has pytest, and neither pytest-xdist nor hypothesis."""
    lacking = "import sys; sys.modules.update(dict.fromkeys(('xdist', 'hypothesis')))"
    words = services()["test"]["command"]
    call = f"{lacking}; import pytest; sys.exit(pytest.main({[*words, '--collect-only', '-q']}))"
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
