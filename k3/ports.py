"""TCP addresses as people write them, and free ports for processes that cannot be told `any`.

Free ports lie below the range from which the kernel takes ports of outgoing connections, so that none is taken between
the choice and the bind.
"""

from __future__ import annotations

import errno
import random
import re
import socket

from k3.errors import ConfigError, K3Error

PORTS = range(20_000, 32_000)
ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
PATTERN = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._*-]+):(?P<port>[0-9]{1,5}|\*)")


def is_address(text: str, form: re.Pattern[str] = ADDRESS) -> bool:
    """Whether `text` is host:port, an IPv6 host in brackets, with a port that can be dialled; PATTERN also takes *."""
    match = form.fullmatch(text)
    return match is not None and (match["port"] == "*" or 1 <= int(match["port"]) <= 65535)


def free_ports(n: int, host: str = "127.0.0.1") -> list[int]:
    """`n` different ports that can be bound now, outside the range of outgoing connections."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == n:
            break
        if is_free(port, host):
            found.append(port)
    if len(found) < n:
        raise K3Error(f"only {len(found)} free ports in {PORTS.start}-{PORTS.stop - 1}, need {n}")
    return found


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether `host:port` can be bound now. ConfigError where that is no matter of who else has it."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; name an IPv4 address of this machine "
                "and a port that this user may take (1024 and above)"
            ) from error
        return True
