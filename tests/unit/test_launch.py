"""Where `k3-local` sends a flag, and how it finds ports."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from k3.cluster import LocalCluster, Options
from k3.errors import ConfigError
from k3.launch import options_of, parser, split_flags
from k3.ports import PORTS, free_ports, is_free


def test_a_bare_layout_flag_goes_to_decode() -> None:
    assert split_flags(["--cp", "2", "--max-rows=8"]) == {
        "prefill": [],
        "decode": ["--cp", "2", "--max-rows=8"],
        "router": [],
    }


def test_a_prefixed_flag_goes_to_its_service_without_the_prefix() -> None:
    flags = split_flags(["--prefill-pp", "2", "--router-log-level=debug", "--decode-pages", "99"])
    assert flags == {
        "prefill": ["--pp", "2"],
        "decode": ["--pages", "99"],
        "router": ["--log-level=debug"],
    }


def test_the_model_goes_to_everybody_and_page_size_to_both_engines() -> None:
    flags = split_flags(["--model", "/m", "--page-tokens", "32"])
    assert flags["router"] == ["--model", "/m"]
    assert flags["prefill"] == flags["decode"] == ["--model", "/m", "--page-tokens", "32"]


def test_the_prefix_cache_is_prefills() -> None:
    words = ["--cache-prefix", "on", "--cache-checkpoint-interval=64", "--cache-checkpoints", "9"]
    assert split_flags(words) == {"prefill": words, "decode": [], "router": []}


@pytest.mark.prefill
def test_with_role_both_decode_takes_what_is_prefills_and_no_prefill_is_started() -> None:
    words = ["--role", "both", "--pp", "2", "--cache-prefix", "on", "--page-tokens", "32"]
    args, rest = parser().parse_known_args([*words, "--preset", ""])
    options = options_of(args, rest)
    assert options.n_prefills == 0
    assert options.decode_flags == tuple(words)
    assert options.prefill_flags == ()
    with pytest.raises(ConfigError, match="no prefill is started"):
        split_flags(["--prefill-pp", "2"], is_alone=True)
    args, rest = parser().parse_known_args(["--role", "both", "--prefills", "2"])
    with pytest.raises(ConfigError, match="--prefills 2 with --role both"):
        options_of(args, rest)


def test_a_flag_without_a_value_keeps_its_neighbour_apart() -> None:
    flags = split_flags(["--cache-fill-nan", "--http-strict-params", "--pages", "5"])
    assert flags["prefill"] == ["--cache-fill-nan"]
    assert flags["router"] == ["--http-strict-params"]
    assert flags["decode"] == ["--cache-fill-nan", "--pages", "5"]


@pytest.mark.parametrize("words", [["--decodes", "0"], ["--prefills", "0"]])
def test_a_system_in_which_nobody_could_answer_is_refused(words: list[str]) -> None:
    args, rest = parser().parse_known_args(words)
    with pytest.raises(ConfigError, match="nobody could answer"):
        options_of(args, rest)


@pytest.mark.parametrize("words", [["--port", "65536"], ["--port", "x"], ["--decodes", "-1"]])
def test_numbers_out_of_range_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_known_args(words)


def test_a_stray_word_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'rows'"):
        split_flags(["--cp=2", "rows"])


@pytest.mark.parametrize(
    "flag", ["--serve-port", "--decode-ops-port", "--prefill-port", "--http-port", "--router-host"]
)
def test_where_services_listen_is_not_for_their_flags(flag: str) -> None:
    with pytest.raises(ConfigError, match="ports are chosen here"):
        split_flags([flag, "5"])


@pytest.mark.parametrize("text", ["nan", "0", "-1", "inf", "soon"])
def test_a_start_has_an_end(text: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_known_args(["--start-timeout-s", text])


def flags_of_engines(*words: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    args, rest = parser().parse_known_args(words)
    options = options_of(args, rest)
    return options.prefill_flags, options.decode_flags


def test_the_embedded_model_drafts_with_its_own_drafter_until_something_else_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ("--drafter", "draft-mla")
    assert flags_of_engines() == (own, (*own, "--draft-tokens", "7"))
    _, decode = flags_of_engines("--draft-tokens", "0")
    assert decode == (*own, "--draft-tokens", "7", "--draft-tokens", "0")  # the last one counts
    for chosen in (("--drafter", "d"), ("--spec-drafter=d",), ("--model", "m"), ("--preset", "")):
        assert not [word for side in flags_of_engines(*chosen) for word in side if "tokens" in word]
    monkeypatch.setenv("K3_MODEL__PATH", "m")
    assert flags_of_engines() == ((), ())


def test_ports_are_free_different_and_below_those_of_outgoing_connections() -> None:
    ports = free_ports(63)
    assert len(set(ports)) == 63
    assert set(ports) <= set(PORTS)


def test_a_bound_port_is_not_free() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        assert not is_free(s.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.77", "::1", "no such host"])
def test_an_address_that_is_not_ours_is_refused_and_not_taken_for_one_in_use(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        is_free(8000, host)


def test_every_instance_has_ports_of_its_own_and_the_router_knows_them() -> None:
    cluster = LocalCluster(Options(n_prefills=2, n_decodes=3))
    ports = [m.address for m in cluster.members] + [m.ops for m in cluster.members[:-1]]
    assert len(set(ports)) == len(ports) == 11
    flags = cluster.router.flags
    prefills = flags[flags.index("--fleet-prefills") + 1]
    assert prefills == ",".join(m.address for m in cluster.prefills)


def test_a_taken_port_is_exit_code_4_and_names_a_free_one() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "k3.launch", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode == 4
    assert f"port {port}" in done.stderr
    named = int(done.stderr.split("--port ")[1].split()[0])
    assert named in PORTS
