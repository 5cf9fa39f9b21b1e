"""The image against the chart that runs it and the distribution that it holds. Nothing is built here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import pytest

from tests.chart.rendered import CHART, COMPONENTS, ROOT, Rendered

DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def found(pattern: str) -> str:
    """The group of a pattern that occurs once in the Dockerfile."""
    (value,) = re.findall(pattern, DOCKERFILE, re.MULTILINE)
    return value


def is_sent(path: str) -> bool:
    """Whether a file reaches the build: the last line that matches it, or a folder above it, decides."""
    above = [str(p) for p in (PurePosixPath(path), *PurePosixPath(path).parents)]
    sent = True
    for line in IGNORED:
        if any(fnmatchcase(part, line.removeprefix("!")) for part in above):
            sent = line.startswith("!")
    return sent


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_run_as_the_images_user_with_its_home_writable(
    rendered: Rendered, component: str
) -> None:
    security = rendered.pod(component)["securityContext"]
    user = f"{security['runAsUser']}:{security['runAsGroup']}"
    assert found(r"^USER (.*)$") == user
    uid, gid = user.split(":")
    assert f"groupadd --gid {gid}" in DOCKERFILE
    assert f"useradd --uid {uid} --gid {gid}" in DOCKERFILE
    mounts = {m["mountPath"]: m for m in rendered.container(component)["volumeMounts"]}
    assert not mounts[found(r"HOME=(\S+)$")].get("readOnly", False)


def test_what_its_head_and_the_readme_build_is_what_pods_ask_for(
    render: Callable[..., Rendered],
) -> None:
    image = render().container("router")["image"]
    for text in (DOCKERFILE, (CHART / "README.md").read_text()):
        assert set(re.findall(r"docker build -t (\S+)", text)) == {image}


def test_its_python_is_the_one_the_project_is_checked_for() -> None:
    version = found(r"^ARG PYTHON=(.*)$")
    assert version == PYPROJECT["tool"]["pyright"]["pythonVersion"]
    assert PYPROJECT["project"]["requires-python"] == f">={version}"


def test_it_holds_the_extras_of_every_process() -> None:
    extras = found(r"\.whl\)\[(.*)\]").split(",")
    assert extras == ["router", "engine"]
    assert set(extras) <= set(PYPROJECT["project"]["optional-dependencies"])


def test_versions_are_pinned_and_no_index_is_named() -> None:
    installs = re.findall(r"pip install .*", DOCKERFILE)
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
    assert "index-url" not in DOCKERFILE
    assert "://" not in DOCKERFILE


def test_only_the_variant_for_gpus_keeps_a_compiler() -> None:
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM)", DOCKERFILE, re.M | re.S))
    assert "gcc" in stages["cuda"]
    assert "apt-get" not in stages["cpu"]
    assert "apt-get" not in DOCKERFILE.split("FROM ${TORCH}")[1]


def test_everything_the_wheel_is_built_from_reaches_the_build() -> None:
    project, hatch = PYPROJECT["project"], PYPROJECT["tool"]["hatch"]["build"]
    files = ["pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]]
    files += [hatch["hooks"]["custom"]["path"], "proto/k3/v1/plan.proto"]
    files += [f"{folder}/__init__.py" for folder in hatch["targets"]["wheel"]["packages"]]
    files += ["k3/assets/tiny/config.json", "kernels/k3_kernels/cpu/src/norm.cpp"]
    assert [f for f in files if not is_sent(f)] == []
    assert [f for f in files if not (ROOT / f).exists()] == []


def test_what_the_build_makes_and_what_it_does_not_need_stays_behind() -> None:
    made = ["k3/v1/plan_pb2.py", "kernels/k3_kernels/cpu/lib/libk3cpu.x86-64-v3.so"]
    others = [".git/HEAD", ".venv/bin/python", "tests/chart/test_image.py", "k3/__pycache__/x.pyc"]
    assert [f for f in made + others if is_sent(f)] == []
