"""TLS on real ports: trusted server, demanded client certificates, certificates renewed on disk."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from k3.config.tree import ServeConfig
from k3.errors import Unavailable
from k3.rpc import client, server
from k3.v1 import instance_pb2, instance_pb2_grpc

NOW = datetime.datetime.now(datetime.UTC)


@dataclass
class Authority:
    """Signs certificates for localhost."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        is_ca = x509.BasicConstraints(ca=True, path_length=0)
        cert = self._builder(self.subject, self.key).add_extension(is_ca, critical=True)
        self.path = str(self.folder / f"{self.name}.pem")
        signed = cert.sign(self.key, hashes.SHA256())
        Path(self.path).write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        day = datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - day)
            .not_valid_after(NOW + day)
        )

    def issue(self, stem: str) -> tuple[str, str]:
        """Paths of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        local = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), local])
        cert = self._builder(subject, key).add_extension(names, critical=False)
        cert_path, key_path = self.folder / f"{stem}.crt", self.folder / f"{stem}.key"
        signed = cert.sign(self.key, hashes.SHA256())
        cert_path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return str(cert_path), str(key_path)


class Describes(instance_pb2_grpc.InstanceServiceServicer):
    async def Describe(self, request, context):
        return instance_pb2.DescribeResponse(instance_id="secure")


async def describe(address: str, tls: client.ClientTls | None, timeout_s: float = 20.0) -> str:
    """The instance id, or Unavailable when no connection comes about in time."""
    pool = client.ChannelPool(tls)
    try:
        channel = await pool.ready(address, timeout_s)
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        answer = await stub.Describe(instance_pb2.DescribeRequest(), timeout=5)
        return answer.instance_id
    except grpc.aio.AioRpcError as error:
        raise Unavailable(str(error.details())) from error
    finally:
        await pool.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


async def secure_server(serve: ServeConfig) -> tuple[grpc.aio.Server, str]:
    grpc_server = server.make_server(4)
    instance_pb2_grpc.add_InstanceServiceServicer_to_server(Describes(), grpc_server)
    port = server.bind(grpc_server, serve)
    await grpc_server.start()
    return grpc_server, f"127.0.0.1:{port}"


async def test_only_clients_that_trust_the_authority_connect(authority, tmp_path):
    cert, key = authority.issue("server")
    grpc_server, address = await secure_server(ServeConfig(tls_cert=cert, tls_key=key))
    try:
        assert await describe(address, client.client_tls(authority.path, "", "")) == "secure"
        for tls in (None, client.client_tls(Authority(tmp_path, "other").path, "", "")):
            with pytest.raises(Unavailable):
                await describe(address, tls, 1.0)
    finally:
        await grpc_server.stop(None)


async def test_with_client_auth_a_certificate_is_demanded(authority, tmp_path):
    cert, key = authority.issue("server")
    stranger = Authority(tmp_path, "other").issue("stranger")
    serve = ServeConfig(tls_cert=cert, tls_key=key, tls_ca=authority.path, tls_client_auth=True)
    grpc_server, address = await secure_server(serve)
    try:
        own = client.client_tls(authority.path, *authority.issue("client"))
        assert await describe(address, own) == "secure"
        for pair in (("", ""), stranger):
            with pytest.raises(Unavailable):
                await describe(address, client.client_tls(authority.path, *pair), 1.0)
    finally:
        await grpc_server.stop(None)


async def test_a_renewed_certificate_serves_new_connections(authority, tmp_path):
    cert, key = authority.issue("server")
    grpc_server, address = await secure_server(ServeConfig(tls_cert=cert, tls_key=key))
    try:
        successor = Authority(tmp_path, "successor")
        with pytest.raises(Unavailable):
            await describe(address, client.client_tls(successor.path, "", ""), 1.0)
        stamp = os.stat(cert).st_mtime_ns  # noqa: PTH116
        for path in successor.issue("server"):
            os.utime(path, ns=(stamp + 10**9, stamp + 10**9))
        async with asyncio.timeout(30):
            assert await describe(address, client.client_tls(successor.path, "", "")) == "secure"
    finally:
        await grpc_server.stop(None)
