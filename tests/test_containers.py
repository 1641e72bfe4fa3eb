"""The container files and their page: rules for images, and commands and flags that exist."""

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
from tests.test_environments import ROOT, pinned, requirements, tomllib

CONTAINERS = ROOT / "containers"
DOCKERFILES = ("cpu.Dockerfile", "ngc.Dockerfile")
PAGE = ROOT / "docs" / "containers.md"
PAGES = (PAGE, ROOT / "README.md", *(CONTAINERS / f for f in (*DOCKERFILES, "compose.yaml")))
# What each command's own help lists, of what we write; an option with a value has a number.
OPTIONS: dict[str, dict[str, int]] = {
    "docker build": {"-f": 1, "-t": 1, "--build-arg": 1},
    "docker run": {
        **{"--rm": 0, "-it": 0, "--gpus": 1, "-v": 1, "-w": 1, "--entrypoint": 1},
        **{"--shm-size": 1, "-p": 1},
    },
    "docker compose": {"-f": 1},
    "horovodrun": {"-np": 1, "-H": 1, "-p": 1},
    "sbatch": {"--nodes": 1},
}


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


def project() -> dict[str, str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def labels(name: str) -> dict[str, str]:
    words = [word.split("=", 1) for value in values(name, "LABEL") for word in shlex.split(value)]
    return {key.removeprefix("org.opencontainers.image."): value for key, value in words}


def base(name: str) -> str:
    """What FROM is where nothing is said."""
    assert values(name, "FROM") == ["${BASE}"]
    (argument,) = values(name, "ARG")
    key, _, image = argument.partition("=")
    assert key == "BASE"
    return image


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_base_is_pinned(name):
    image, _, digest = base(name).partition("@")
    registry, _, tag = image.rpartition(":")
    assert "." in registry.split("/")[0]  # named in full: Podman and Buildah ask otherwise
    assert re.search(r"\d", tag)
    assert re.fullmatch(r"(sha256:[0-9a-f]{64})?", digest)
    assert labels(name)["base.name"] == image


def test_the_bases():
    assert base("ngc.Dockerfile") == "nvcr.io/nvidia/merlin/merlin-tensorflow:23.12"
    assert base("cpu.Dockerfile").startswith("docker.io/library/python:3.11-slim-bookworm@sha256:")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_who_runs_is_not_root(name):
    user = values(name, "USER")[-1]
    assert int(user) > 0
    order = [one.name for one in instructions(name)]
    last_user = len(order) - 1 - order[::-1].index("USER")
    assert "RUN" not in order[last_user:]
    assert any(f"useradd --uid {user} " in run for run in values(name, "RUN"))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_labels_health_check_and_entry_point(name):
    assert labels(name).keys() == {"title", "description", "version", "licenses", "base.name"}
    assert labels(name)["title"] == project()["name"]
    assert labels(name)["version"] == project()["version"]
    (check,) = values(name, "HEALTHCHECK")
    program, *arguments = json.loads(check.partition("CMD ")[2])
    accepted(program, arguments)
    (entry,) = values(name, "ENTRYPOINT")
    assert json.loads(entry) == ["merlin-cowclip-entrypoint"]
    (default,) = values(name, "CMD")
    accepted("merlin-cowclip", json.loads(default))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_nothing_is_fetched_but_by_pip(name):
    text = " ".join(one.value for one in instructions(name))
    assert not re.search(r"\b(curl|wget|apt-get|apt|git clone|ADD)\b|:latest|https?://", text)
    for install in re.findall(r"pip install [^&]*", text):
        assert "--no-cache-dir" in install
        assert "--constraint constraints.txt" in install


def test_a_build_sees_what_it_copies_and_no_more():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    admitted = {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / path).exists() for path in admitted)
    assert {"plugins", "models", "workflows", "pyproject.toml", "README.md"} <= admitted
    used = set()
    for name in DOCKERFILES:
        assert values(name, "COPY") == [". ."]
        for run in values(name, "RUN"):
            used |= set(re.findall(r"containers/\S+|constraints\S*\.txt", run))
    assert used <= admitted


def test_the_entry_point_hands_its_arguments_on(tmp_path):
    program = tmp_path / "merlin-cowclip"
    program.write_text('#!/bin/sh\nfor word; do echo "<$word>"; done\n', encoding="utf-8")
    program.chmod(0o755)
    call = [str(CONTAINERS / "entrypoint.sh"), "demo", "--out", "a b"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["<demo>", "<--out>", "<a b>"]


# What is recorded of NVIDIA's image.


def test_what_is_recorded_is_what_the_tests_run_on():
    ours, recorded = pinned("constraints-ngc.txt"), image_versions()
    required = {one.name for one in requirements()}
    assert recorded.keys() >= {"tensorflow", "dask", "distributed", "numpy", "pandas", "pyarrow"}
    for name in recorded.keys() & required:
        assert recorded[name] == ours[name]


def image_versions() -> dict[str, str]:
    lines = (CONTAINERS / "ngc-image.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: version for name, version in split}


# add.py, on packages without code: no network, no pip of this environment.


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


def test_newer_code_of_the_same_version_takes_the_olds_place(image, tmp_path):
    """After a `git pull` pip left what it had, and the image had the old code without a word."""
    for code in ("AGE = 'old'", "AGE = 'new'"):
        done = image.add(a_wheel(tmp_path, "merlin-cowclip", "0.1.0", code=code))
        assert done.returncode == 0, done.stderr
    assert (image.site / "merlin_cowclip.py").read_text(encoding="utf-8") == "AGE = 'new'"


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_package_of_the_image_that_would_change_is_refused(image, tmp_path, options):
    a_wheel(image.wheels, "numpy", "1.26.0")
    a_wheel(image.wheels, "optuna", "4.2.0", "numpy>=1.23")
    before = image.packages()
    done = image.add(a_wheel(tmp_path, "merlin-cowclip", "0.1.0", "optuna"), *options)
    assert done.returncode == 1
    assert "numpy==1.22.4" in done.stderr  # pip's own words
    assert done.stderr.endswith("add.py: error: pip install failed; what it says is above\n")
    assert image.packages() == before


def test_a_word_is_no_package_of_an_index(image):
    """pip takes one for a name there, where a folder of that name is meant."""
    a_wheel(image.wheels, "stranger", "1.0.0")
    done = image.add("stranger", "--dry-run")
    assert done.returncode == 2
    assert done.stderr == "add.py: error: neither a folder nor a wheel: 'stranger'\n"


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


# compose.yaml


def services() -> dict[str, dict]:
    return yaml.safe_load((CONTAINERS / "compose.yaml").read_text(encoding="utf-8"))["services"]


def test_the_services():
    parsed = yaml.safe_load((CONTAINERS / "compose.yaml").read_text(encoding="utf-8"))
    assert parsed["services"].keys() == {"demo", "notebooks", "test", "serve", "demo-cpu"}
    for name, service in parsed["services"].items():
        assert (CONTAINERS / service["build"]["context"]).resolve() == ROOT
        dockerfile = service["build"]["dockerfile"]
        assert service["image"] == f"merlin-cowclip:{Path(dockerfile).stem}"
        made = " ".join(values(Path(dockerfile).name, "RUN"))
        for volume in service["volumes"]:
            source, folder, *_ = volume.split(":")
            if source == "..":
                continue
            assert source in parsed["volumes"]
            assert folder in made  # the user's own, before the volume is
        reserved = service.get("deploy")
        if name == "demo-cpu":
            assert reserved is None
        else:
            (device,) = reserved["resources"]["reservations"]["devices"]
            assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


@pytest.mark.parametrize("name", ["demo", "demo-cpu"])
def test_a_services_command_is_accepted(name):
    assert "entrypoint" not in services()[name]
    accepted("merlin-cowclip", services()[name]["command"])


def test_the_service_test_is_make_test_gpu():
    recipe = re.search(r"^test-gpu:.*\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    service = services()["test"]
    of_make = recipe.group(1).replace("$(GPU_PYTHON)", "python3").split()
    settings = [f"{name}={value}" for name, value in service["environment"].items()]
    assert [*settings, *service["entrypoint"], service["command"][-1]] == of_make


def test_the_gpus_checks_are_found_without_what_nvidias_image_lacks():
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


@pytest.mark.parametrize("name", ["notebooks", "serve"])
def test_ports_are_for_this_machine_alone(name):
    ports = [port.rsplit(":", 1) for port in services()[name]["ports"]]
    assert all(outside == f"127.0.0.1:{inside}" for outside, inside in ports)


def test_the_server_has_a_repository_that_export_wrote():
    """At the path that the page exports to."""
    (option,) = [w for w in services()["serve"]["command"] if w.startswith("--model-repository=")]
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("docker run"))
    words = shlex.split(line)
    home = words[words.index("-v") + 1].split(":")[1]
    served = option.partition("=")[2].replace("${REPOSITORY:-repository}", "repository")
    assert served == f"{Path(home).parent}/{words[words.index('--out') + 1]}"


def test_compose_and_docker_share_volumes():
    parsed = yaml.safe_load((CONTAINERS / "compose.yaml").read_text(encoding="utf-8"))
    named = {volume["name"] for volume in parsed["volumes"].values()}
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    used = re.findall(r" -v ([\w-]+):", "".join(page.read_text("utf-8") for page in pages))
    assert len(used) > 4
    assert set(used) <= named


# Commands on the page and in the files.


def accepted(program: str, arguments: list[str]) -> None:
    """A program of ours takes these arguments; Triton's server, those of the service."""
    if program == "tritonserver":
        folder, *others = services()["serve"]["command"]
        assert arguments[0].partition("=")[0] == folder.partition("=")[0]
        assert arguments[1:] == others
        return
    assert program == "merlin-cowclip"
    if arguments == ["--help"]:
        return
    command_line().parse_args(arguments)  # exits with 2 where not


def told_commands() -> list[str]:
    """Every call of a program in the code blocks of pages, and of Docker in the files' comments."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        if path.suffix == ".md":
            blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
            programs = "docker|horovodrun|make|merlin-cowclip|sbatch|IMAGE="
            found += re.findall(rf"^(?:{programs}).*", blocks, re.MULTILINE)
        else:
            found += re.findall(r"^# +(docker [a-z]+ -f .*?)(?:  .*)?$", text, re.MULTILINE)
    assert len(found) > 20
    return found


def without_options(words: list[str], options: dict[str, int]) -> list[str]:
    while words and words[0].startswith("-"):
        assert words[0] in options
        words = words[1 + options[words[0]] :]
    return words


def check(line: str) -> None:
    words = shlex.split(line.removeprefix("IMAGE=merlin-cowclip.sif "), comments=True)
    if words[0] == "docker":
        kind = f"docker {words[1]}"
        rest = without_options(words[2:], OPTIONS[kind])
        if kind == "docker build":
            assert rest == ["."]
            assert (ROOT / words[words.index("-f") + 1]).is_file()
        elif kind == "docker compose":
            assert words[words.index("-f") + 1] == "containers/compose.yaml"
            assert rest[0] in ("run", "up")
            assert rest[-1] in services()
            assert rest[1:-1] == (["--rm"] if rest[0] == "run" else [])
        else:
            image, *inside = rest
            assert image in {service["image"] for service in services().values()}
            if "--entrypoint" in words:
                inside = [words[words.index("--entrypoint") + 1], *inside]
            else:
                inside = ["merlin-cowclip", *inside]
            check(shlex.join(inside))
    elif words[0] == "horovodrun":
        check(shlex.join(without_options(words[1:], OPTIONS["horovodrun"])))
    elif words[0] == "sbatch":
        script, *rest = without_options(words[1:], OPTIONS["sbatch"])
        assert (ROOT / script).is_file()
        assert rest == ["DATA", "RUN"]
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    else:
        accepted(words[0], words[1:])


@pytest.mark.parametrize("line", told_commands())
def test_a_command_that_is_told_exists(line):
    check(line)


def test_targets_and_options_within_sentences():
    text = PAGE.read_text(encoding="utf-8")
    for code in re.findall(r"`(make [^`]*)`", text):
        check(code)
    assert {*re.findall(r"`(make [a-z-]+)`", text)} == {"make test-gpu", "make containers-test"}
    assert "--dry-run" in (CONTAINERS / "add.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["entrypoint.sh", "test.sh", "slurm.sbatch"])
def test_scripts_are_whole(script):
    shell = "sh" if script == "entrypoint.sh" else "bash"
    subprocess.run([shell, "-n", CONTAINERS / script], check=True)


def test_the_slurm_job_asks_for_the_hosts_that_it_got(tmp_path):
    """With a scontrol and a horovodrun that say what they were told."""
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


def test_what_is_missing_for_the_builds_is_told(tmp_path):
    for name in ("bash", "dirname", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name))
    call = [shutil.which("bash"), CONTAINERS / "test.sh"]
    done = subprocess.run(call, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "make containers-test needs buildah: on Debian, apt-get install buildah mmdebstrap\n"
    )
