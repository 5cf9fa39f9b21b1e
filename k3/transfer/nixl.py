"""`NixlAgent`: writes through NIXL's UCX backend. The only file that imports nixl.

Habits of the library that shape this file: errors are exceptions, a record leaves only when its handle is polled, a
handle can be posted again only after it ended, nothing cancels a posted write except destroying the agent, and names
must never be used twice. UCX reads its settings from the environment when the agent is built (`k3/rank/process.py`).
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import nixl._api as api  # pyright: ignore[reportMissingImports]
import nixl._bindings as bindings  # pyright: ignore[reportMissingImports]
import numpy as np

from k3.errors import TransferError
from k3.transfer.agent import (
    BATCHES,
    BatchesRefused,
    Handle,
    Indices,
    Lists,
    PeerLost,
    Region,
    Stripes,
    WriteFailed,
)

log = logging.getLogger("k3.transfer")
logging.getLogger("nixl").setLevel(logging.WARNING)

NIXL_VERSION = importlib.metadata.version("nixl")
KNOWN_VERSIONS = ("1.5.1",)
PROGRESS_DELAY_US = (
    2000  # idle agent: 1.5 % of a core; 1000: 3 %; 10000: large writes take twice as long
)
IDLE_CPU_LIMIT, IDLE_CHECK_S = 0.05, 0.5
METADATA_LIMIT = 1 << 20
LOST = (bindings.nixlRemoteDisconnectError, bindings.nixlNotFoundError)

T = TypeVar("T")


class NixlAgent:
    """See `TransferAgent`. One thread at a time may use it."""

    def __init__(self, prefix: str, *, is_batched: bool = False) -> None:
        """prefix: instance and rank, for people; the rest of the name is random. Raises TransferError.

        is_batched: all pieces of a handle are one call of the GPU's driver. Between GPUs that reach each other by CUDA
        IPC this is what makes pieces in random order fast; over TCP it does not work, see `BatchingAgent`.
        """
        self.name = f"{prefix}-{uuid.uuid4().hex[:12]}"
        self._regions: list[Region] = []
        self._registered: list[Any] = []
        self._sources: dict[Stripes, Any] = {}
        self._prepared: dict[int, tuple[str, Any, Any]] = {}
        self._n_prepared = 0
        self._live: dict[int, tuple[str, Any]] = {}  # the library's handles never leave this class
        self._n_handles = 0
        self._is_closed = False
        self._is_batched = is_batched and os.environ.get(BATCHES) != "0"
        self._proven: set[str] = set()  # peers that a write has reached
        before = _threads()
        try:
            self._agent = _build(self.name, is_batched=is_batched)
        except Exception as error:  # nixl raises anything
            raise TransferError(
                f"cannot build a NIXL agent: {error}; check UCX_TLS (it needs a transport with peer failure "
                "detection: unset it, or self,tcp) and UCX_NET_DEVICES (the device and lo must be up: an agent "
                "first dials itself)"
            ) from error
        self._threads = _threads() - before

    @property
    def regions(self) -> tuple[Region, ...]:
        """Pools registered so far."""
        return tuple(self._regions)

    def register(self, regions: Sequence[Region]) -> None:
        """Register whole pools, each once."""
        for region in regions:
            if any(region.base == known.base for known in self._regions):
                raise TransferError(
                    f"pool {region.name!r} at {region.base:#x} is registered already"
                )
            rows = [(region.base, region.n_bytes, region.device, region.name)]
            try:
                self._registered.append(self._agent.register_memory(rows, region.memory))
            except Exception as error:
                raise TransferError(
                    f"cannot register pool {region.name!r} ({region.n_bytes} bytes of {region.memory}): {error}"
                ) from error
            self._regions.append(region)

    def metadata(self) -> bytes:
        """Worker address and keys of this agent. Never log it."""
        blob = bytes(self._agent.get_agent_metadata())
        if len(blob) > METADATA_LIMIT:
            raise TransferError(
                f"agent metadata has {len(blob)} bytes, the limit is {METADATA_LIMIT}"
            )
        return blob

    def connect(self, name: str, metadata: bytes) -> None:
        """Load a peer; its worker is dialled at once, so a dead one is found here."""
        if len(metadata) > METADATA_LIMIT:
            raise PeerLost(
                f"metadata of {name!r} has {len(metadata)} bytes, the limit is {METADATA_LIMIT}"
            )
        try:
            found = _text(self._agent.add_remote_agent(metadata))
        except Exception as error:
            raise PeerLost(f"cannot load agent {name!r}: {_short(error)}") from error
        if found != name:
            self._quietly(lambda: self._agent.remove_remote_agent(found))
            raise PeerLost(f"metadata of agent {found!r} announced as {name!r}")
        self._peer_call(name, lambda: self._agent.make_connection(name))

    def prepare(self, peer: str, source: Stripes, target: Stripes) -> Lists:
        """One strided list per side; source lists are shared by all peers."""
        if source not in self._sources:
            self._sources[source] = self._peer_call(
                peer,
                lambda: self._agent.prep_xfer_dlist(
                    "NIXL_INIT_AGENT", _rows(source), source.memory
                ),
            )
        remote = self._peer_call(
            peer, lambda: self._agent.prep_xfer_dlist(peer, _rows(target), target.memory)
        )
        self._n_prepared += 1
        self._prepared[self._n_prepared] = (peer, self._sources[source], remote)
        return Lists(self._n_prepared)

    def write(self, lists: Lists, source: Indices, target: Indices, record: bytes) -> Handle:
        """Make and post one handle. On CMA the copy happens inside this call."""
        peer, local, remote = self._prepared[lists]
        made = self._peer_call(
            peer,
            lambda: self._agent.make_prepped_xfer(
                "WRITE", local, source, remote, target, notif_msg=record
            ),
        )
        self._n_handles += 1
        handle = Handle(self._n_handles)
        self._live[handle] = (peer, made)
        try:
            self._peer_call(peer, lambda: self._agent.transfer(made))
        except TransferError as error:
            self._release(handle)
            raise self._judged(peer, error) from error
        return handle

    def poll(self, handle: Handle) -> bool:
        """Ask for the state, which also drives the record out."""
        peer, made = self._live[handle]
        try:
            state = self._peer_call(peer, lambda: self._agent.check_xfer_state(made))
        except TransferError:
            self._release(handle)
            raise
        if state == "PROC":
            return False
        self._release(handle)
        if state != "DONE":
            raise WriteFailed(f"write to {peer} ended in state {state!r}")
        self._proven.add(peer)
        return True

    def notify(self, peer: str, record: bytes) -> None:
        """Send a record of its own."""
        self._peer_call(peer, lambda: self._agent.send_notif(peer, record))

    def notes(self) -> list[bytes]:
        """Records of all senders, in order of arrival per sender."""
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as error:
            raise TransferError(f"cannot read notifications: {_short(error)}") from error
        return [record for records in arrived.values() for record in records]

    def disconnect(self, peer: str) -> None:
        """Release the peer's lists, then forget it."""
        self._proven.discard(peer)
        for key, (name, _local, remote) in list(self._prepared.items()):
            if name == peer:
                del self._prepared[key]
                self._quietly(remote.release)
        self._quietly(lambda: self._agent.remove_remote_agent(peer))

    def close(self) -> None:
        """Destroy the library's agent; the sockets close, so landing stops, also of writes that never ended."""
        if self._is_closed:
            return
        self._is_closed = True
        was_idle = not self._live
        for handle in list(self._live):
            self._release(Handle(handle))
        for peer, _local, remote in self._prepared.values():
            self._quietly(remote.release)
            self._quietly(lambda peer=peer: self._agent.remove_remote_agent(peer))
        for local in self._sources.values():
            self._quietly(local.release)
        if was_idle:  # deregistering under a live write can crash the process
            for descriptors in self._registered:
                self._quietly(lambda d=descriptors: self._agent.deregister_memory(d))
        self._prepared.clear()
        self._sources.clear()
        self._registered.clear()
        self._agent.agent = None
        gc.collect()

    def check_idle_cpu(self) -> float:
        """Share of one core that the library's own threads use over half a second; warns above the limit."""
        start, spent = time.monotonic(), _cpu_s(self._threads)
        time.sleep(IDLE_CHECK_S)
        share = (_cpu_s(self._threads) - spent) / (time.monotonic() - start)
        if share > IDLE_CPU_LIMIT:
            log.warning(
                "idle transfer agent uses %.0f %% of a core, expected below %.0f %%: its progress thread may be "
                "spinning (nixl %s)",
                100 * share,
                100 * IDLE_CPU_LIMIT,
                NIXL_VERSION,
            )
        return share

    def _release(self, handle: Handle) -> None:
        _peer, made = self._live.pop(handle)
        self._quietly(lambda: self._agent.release_xfer_handle(made))

    def _judged(self, peer: str, error: TransferError) -> TransferError:
        """A peer that is lost before any write reached it may be one that takes no batches."""
        if self._is_batched and peer not in self._proven and isinstance(error, PeerLost):
            return BatchesRefused(str(error))
        return error

    def _peer_call(self, peer: str, call: Callable[[], T]) -> T:
        """Turn the library's exceptions into ours."""
        try:
            return call()
        except LOST as error:
            raise PeerLost(f"peer {peer} is gone: {_short(error)}") from error
        except Exception as error:
            raise WriteFailed(f"peer {peer}: {_short(error)}") from error

    def _quietly(self, call: Callable[[], object]) -> None:
        """Clean-up of something that may be gone already."""
        try:
            call()
        except Exception as error:
            log.debug("clean-up of agent %s: %s", self.name, _short(error))


@contextmanager
def _batches(is_batched: bool) -> Iterator[None]:
    """The library's switch for the time of a call: on where asked for, unless the user has turned it off.

    Other threads may read the environment meanwhile. A rank on a GPU begins with the switch on, so nothing is added or
    removed under them: at most the value is exchanged, for an agent without batches.
    """
    before = os.environ.get(BATCHES)
    if is_batched and before is None:
        os.environ[BATCHES] = "1"
    elif not is_batched and before is not None:
        os.environ[BATCHES] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(BATCHES, None)
        else:
            os.environ[BATCHES] = before


def _build(name: str, *, is_batched: bool) -> Any:
    """An agent whose progress thread sleeps between polls.

    The wrapper hard-codes a delay of 0, with which the thread spins for ever on every idle agent; the low-level
    constructor is replaced for the time of the call.
    """
    config = api.nixl_agent_config(
        enable_prog_thread=True,
        enable_listen_thread=False,
        backends=[],
        capture_telemetry=True,
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    original = bindings.nixlAgent

    def construct(agent_name: str, low_level: Any) -> Any:
        low_level.pthrDelay = PROGRESS_DELAY_US
        return original(agent_name, low_level)

    if NIXL_VERSION in KNOWN_VERSIONS:
        bindings.nixlAgent = construct
    else:
        log.warning("nixl %s is not one of %s: poll delay left alone", NIXL_VERSION, KNOWN_VERSIONS)
    try:
        agent = api.nixl_agent(name, config)
    finally:
        bindings.nixlAgent = original
    with _batches(is_batched):
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer", "num_workers": "1"})
    return agent


def _rows(stripes: Stripes) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """[rows, 5]: address, length, device, stride, count."""
    s = stripes
    return np.array(
        [(start, s.length, s.device, s.stride, s.count) for start in s.starts], dtype=np.uint64
    )


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def _cpu_s(threads: set[int]) -> float:
    """User and system seconds of these threads of this process."""
    ticks = 0
    for thread in threads:
        try:
            fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
