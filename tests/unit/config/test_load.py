"""Sources, precedence, values, resolution and the way out of every wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from k3 import errors
from k3.config import load
from k3.config.commandline import CommandLine
from k3.config.keys import flatten, keys_of
from k3.config.presets import PRESETS
from k3.config.resolve import Machine, resolve_names
from k3.config.speculation import records, snapshots
from k3.config.tree import EngineConfig, RouterConfig, SpecConfig

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
ENGINE_KEYS = keys_of(EngineConfig)


def engine(role: str = "decode", environ: dict[str, str] | None = None, **line: object):
    return load.load_engine(role, CommandLine(**({"flags": {}} | line)), environ or {})


def written(tmp_path: Path, document: object) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def codes(loaded: load.Loaded) -> list[str]:
    return [problem.code for problem in loaded.problems]


def test_defaults_are_accepted_and_leave_nothing_open():
    for role in ("prefill", "decode"):
        config = engine(role).require()
        values = flatten(config)
        assert "auto" not in values.values()
        assert config.role == role
        assert 0 not in (config.cache.pages, config.cache.state_slots, config.backends.threads)
        assert 0 not in (config.serve.port, config.model.max_model_len)
        assert Path(config.model.path).is_dir()


def test_later_sources_win_and_every_value_knows_its_source(tmp_path):
    file = written(
        tmp_path,
        {"schedule": {"max_rows": 3, "max_queue": 5, "token_budget": 99}, "cache": {"pages": 8}},
    )
    loaded = engine(
        environ={"K3_SCHEDULE__MAX_QUEUE": "6", "K3_SCHEDULE__TOKEN_BUDGET": "100"},
        preset="tiny-test",
        file=file,
        flags={"schedule.token_budget": "101"},
    )
    schedule = loaded.require().schedule
    assert (schedule.max_rows, schedule.max_queue, schedule.token_budget) == (3, 6, 101)
    assert schedule.plan_timeout_s == 20.0
    assert loaded.sources["schedule.plan_timeout_s"] == "preset tiny-test"
    assert loaded.sources["schedule.max_rows"] == f"file {file}"
    assert loaded.sources["schedule.max_queue"] == "environment K3_SCHEDULE__MAX_QUEUE"
    assert loaded.sources["schedule.token_budget"] == "flag --schedule-token-budget"
    assert loaded.sources["schedule.depth"] == "default"
    assert loaded.sources["model.dtype"] == "preset tiny-test"
    assert loaded.sources["backends.kda"] == "default, resolved from 'auto'"


@pytest.mark.parametrize(
    ("path", "raw", "value"),
    [
        ("transfer.lease_s", "1m", 60.0),
        ("transfer.lease_s", "1500ms", 1.5),
        ("transfer.lease_s", "40", 40.0),
        ("transfer.lease_s", 41, 41.0),
        ("cache.memory_bytes", "16MiB", 16 << 20),
        ("cache.memory_bytes", "3TiB", 3 << 40),
        ("cache.memory_bytes", "1.5 GB", 1_500_000_000),
        ("cache.memory_bytes", "4096", 4096),
        ("cache.fill_nan", "yes", True),
        ("cache.fill_nan", False, False),
        ("cache.prefix", True, "on"),
        ("serve.prefills", "a:1, b:2", ("a:1", "b:2")),
        ("serve.prefills", ["a:1"], ("a:1",)),
        ("serve.prefills", "", ()),
        ("cache.pages", " 17 ", 17),
    ],
)
def test_values_are_read_in_every_accepted_form(path, raw, value):
    parsed = ENGINE_KEYS[path].parse(raw)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("path", "raw", "expected"),
    [
        ("transfer.lease_s", "1x", "a duration such as 30s, 500ms or 5m, at least 0.01"),
        ("transfer.lease_s", True, "a duration"),
        ("transfer.lease_s", -1, "at least"),
        ("cache.memory_bytes", "16 floppies", "a size such as 512MiB"),
        ("cache.pages", 1.5, "an integer"),
        ("cache.pages", True, "an integer"),
        ("cache.pages", None, "an integer"),
        ("schedule.depth", 3, "1 to 2"),
        ("cache.fill_nan", "perhaps", "true or false"),
        ("model.dtype", "float23", "did you mean 'float32'"),
        ("model.device", "GPU", "did you mean 'cuda'"),
        ("model.name", 7, "text"),
        ("serve.prefills", [1], "a list of text"),
        ("cache.pages", {"a": 1}, "an integer"),
        ("cache.pages", 1 << 31, "not beyond 2147483647"),
        ("cache.memory_bytes", "9" * 400 + "GB", "a size"),
        ("transfer.lease_s", float("nan"), "a duration"),
        ("transfer.lease_s", float("inf"), "a duration"),
        ("transfer.lease_s", 10**400, "a duration"),
        ("spec.gate_threshold", float("nan"), "a number"),
    ],
)
def test_a_wrong_value_says_what_was_expected(path, raw, expected):
    with pytest.raises(ValueError, match="expected") as caught:
        ENGINE_KEYS[path].parse(raw)
    assert expected in str(caught.value)


def test_everything_wrong_is_reported_at_once(tmp_path):
    file = written(tmp_path, {"cache": {"page_token": 3, "pages": "x"}, "nothing": 1, "model": 4})
    line = {"file": file, "flags": {"parallel.pp": "2"}, "preset": "tiny-tset"}
    loaded = engine(environ={"K3_CACHE__PAGESS": "1"}, **line)
    assert sorted(codes(loaded)) == sorted(
        [
            "PRESET",
            "UNKNOWN_KEY",
            "VALUE",
            "UNKNOWN_KEY",
            "SECTION",
            "UNKNOWN_KEY",
            "PP_REMOTE_KV",
        ]
    )
    text = "\n".join(map(str, loaded.problems))
    for hint in ("tiny-test?", "cache.page_tokens?", "K3_CACHE__PAGES?"):
        assert f"did you mean {hint}" in text
    with pytest.raises(errors.RefusedError) as caught:
        loaded.require()
    assert len(caught.value.reasons) == 7


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("cache: {pages: 1, pages: 2}", "FILE"),
        ("cache: [", "FILE"),
        ("[1, 2]", "SECTION"),
        ("just text", "SECTION"),
        ("cache: !!python/object/apply:os.getcwd []", "FILE"),
        ("1: 2", "UNKNOWN_KEY"),
        ("? [a]\n: b", "FILE"),
        ("2026-13-45: 1", "FILE"),
        ("[" * 5000, "FILE"),
    ],
)
def test_a_broken_file_is_a_problem_not_a_traceback(tmp_path, text, code):
    assert codes(engine(file=written(tmp_path, text))) == [code]


def test_an_empty_file_is_fine_and_a_missing_one_is_not(tmp_path):
    assert codes(engine(file=written(tmp_path, ""))) == []
    assert codes(engine(file=tmp_path / "absent.yaml")) == ["FILE"]


def test_variables_of_the_other_process_are_left_to_it():
    environ = {"K3_HTTP__PORT": "1", "K3_RANK_TOKEN": "x", "K3_MODEL__NAME": "m"}
    config = engine(environ=environ).require()
    assert config.model.name == "m"
    loaded = load.load_router(CommandLine({}), environ | {"K3_CACHE__PAGES": "3"})
    assert loaded.require().http.port == 1


@pytest.mark.prefill
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("K3_CACHE_PAGES", "K3_CACHE__PAGES"),
        ("K3_SERVE_PORT", "K3_SERVE__PORT"),  # looks like a service of Kubernetes, and is none
        ("K3_PAGE_TOKENS", "K3_CACHE__PAGE_TOKENS"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_name_that_was_meant(name, meant):
    (problem,) = engine(environ={name: "8"}).problems
    assert problem.code == "UNKNOWN_KEY"
    assert f"did you mean {meant}?" in problem.why


def test_what_kubernetes_says_of_services_is_no_key():
    links = ("K3_ROUTER_SERVICE_HOST", "K3_DECODE_0_SERVICE_PORT_GRPC", "K3_ROUTER_PORT")
    more = ("K3_ROUTER_PORT_8000_TCP", "K3_ROUTER_PORT_8000_TCP_ADDR")
    assert codes(engine(environ=dict.fromkeys((*links, *more), "x"))) == []


@pytest.mark.prefill
@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ({"cache.checkpoints": "4"}, "CHECKPOINTS_IDLE"),
        ({"cache.checkpoint_mode": "copy"}, "CHECKPOINTS_IDLE"),
        ({"cache.checkpoint_interval": "64"}, "CHECKPOINTS_IDLE"),
        (
            {"cache.prefix": "on", "cache.checkpoints": "4", "cache.state_slots": "99"},
            "CHECKPOINTS_BESIDE_SLOTS",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(flags, code):
    assert codes(engine("prefill", flags=flags)) == [code]


@pytest.mark.prefill
def test_a_preset_may_prepare_what_is_not_switched_on():
    assert codes(engine("prefill", preset="tiny-demo")) == []
    used = {"cache.prefix": "on", "cache.checkpoints": "4", "cache.checkpoint_mode": "copy"}
    assert codes(engine("prefill", flags=used)) == []


@pytest.mark.dspark
def test_a_drafter_that_decode_does_not_load_is_told_of(capsys):
    argv = ["--drafter", "draft-mla"]
    load.engine_config("decode", argv)
    assert "draft_tokens=0 switches drafts off" in capsys.readouterr().err
    load.engine_config("decode", [*argv, "--draft-tokens", "7"])
    load.engine_config("prefill", argv)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_every_preset_is_accepted_by_every_process(preset, role):
    line = CommandLine({}, preset=preset)
    loaded = load.load_router(line, {}) if role == "router" else load.load_engine(role, line, {})
    loaded.require()
    assert f"preset {preset}" in loaded.sources.values()


def test_presets_name_only_known_keys():
    known = {*ENGINE_KEYS, *keys_of(RouterConfig)}
    for values in PRESETS.values():
        assert values.keys() <= known


def test_auto_follows_the_machine():
    gpu = resolve_names(replace(EngineConfig(), role="prefill"), Machine(cores=12, has_gpu=True))
    assert (gpu.model.device, gpu.model.dtype, gpu.backends.threads) == ("cuda", "bfloat16", 12)
    cpu = resolve_names(replace(EngineConfig(), role="decode"), Machine(cores=3, has_gpu=False))
    assert (cpu.model.device, cpu.model.dtype, cpu.serve.port) == ("cpu", "float32", 50052)
    assert cpu.cache.state_slots == cpu.schedule.max_rows + 1
    assert gpu.cache.state_slots == gpu.schedule.max_rows + gpu.schedule.max_queue
    assert not Machine.here({"CUDA_VISIBLE_DEVICES": ""}).has_gpu


def test_auto_takes_the_native_library_where_it_was_built_and_has_the_dtype():
    decode = replace(EngineConfig(), role="decode")
    built = Machine(cores=3, has_gpu=False, has_native=True)
    names = resolve_names(decode, built).backends
    assert (names.attention, names.kda, names.moe) == ("native", "native", "native")
    names = resolve_names(decode, replace(built, has_native=False)).backends
    assert (names.attention, names.kda, names.moe) == ("reference", "reference", "reference")
    half = replace(decode, model=replace(decode.model, dtype="bfloat16"))
    assert resolve_names(half, built).backends.kda == "reference"


def test_states_are_taken_back_by_records_on_a_gpu_and_by_snapshots_on_a_cpu():
    drafting = replace(EngineConfig(), role="decode", spec=SpecConfig(draft_tokens=7))
    gpu = resolve_names(drafting, Machine(cores=12, has_gpu=True))
    assert (gpu.spec.kda_rollback, snapshots(gpu), records(gpu)) == ("replay", 1, 8)
    cpu = resolve_names(drafting, Machine(cores=3, has_gpu=False))
    assert (cpu.spec.kda_rollback, snapshots(cpu), records(cpu)) == ("snapshots", 8, 0)
    plain = resolve_names(replace(drafting, spec=SpecConfig()), Machine(cores=12, has_gpu=True))
    assert (plain.spec.kda_rollback, snapshots(plain), records(plain)) == ("snapshots", 1, 0)
    prefill = replace(drafting, role="prefill", spec=SpecConfig(kda_rollback="replay"))
    assert (snapshots(prefill), records(prefill)) == (1, 0)


def test_records_leave_room_for_more_pages_than_snapshots():
    flags = {
        "spec.drafter": "draft-mla",
        "spec.draft_tokens": "7",
        "spec.draft_window": "64",
        "cache.memory_bytes": "64MiB",
    }
    pages = [
        engine(flags=flags | {"spec.kda_rollback": form}).require().cache.pages
        for form in ("snapshots", "replay")
    ]
    assert pages[0] < pages[1]


def test_the_longest_request_is_what_fits_into_a_small_pool():
    config = engine(flags={"cache.pages": "7", "cache.page_tokens": "8"}).require()
    assert config.model.max_model_len == 56


def test_more_pages_than_requests_can_hold_are_not_allocated():
    flags = {"model.max_model_len": "33", "schedule.max_rows": "2", "cache.page_tokens": "16"}
    config = engine(flags=flags).require()
    assert config.cache.pages == 3 * 3  # three slots, three pages each


def test_a_resolved_tree_survives_json_and_has_a_stable_name():
    config = engine("prefill", flags={"serve.prefills": "a:1,b:2"}).require()
    again = load.engine_from_json(load.to_json(config))
    assert again == config
    assert load.config_hash(again) == load.config_hash(config)
    assert load.config_hash(replace(config, role="decode")) != load.config_hash(config)


def test_a_tree_of_another_version_is_refused_by_name():
    document = json.loads(load.to_json(engine().require()))
    del document["cache"]["pages"]
    with pytest.raises(errors.ConfigError, match=r"cache\.pages"):
        load.engine_from_json(json.dumps(document))


def test_a_role_of_another_command_is_refused():
    assert codes(engine("prefill", flags={"role": "decode"})) == ["ROLE"]
    assert codes(engine("decode", flags={"role": "prefill"})) == ["ROLE"]


def test_a_decode_instance_may_compute_every_prompt_itself():
    config = engine("decode", flags={"role": "both", "cache.prefix": "on"}).require()
    rows = config.schedule.max_rows
    assert config.cache.checkpoints == 2 * rows + 1
    assert config.cache.state_slots == rows + 1 + config.cache.checkpoints
