"""Build hook: generate `k3/v1/` from `proto/k3/v1/` before every wheel or editable build.

Run as a script it regenerates the stubs in place (`make proto`). Generated files are never committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # run as a script without hatchling installed
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent


def generate(root: Path = ROOT) -> list[Path]:
    """Compile every .proto under `root/proto` into `root`; returns the generated files."""
    from grpc_tools import protoc

    proto = root / "proto"
    files = sorted(proto.glob("k3/v1/*.proto"))
    if not files:
        raise FileNotFoundError(f"no .proto files under {proto / 'k3/v1'}")
    include = Path(protoc.__file__).parent / "_proto"
    out = ["--python_out", "--pyi_out", "--grpc_python_out"]
    args = ["protoc", f"-I{proto}", f"-I{include}", *(f"{o}={root}" for o in out)]
    status = protoc.main([*args, *(str(f) for f in files)])
    if status != 0:
        raise RuntimeError(f"protoc exited with {status}; run `make proto` to see its messages")
    package = root / "k3" / "v1"
    (package / "__init__.py").write_text('"""Generated from proto/k3/v1. Do not edit."""\n')
    return sorted(package.glob("*.py*"))


class ProtoBuildHook(BuildHookInterface):  # type: ignore[misc, valid-type]
    """Hatchling calls `initialize` before collecting files."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Generate the stubs; hatchling picks them up through `artifacts`."""
        generate(Path(self.root))


if __name__ == "__main__":
    for path in generate():
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
