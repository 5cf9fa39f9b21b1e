"""What the chart promises, held against the processes themselves: their flags, keys, ports, paths, defaults."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from k3.config.keys import keys_of
from k3.config.tree import EngineConfig, RouterConfig
from tests.chart.rendered import (
    CHART,
    COMPONENTS,
    ENGINES,
    PROBES,
    ROOT,
    VALUES,
    Helm,
    Rendered,
    load,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_process_loads_its_rendered_configuration(
    rendered: Rendered, component: str, tmp_path: Path
) -> None:
    load(component, rendered.config(component), tmp_path)


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_command_is_a_console_script_and_its_file_is_mounted(
    rendered: Rendered, component: str
) -> None:
    container = rendered.container(component)
    (command,) = container["command"]
    assert command in PROJECT["scripts"]
    flag, file = container["args"]
    assert flag == "--config"
    mounts = [m["mountPath"] for m in container["volumeMounts"]]
    assert str(Path(file).parent) in mounts
    assert Path(file).name in rendered.get("ConfigMap", component)["data"]


@pytest.mark.parametrize("component", ENGINES)
def test_an_engine_listens_where_pod_service_and_policy_say(
    rendered: Rendered, component: str, tmp_path: Path
) -> None:
    serve = load(component, rendered.config(component), tmp_path).serve
    ports = {p["name"]: p["containerPort"] for p in rendered.container(component)["ports"]}
    assert ports == {"grpc": serve.port, "ops": serve.ops_port}
    assert serve.host == serve.ops_host == "0.0.0.0"
    service = rendered.get("Service", component)["spec"]
    assert {p["targetPort"]: p["port"] for p in service["ports"]} == ports
    policy = rendered.get("NetworkPolicy", component)["spec"]["ingress"]
    opened = [p["port"] for rule in policy for p in rule["ports"]]
    assert set(ports.values()) <= set(opened)


def test_the_router_listens_where_pod_and_service_say(rendered: Rendered, tmp_path: Path) -> None:
    http = load("router", rendered.config("router"), tmp_path).http
    (port,) = rendered.container("router")["ports"]
    assert (port["name"], port["containerPort"], http.host) == ("http", http.port, "0.0.0.0")
    (exposed,) = rendered.get("Service", "router")["spec"]["ports"]
    assert exposed["port"] == http.port
    assert http.admin_host == "127.0.0.1"


def test_default_ports_are_the_processes_own(render: Callable[..., Rendered]) -> None:
    values = yaml.safe_load(VALUES[0].read_text())
    http = RouterConfig().http
    assert (values["router"]["port"], values["router"]["adminPort"]) == (http.port, http.admin_port)
    for component in ENGINES:
        assert values[component]["opsPort"] == EngineConfig().serve.ops_port
    assert (values["prefill"]["port"], values["decode"]["port"]) == (50051, 50052)


def test_the_router_knows_every_instance_by_its_pods_name(
    rendered: Rendered, tmp_path: Path
) -> None:
    fleet = load("router", rendered.config("router"), tmp_path).fleet
    for component, addresses in (("prefill", fleet.prefills), ("decode", fleet.decodes)):
        workload = rendered.workload(component)
        name, service = workload["metadata"]["name"], workload["spec"]["serviceName"]
        (port,) = [
            p["containerPort"]
            for p in rendered.container(component)["ports"]
            if p["name"] == "grpc"
        ]
        wanted = [
            f"{name}-{i}.{service}.serving.svc:{port}" for i in range(workload["spec"]["replicas"])
        ]
        assert list(addresses) == wanted
        assert rendered.get("Service", component)["metadata"]["name"] == service


def test_decode_may_dial_exactly_the_prefill_instances(rendered: Rendered, tmp_path: Path) -> None:
    decode = load("decode", rendered.config("decode"), tmp_path)
    router = load("router", rendered.config("router"), tmp_path)
    if decode.role == "decode":
        assert decode.serve.prefills == router.fleet.prefills


@pytest.mark.parametrize("component", COMPONENTS)
def test_probes_use_the_real_endpoints(rendered: Rendered, component: str) -> None:
    container = rendered.container(component)
    port = "http" if component == "router" else "ops"
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in PROBES}
    assert probes == {kind: {"path": path, "port": port} for kind, path in PROBES.items()}


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_grace_period_covers_the_drain(
    rendered: Rendered, component: str, tmp_path: Path
) -> None:
    config = load(component, rendered.config(component), tmp_path)
    drain = config.http if component == "router" else config.serve
    grace = rendered.pod(component)["terminationGracePeriodSeconds"]
    assert grace == drain.drain_delay_s + drain.drain_timeout_s + 30


@pytest.mark.parametrize(
    ("setting", "ending_s"),
    [("lease_s=45", 45), ("lease_s=1.5m", 90), ("drain_s=12s", 32), ("drain_s=500ms", 30)],
)
def test_the_grace_period_covers_how_long_transfers_may_take_to_end(
    render: Callable[..., Rendered], tmp_path: Path, setting: str, ending_s: int
) -> None:
    r = render(VALUES[0], f"decode.config.transfer.{setting}")
    config = load("decode", r.config("decode"), tmp_path)
    assert max(30, config.transfer.lease_s, config.transfer.drain_s + 20) == ending_s
    drained_s = config.serve.drain_delay_s + config.serve.drain_timeout_s
    assert r.pod("decode")["terminationGracePeriodSeconds"] == drained_s + ending_s
    assert r.pod("prefill")["terminationGracePeriodSeconds"] == 5 + 60 + 30


def test_pods_are_spread_among_their_own_unless_a_selector_says_otherwise(
    render: Callable[..., Rendered],
) -> None:
    field = "decode.topologySpreadConstraints"
    r = render(
        VALUES[0],
        f"{field}[0].topologyKey=kubernetes.io/hostname",
        f"{field}[1].topologyKey=zone",
        f"{field}[1].labelSelector.matchLabels.app=other",
        "decode.priorityClassName=high",
        "router.runtimeClassName=sandboxed",
    )
    selectors = [c["labelSelector"] for c in r.pod("decode")["topologySpreadConstraints"]]
    own = r.workload("decode")["spec"]["selector"]
    assert selectors == [own, {"matchLabels": {"app": "other"}}]
    assert r.pod("decode")["priorityClassName"] == "high"
    assert r.pod("router")["runtimeClassName"] == "sandboxed"
    for name in ("topologySpreadConstraints", "priorityClassName", "runtimeClassName"):
        assert name not in r.pod("prefill")


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_environment_name_of_ours_exists(rendered: Rendered, component: str) -> None:
    tree = RouterConfig if component == "router" else EngineConfig
    known = {key.variable for key in keys_of(tree).values()}
    names = {e["name"] for e in rendered.container(component).get("env", [])}
    assert {n for n in names if n.startswith("K3_")} <= known


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_run_without_privileges(rendered: Rendered, component: str) -> None:
    pod, container = rendered.pod(component), rendered.container(component)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {v["name"] for v in pod["volumes"] if "emptyDir" in v}
    assert writable == ({"tmp"} if component == "router" else {"tmp", "shm"})
    assert not any("hostPath" in v for v in pod["volumes"])


@pytest.mark.parametrize("component", COMPONENTS)
def test_limits_are_set_and_the_image_is_not_latest(rendered: Rendered, component: str) -> None:
    container = rendered.container(component)
    assert container["resources"]["limits"]["memory"]
    assert container["image"].split(":")[1] not in ("", "latest")


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_selector_matches_the_pods_of_exactly_one_component(
    rendered: Rendered, component: str
) -> None:
    selector = rendered.workload(component)["spec"]["selector"]["matchLabels"]
    assert rendered.get("Service", component)["spec"]["selector"] == selector
    matched = []
    for other in COMPONENTS:
        labels = rendered.workload(other)["spec"]["template"]["metadata"]["labels"]
        if selector.items() <= labels.items():
            matched.append(other)
    assert matched == [component]


@pytest.mark.parametrize("component", ENGINES)
def test_a_changed_configuration_restarts_the_pods(
    render: Callable[..., Rendered], component: str
) -> None:
    def checksum(r: Rendered) -> str:
        annotations = r.workload(component)["spec"]["template"]["metadata"]["annotations"]
        return annotations["checksum/config"]

    changed = render(VALUES[0], f"{component}.config.schedule.max_rows=3")
    assert checksum(render(VALUES[0])) != checksum(changed)


def test_the_transfer_ports_are_open_between_the_engines_only(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    r = render(VALUES[0], "transfer.firstPort=42000", "transfer.lastPort=42007")
    for component, peer in (("prefill", "decode"), ("decode", "prefill")):
        assert load(component, r.config(component), tmp_path).transfer.port_range == "42000-42007"
        rules = [
            rule
            for rule in r.get("NetworkPolicy", component)["spec"]["ingress"]
            if rule["ports"][0].get("endPort") == 42007
        ]
        (source,) = rules[0]["from"]
        labels = source["podSelector"]["matchLabels"]
        assert labels["app.kubernetes.io/component"] == peer


def test_the_model_folder_reaches_every_process(render: Callable[..., Rendered]) -> None:
    r = render(CHART / "examples/own-model.yaml")
    for component in COMPONENTS:
        assert yaml.safe_load(r.config(component))["model"]["path"] == "/model"
        (mount,) = [m for m in r.container(component)["volumeMounts"] if m["name"] == "model"]
        assert (mount["mountPath"], mount["readOnly"]) == ("/model", True)


def test_the_schemas_generated_part_is_current() -> None:
    spec = importlib.util.spec_from_file_location("chart_schema", ROOT / ".ci/chart_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.SCHEMA.read_text() == module.current(), "run: python .ci/chart_schema.py"


def test_every_value_of_our_own_is_closed_by_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def walk(node: dict[str, Any], values: object, path: str) -> None:
        if "$ref" in node:
            node = schema["definitions"][node["$ref"].rsplit("/", 1)[1]]
        if not isinstance(values, dict) or "properties" not in node:
            return
        assert node["additionalProperties"] is False, path
        for name, value in values.items():
            assert name in node["properties"], f"{path}.{name}"
            walk(node["properties"][name], value, f"{path}.{name}")

    walk(schema, yaml.safe_load(VALUES[0].read_text()), "values")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("router.replica=2", "replica"),
        ("router.replicas=0", "replicas"),
        ("prefill.replicas=0", "nobody would compute prompts"),
        ("decode.role=prefill", "role"),
        ("router.config.http.port=9", "port"),
        ("decode.config.schedule.max_row=3", "max_row"),
        ("decode.config.schedule.depth=x", "depth"),
        ("prefill.config.model.dtype=float16", "dtype"),
        ("prefill.port=80", "port"),
        ("model.source=hub", "source"),
        ("image.tag=latest", "tag"),
        ("decode.shmSize=lots", "shmSize"),
        ("router.service.type=Ingress", "type"),
        ("decode.priorityClassName=High", "priorityClassName"),
    ],
)
def test_a_bad_value_is_refused_by_name(helm: Helm, setting: str, complaint: str) -> None:
    done = helm("template", "k3", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize("source", ["pvc", "hostPath"])
def test_a_model_volume_without_its_name_is_refused(helm: Helm, source: str) -> None:
    done = helm("template", "k3", str(CHART), "--set", f"model.source={source}")
    assert done.returncode != 0
    assert f"needed with model.source={source}" in done.stderr


def test_the_version_is_the_distributions() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]


def test_every_value_is_explained_in_the_readme() -> None:
    text = (CHART / "README.md").read_text()
    values = yaml.safe_load(VALUES[0].read_text())
    sections = set(values) - {"prefill", "decode", "router"} | set(values["decode"])
    sections |= set(values["router"])
    missing = sorted(name for name in sections if f"`{name}" not in text)
    assert not missing, f"README.md does not explain {missing}"


def test_a_secret_of_keys_is_mounted_where_the_router_reads_it(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    chart = render(VALUES[0], "router.apiKeys.secretName=people", "router.apiKeys.secretKey=all")
    pod = chart.workload("router")["spec"]["template"]["spec"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "api-keys"]
    assert volume["secret"]["secretName"] == "people"
    (item,) = volume["secret"]["items"]
    (mount,) = [m for m in chart.container("router")["volumeMounts"] if m["name"] == "api-keys"]
    assert mount["readOnly"]
    assert item["key"] == "all"
    path = yaml.safe_load(chart.config("router"))["http"]["api_key_file"]
    assert path == f"{mount['mountPath']}/{item['path']}"


def test_without_a_secret_no_key_is_asked_for(render: Callable[..., Rendered]) -> None:
    chart = render(VALUES[0])
    assert "api_key_file" not in yaml.safe_load(chart.config("router"))["http"]


def test_the_test_pod_reaches_a_router_with_keys_and_chosen_clients(
    render: Callable[..., Rendered],
) -> None:
    chart = render(
        VALUES[0],
        "router.apiKeys.secretName=people",
        "networkPolicy.clients[0].podSelector.matchLabels.app=shop",
        "image.pullSecrets[0]=pull",
    )
    pod, router = chart.get("Pod", "test"), chart.pod("router")
    (ask,) = pod["spec"]["containers"]
    path = ask["args"][ask["args"].index("--api-key-file") + 1]
    assert path == yaml.safe_load(chart.config("router"))["http"]["api_key_file"]
    (mount,) = ask["volumeMounts"]
    assert mount in chart.container("router")["volumeMounts"]
    assert all(volume in router["volumes"] for volume in pod["spec"]["volumes"])
    assert pod["spec"]["imagePullSecrets"] == router["imagePullSecrets"] == [{"name": "pull"}]
    (rule,) = chart.get("NetworkPolicy", "router")["spec"]["ingress"]
    peers = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    assert peers[0] == {"app": "shop"}
    assert any(peer.items() <= pod["metadata"]["labels"].items() for peer in peers[1:])
