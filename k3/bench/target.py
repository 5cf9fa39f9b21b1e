"""The server a benchmark asks: the one at --url, awaited until it is ready, or with --local a cluster of its own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator
from contextlib import contextmanager

import httpx
from rich.console import Console

from k3.cluster import LocalCluster, Options
from k3.errors import K3Error

POLL_S = 0.5


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Flags that name the server."""
    p.add_argument(
        "--url", type=address, default="http://127.0.0.1:8000", help="the server's address"
    )
    p.add_argument(
        "--local", action="store_true", help="start a cluster for this run instead of --url"
    )
    p.add_argument("--api-key", default="", help="sent as a bearer token")
    p.add_argument("--wait-s", type=float, default=120.0, help="for the server to be ready")


def address(text: str) -> str:
    """Type of --url: where the server is, without a path behind it."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise argparse.ArgumentTypeError(f"{text}: expected for example http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


@contextmanager
def server(
    args: argparse.Namespace, console: Console, flags: tuple[str, ...] = ()
) -> Generator[str]:
    """Address of a ready server. flags: of every service of a cluster started here."""
    if not args.local:
        await_ready(args.url, args.wait_s, console)
        yield args.url
        return
    console.print("starting a local cluster")
    options = Options(router_flags=flags, prefill_flags=flags, decode_flags=flags)
    with LocalCluster(options) as cluster:
        yield cluster.url


def await_ready(url: str, wait_s: float, console: Console) -> None:
    """Return once `url` says it is ready. K3Error with its last reason after `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    is_told = False
    while (reason := why_not_ready(url)) is not None:
        if time.monotonic() > deadline:
            raise K3Error(
                f"{url} was not ready within {wait_s:g} s: {reason}; start one with k3-local, name "
                "another with --url, or let this command start its own with --local"
            )
        if not is_told:
            console.print(f"waiting up to {wait_s:g} s for {url}", markup=False)
            is_told = True
        time.sleep(POLL_S)


def why_not_ready(url: str) -> str | None:
    """None when the router at `url` is ready, else what it, or the connection to it, says."""
    try:
        answer = httpx.get(f"{url}/ready", timeout=10.0, trust_env=False)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    if answer.status_code == 200:
        return None
    return f"HTTP {answer.status_code}: {answer.text[:200]}"
