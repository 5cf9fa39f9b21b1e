"""Build hook: generate `k3/v1/` from `proto/k3/v1/` and the native CPU library before every wheel or editable build.

Beside protoc's own files each service gets a `*_pb2_grpc.pyi`, so that calls of its stub are typed. Without a C++
compiler the library is left out, with one line that says so, and CPUs compute by the torch reference.
Run as a script it regenerates both in place (`make proto`). Generated files are never committed.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

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
    write_service_types(package, args[:3], files)
    return sorted(package.glob("*.py*"))


def write_service_types(package: Path, protoc_args: list[str], files: list[Path]) -> None:
    """Write `*_pb2_grpc.pyi` for asyncio channels next to each generated service module."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from grpc_tools import protoc

    with TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        if protoc.main([*protoc_args, f"--descriptor_set_out={out}", *(str(f) for f in files)]):
            raise RuntimeError("protoc could not write a descriptor set")
        described = FileDescriptorSet.FromString(out.read_bytes())
    for file in described.file:
        if not file.service:
            continue
        module = Path(file.name).stem
        lines = ["from typing import Any", "import grpc", "import grpc.aio"]
        used = {t for s in file.service for m in s.method for t in (m.input_type, m.output_type)}
        homes = {
            f".{f.package}.{m.name}": Path(f.name).stem
            for f in described.file
            for m in f.message_type
        }
        lines += [f"from k3.v1 import {home}_pb2" for home in sorted({homes[t] for t in used})]
        for service in file.service:
            stub, servicer = [f"class {service.name}Stub:"], [f"class {service.name}Servicer:"]
            stub.append("    def __init__(self, channel: grpc.aio.Channel) -> None: ...")
            for method in service.method:
                asks, says = (
                    f"{homes[t]}_pb2.{t.rsplit('.', 1)[1]}"
                    for t in (method.input_type, method.output_type)
                )
                kind = "".join(
                    "Stream" if s else "Unary"
                    for s in (method.client_streaming, method.server_streaming)
                )
                stub.append(f"    {method.name}: grpc.aio.{kind}MultiCallable[{asks}, {says}]")
                servicer.append(
                    f"    def {method.name}(self, request: Any, context: Any) -> Any: ..."
                )
            lines += [*stub, *servicer]
            lines.append(
                f"def add_{service.name}Servicer_to_server(servicer: Any, server: grpc.aio.Server) -> None: ..."
            )
        (package / f"{module}_pb2_grpc.pyi").write_text("\n".join(lines) + "\n")


def build_native(root: Path = ROOT) -> list[Path]:
    """Compile the library of `kernels/k3_kernels/cpu`; where that fails leave none, and one line on stderr."""
    sys.path.insert(0, str(root / "kernels"))
    from k3_kernels.cpu.build import BuildError, build, remove

    try:
        return build()
    except BuildError as error:
        remove()
        sys.stderr.write(f"no native CPU library, torch computes instead: {error}\n")
        return []


class ProtoBuildHook(BuildHookInterface):  # type: ignore[misc, valid-type]
    """Hatchling calls `initialize` before collecting files."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Generate stubs and library; hatchling picks them up through `artifacts`."""
        generate(Path(self.root))
        if build_native(Path(self.root)) and self.target_name == "wheel" and version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}


if __name__ == "__main__":
    for path in generate() + build_native():
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
