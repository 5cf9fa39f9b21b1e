"""`NoAgent`: the transfer agent of a rank that computes its own prompts. It reaches nobody and nobody reaches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from k3.errors import TransferError
from k3.transfer.agent import Handle, Indices, Lists, Region, Stripes

LIBRARY = "none"


class NoAgent:
    """Implements `TransferAgent`. Registers nothing: whoever asks for a transfer has a bug."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.regions: tuple[Region, ...] = ()

    def register(self, regions: Sequence[Region]) -> None:
        """Nothing is reachable."""

    def metadata(self) -> bytes:
        """Nobody can write here."""
        return b""

    def connect(self, name: str, metadata: bytes) -> None:
        """Raises TransferError."""
        self._refuse()

    def prepare(self, peer: str, source: Stripes, target: Stripes) -> Lists:
        """Raises TransferError."""
        self._refuse()

    def write(self, lists: Lists, source: Indices, target: Indices, record: bytes) -> Handle:
        """Raises TransferError."""
        self._refuse()

    def poll(self, handle: Handle) -> bool:
        """Raises TransferError."""
        self._refuse()

    def notify(self, peer: str, record: bytes) -> None:
        """Raises TransferError."""
        self._refuse()

    def notes(self) -> list[bytes]:
        """Nobody writes."""
        return []

    def disconnect(self, peer: str) -> None:
        """There is no peer."""

    def close(self) -> None:
        """Nothing to destroy."""

    def _refuse(self) -> NoReturn:
        raise TransferError(
            f"{self.name} takes part in no transfer: its instance computes its own prompts"
        )
