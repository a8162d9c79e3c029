"""The Helm chart: rendered by Helm, valid for Kubernetes, and made of what kvrail's processes really take."""

import json
import re
from pathlib import Path

import helm_python as helm
import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvrail.config.settings import BothSettings, DecodeSettings, PrefillSettings, RouterSettings
from kvrail.security.tls import parts_of, role_host, role_uri
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.worker import EngineMetrics

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "kvrail"
CASES = ("minimal", "gpu", "nvlink", "both", "rolling", "hpa", "gateway", "metrics", "everything")
GPU_CASES = ("gpu", "nvlink", "both", "everything")
BOTH_CASES = ("both", "rolling")
OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()
ROLES = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings, "worker": BothSettings}
ONE_ROLE = ("router", "prefill", "decode")


def roles_in(case):
    return tuple(ROLES) if case in BOTH_CASES else ONE_ROLE


def rendered(values):
    """All objects of the chart, and its notes."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="demo", namespace="llm")
    notes = files.pop("kvrail/templates/NOTES.txt")
    return [each for text in files.values() for each in yaml.safe_load_all(text) if each], notes


@pytest.fixture(scope="module")
def cases():
    return {case: rendered(yaml.safe_load((CHART / "ci" / f"{case}-values.yaml").read_text())) for case in CASES}


def of_kind(objects, kind):
    return {each["metadata"]["name"].removeprefix("demo-kvrail-"): each for each in objects if each["kind"] == kind}


def fields(**properties):
    return {"type": "object", "additionalProperties": False, "properties": properties}


TEXT, LABELS, SECRET = {"type": "string"}, {"type": "object"}, fields(name={}, key={})
CUSTOM = {
    # From the API references of KEDA 2, the Prometheus operator, cert-manager and the Gateway API with its inference
    # extension: no field may be misspelt.
    "ScaledObject": fields(
        scaleTargetRef=fields(name=TEXT),
        minReplicaCount={"type": "integer"},
        maxReplicaCount={"type": "integer"},
        pollingInterval={"type": "integer"},
        cooldownPeriod={"type": "integer"},
        advanced=fields(horizontalPodAutoscalerConfig=fields(behavior={"type": "object"})),
        triggers={
            "type": "array",
            "minItems": 1,
            "items": fields(
                type={"const": "prometheus"}, metadata=fields(serverAddress=TEXT, query=TEXT, threshold=TEXT)
            ),
        },
    ),
    "ServiceMonitor": fields(
        selector=fields(matchLabels=LABELS),
        endpoints={
            "type": "array",
            "items": fields(
                port=TEXT,
                path=TEXT,
                interval=TEXT,
                scheme={"enum": ["http", "https"]},
                relabelings={"type": "array", "items": fields(targetLabel=TEXT, replacement=TEXT)},
                tlsConfig=fields(
                    ca=fields(secret=SECRET), cert=fields(secret=SECRET), keySecret=SECRET, serverName=TEXT
                ),
            ),
        },
    ),
    "PrometheusRule": fields(groups={"type": "array", "minItems": 1}),
    "HTTPRoute": fields(
        parentRefs={"type": "array", "minItems": 1, "items": fields(name=TEXT, namespace=TEXT)},
        hostnames={"type": "array", "items": TEXT},
        rules={
            "type": "array",
            "items": fields(
                timeouts=fields(request=TEXT),
                backendRefs={
                    "type": "array",
                    "items": fields(group=TEXT, kind=TEXT, name=TEXT, port={"type": "integer"}),
                },
            ),
        },
    ),
    "InferencePool": fields(
        selector=fields(matchLabels=LABELS),
        targetPorts={"type": "array", "maxItems": 8, "items": fields(number={"type": "integer"})},
        endpointPickerRef=fields(
            name={"type": "string", "minLength": 1},
            port=fields(number={"type": "integer"}),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    "Certificate": fields(
        secretName=TEXT,
        commonName=TEXT,
        uris={"type": "array", "items": TEXT},
        dnsNames={"type": "array", "items": TEXT},
        usages={"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
        privateKey=fields(algorithm={"enum": ["ECDSA"]}, size={"enum": [256]}, rotationPolicy={"enum": ["Always"]}),
        duration=TEXT,
        renewBefore=TEXT,
        issuerRef=fields(name=TEXT, kind=TEXT, group=TEXT),
    ),
}


def test_helm_finds_nothing_to_complain_of():
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid(cases, case, version):
    objects, notes = cases[case]
    assert "kvrail serves" in notes
    for each in objects:
        if each["kind"] in CUSTOM:
            jsonschema.validate(each["spec"], CUSTOM[each["kind"]])
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_an_invalid_object_would_be_seen(cases):
    deployment = json.loads(json.dumps(of_kind(cases["minimal"][0], "Deployment")["decode"]))
    deployment["spec"]["template"]["spec"]["containers"][0]["startupProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)


def test_all_optional_parts_are_there_with_everything(cases):
    objects, _ = cases["everything"]
    for kind, names in (
        ("ScaledObject", {"prefill", "decode"}),
        ("ServiceMonitor", set(ONE_ROLE)),
        ("Certificate", set(ONE_ROLE)),
        ("NetworkPolicy", set(ONE_ROLE)),
        ("PodDisruptionBudget", set(ONE_ROLE)),
    ):
        assert set(of_kind(objects, kind)) == names
    assert "replicas" not in of_kind(objects, "Deployment")["decode"]["spec"], "KEDA says how many"
    kinds = {each["kind"] for each in cases["minimal"][0]}
    assert not kinds & {"ScaledObject", "ServiceMonitor", "Certificate"}


def settings_of(objects, role):
    """The settings that a role's process makes of its environment."""
    (container,) = of_kind(objects, "Deployment")[role]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == [role]
    given = {each["name"]: each.get("value", "from-a-secret") for each in container["env"]}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        return ROLES[role].load(), given, container


@pytest.mark.parametrize(("case", "role"), [(case, role) for case in CASES for role in roles_in(case)])
def test_a_process_takes_the_environment_that_it_is_given(cases, case, role):
    objects, _ = cases[case]
    settings, given, container = settings_of(objects, role)
    pod = of_kind(objects, "Deployment")[role]["spec"]["template"]["spec"]
    assert settings.host == "0.0.0.0"
    assert pod["terminationGracePeriodSeconds"] > settings.grace_period_s
    assert not pod["enableServiceLinks"], "Kubernetes would add variables KVRAIL_..., which are no settings"
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    if role == "router":
        assert ports == {"http": settings.port, "metrics": settings.admin_port}
    else:
        assert ports["grpc"] == settings.port
        assert ports["metrics"] == settings.metrics_port
        assert settings.device.partition(":")[0] == ("cuda" if case in GPU_CASES else "cpu")
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (case in GPU_CASES and case != "nvlink")
    if role in ("prefill", "worker"):
        assert ports["data"] == settings.data_port
    if case == "everything":
        assert settings.model_names == ("qwen3-8b", "default")
        assert settings.otlp_endpoint == "http://collector.monitoring.svc.cluster.local:4317"
        assert given[f"KVRAIL_{role.upper()}_TLS_CERT"] == "/tls/tls.crt"


def test_settings_reach_the_processes_as_they_are_written(cases):
    objects, _ = cases["everything"]
    router, decode = settings_of(objects, "router")[0], settings_of(objects, "decode")[0]
    assert (router.policy, router.max_body_bytes, router.priorities) == ("least-load", 16777216, True)
    assert router.cors_origins == ("https://chat.example.com",)
    assert router.api_keys == ("from-a-secret",)
    assert (decode.codec, decode.local_prefill_tokens, decode.kv_dtype) == ("splitzip-channel", -1, "float8_e4m3fn")


@pytest.mark.parametrize("case", CASES)
def test_names_selectors_and_ports_fit_together(cases, case):
    (objects, _), roles = cases[case], roles_in(case)
    deployments, services = of_kind(objects, "Deployment"), of_kind(objects, "Service")
    for role in roles:
        pod = deployments[role]["spec"]["template"]
        labels, (container,) = pod["metadata"]["labels"], pod["spec"]["containers"]
        for name in (role, "router-admin") if role == "router" else (role,):
            assert services[name]["spec"]["selector"].items() <= labels.items()
        assert deployments[role]["spec"]["selector"]["matchLabels"].items() <= labels.items()
        budget = of_kind(objects, "PodDisruptionBudget")[role]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        names = {each["name"] for each in container["ports"]}
        for name in (role, "router-admin") if role == "router" else (role,):
            assert {each["targetPort"] for each in services[name]["spec"]["ports"]} <= names
        volumes = {each["name"] for each in pod["spec"]["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} == volumes
        others = [other for other in roles if other != role]
        for other in others:
            theirs = deployments[other]["spec"]["template"]["metadata"]["labels"]
            assert not services[role]["spec"]["selector"].items() <= theirs.items()
    settings = settings_of(objects, "router")[0]
    named = {"prefill": settings.prefill_workers, "decode": settings.decode_workers, "worker": settings.workers}
    for role in set(roles) - {"router"}:
        port = services[role]["spec"]["ports"][0]["port"]
        found = named.pop(role)
        assert found == (f"dns+demo-kvrail-{role}.llm.svc.cluster.local:{port}",) * bool(
            case != "both" or role == "worker"
        )
        assert services[role]["spec"]["clusterIP"] == "None"
    assert not any(named.values())
    prefills = tuple(f"demo-kvrail-{role}.llm.svc.cluster.local" for role in ("prefill", "worker") if role in roles)
    for role in set(roles) & {"decode", "worker"}:
        assert settings_of(objects, role)[0].allowed_prefill_workers == prefills


@pytest.mark.parametrize("case", CASES)
def test_pods_are_restricted(cases, case):
    """What the pod security standard `restricted` demands, and a read-only root."""
    for deployment in of_kind(cases[case][0], "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        allowed = {"emptyDir", "persistentVolumeClaim", "secret"}
        assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
        for container in pod["containers"]:
            context = container["securityContext"]
            assert not context["allowPrivilegeEscalation"]
            assert context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}


def reaches(objects, source, target, port):
    """Whether the network policies let a pod with labels `source` (of this namespace) reach a role's port."""
    pod = of_kind(objects, "Deployment")[target]["spec"]["template"]
    names = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
    policies = [
        policy["spec"]
        for policy in of_kind(objects, "NetworkPolicy").values()
        if policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ]
    assert policies, "nothing protects this pod"

    def peer(rule):
        if "namespaceSelector" in rule:
            return rule["namespaceSelector"] == {}
        return rule["podSelector"]["matchLabels"].items() <= source.items()

    return any(
        (not rule.get("from") or any(peer(each) for each in rule["from"]))
        and (not rule.get("ports") or port in [names.get(each["port"], each["port"]) for each in rule["ports"]])
        for policy in policies
        for rule in policy["ingress"]
    )


@pytest.mark.parametrize("case", ["minimal", "gpu"])
def test_only_those_who_must_reach_a_worker_do(cases, case):
    objects, _ = cases[case]
    labels = {role: of_kind(objects, "Deployment")[role]["spec"]["template"]["metadata"]["labels"] for role in ONE_ROLE}
    labels["stranger"] = {"app": "stranger"}
    for source in labels:
        assert reaches(objects, labels[source], "router", 8000)
        assert reaches(objects, labels[source], "decode", 7002) == (source == "router")
        assert reaches(objects, labels[source], "prefill", 7001) == (source in ("router", "decode"))
        assert reaches(objects, labels[source], "prefill", 7003) == (source == "decode")
        for target in ONE_ROLE:
            assert reaches(objects, labels[source], target, 9100), "metrics, unless metricsFrom says by whom"


def test_with_everything_strangers_get_nothing_and_workers_speak_ucx(cases):
    objects, _ = cases["everything"]
    labels = {role: of_kind(objects, "Deployment")[role]["spec"]["template"]["metadata"]["labels"] for role in ONE_ROLE}
    for target, port in (("router", 8000), ("router", 9100), ("decode", 9100), ("prefill", 9100), ("decode", 7002)):
        assert not reaches(objects, {"app": "stranger"}, target, port)
    assert reaches(objects, labels["decode"], "prefill", 40000)
    assert reaches(objects, labels["prefill"], "decode", 40000)


def test_workers_of_both_roles_are_reached_as_either(cases):
    objects, _ = cases["rolling"]
    labels = {role: of_kind(objects, "Deployment")[role]["spec"]["template"]["metadata"]["labels"] for role in ROLES}
    labels["stranger"] = {"app": "stranger"}
    for source in labels:
        asks = source in ("router", "decode", "worker")
        assert reaches(objects, labels[source], "worker", 7003) == asks
        assert reaches(objects, labels[source], "prefill", 7001) == asks
        assert reaches(objects, labels[source], "worker", 7004) == (source in ("decode", "worker"))
        assert reaches(objects, labels[source], "prefill", 7003) == (source in ("decode", "worker"))
        assert reaches(objects, labels[source], "decode", 7002) == (source == "router")


@pytest.mark.parametrize("case", ["both", "everything"])
def test_a_certificate_gives_the_roles_that_its_process_asks_for(cases, case):
    for role, made in of_kind(cases[case][0], "Certificate").items():
        assert made["spec"]["uris"] == [role_uri(part) for part in parts_of(role)]
        assert {role_host(part) for part in parts_of(role)} < set(made["spec"]["dnsNames"])


def test_workers_of_both_roles_are_scaled_by_either_measure(cases):
    triggers = of_kind(cases["both"][0], "ScaledObject")["worker"]["spec"]["triggers"]
    found = [(each["metadata"]["query"], each["metadata"]["threshold"]) for each in triggers]
    assert [("kvrail_engine_sequences" in query, threshold) for query, threshold in found] == [
        (True, "32"),
        (False, "8"),
    ]
    assert 'pod=~"demo-kvrail-worker-.*"' in found[0][0] and 'pod=~"demo-kvrail-router-.*"' in found[1][0]
    both = {"workers": {"replicas": 2, "autoscaling": {"enabled": True, "kind": "hpa"}}}
    metrics = of_kind(rendered(both)[0], "HorizontalPodAutoscaler")["worker"]["spec"]["metrics"]
    values = [each[each["type"].lower()] for each in metrics]
    assert [(each["metric"]["name"], each["target"]["averageValue"]) for each in values] == [
        ("kvrail_engine_sequences", "32"),
        ("kvrail_queue_prompts", "8"),
    ]


def test_pools_are_scaled_by_metrics_that_exist(cases):
    registry = CollectorRegistry()
    RouterMetrics(registry, "m")
    EngineMetrics(registry, "m")
    known = {sample.name for family in registry.collect() for sample in family.samples}
    for scaled in of_kind(cases["everything"][0], "ScaledObject").values():
        query = scaled["spec"]["triggers"][0]["metadata"]["query"]
        assert re.search(r"kvrail_\w+", query)[0] in known
        assert scaled["spec"]["scaleTargetRef"]["name"] == scaled["metadata"]["name"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefil": {}},
        {"decode": {"replicas": 0}},
        {"worker": {"gpus": 2}},
        {"kv": {"path": "rdma"}},
        {"kv": {"path": "sockets", "cudaIpc": True}},
        {"kv": {"cudaIpc": True}},
        {"router": {"settings": {"Policy": "least-load"}}},
        {"model": {"name": ""}},
        {"router": {"httpRoute": {"enabled": True}}},
        {"inferencePool": {"enabled": True}},
        {"monitoring": {"rules": {"docsUrl": "docs"}}},
        {"decode": {"autoscaling": {"kind": "cron"}}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong):
    with pytest.raises(helm.HelmError):
        rendered(wrong)


def test_clients_reach_no_metrics(cases):
    services = of_kind(cases["minimal"][0], "Service")
    assert [port["name"] for port in services["router"]["spec"]["ports"]] == ["http"]
    assert services["router-admin"]["spec"]["clusterIP"] == "None"


def test_what_prometheus_scrapes_has_the_labels_that_rules_and_boards_ask_for(cases):
    objects, _ = cases["metrics"]
    services = {service["metadata"]["name"]: service for service in objects if service["kind"] == "Service"}
    for role, monitor in of_kind(objects, "ServiceMonitor").items():
        (endpoint,) = monitor["spec"]["endpoints"]
        found = [
            service["metadata"]["name"]
            for service in services.values()
            if monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            and endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        ]
        assert found == ["demo-kvrail-router-admin" if role == "router" else f"demo-kvrail-{role}"]
        labels = {each["targetLabel"]: each["replacement"] for each in endpoint["relabelings"]}
        assert labels == {"service": role, "job": "kvrail"}


def test_alerts_and_boards_are_those_of_the_compose_cluster(cases, tmp_path, promtool):
    deploy = CHART.parents[1]
    objects, _ = cases["everything"]
    rules = of_kind(objects, "PrometheusRule")
    for name in ("alerts", "recording"):
        written = yaml.safe_load((deploy / "prometheus" / "rules" / f"{name}.yml").read_text())
        made = json.loads(json.dumps(rules[name]["spec"]).replace("https://docs.example.com/kvrail/", "docs/"))
        assert made == written
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(rules[name]["spec"]))
        checked = promtool("check", "rules", str(tmp_path / f"{name}.yml"))
        assert checked.returncode == 0, checked.stderr
    links = re.findall(r"runbook_url\W+([^\s\"]+)", json.dumps(rules["alerts"]["spec"]))
    assert links
    assert all(link.startswith("https://docs.example.com/kvrail/operations.md#") for link in links)
    boards = {path.name: json.loads(path.read_text()) for path in (deploy / "grafana" / "boards").glob("*.json")}
    maps = of_kind(objects, "ConfigMap").values()
    made = {name: json.loads(text) for each in maps for name, text in each["data"].items()}
    assert made == {f"kvrail-{name}": board for name, board in boards.items()}
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)
    assert all(each["metadata"]["annotations"] == {"grafana_folder": "kvrail"} for each in maps)


def test_pools_are_scaled_without_keda(cases):
    objects, notes = cases["hpa"]
    scalers = of_kind(objects, "HorizontalPodAutoscaler")
    assert not of_kind(objects, "ScaledObject")
    assert "KEDA" not in notes
    assert scalers["decode"]["spec"]["metrics"] == [
        {
            "type": "Pods",
            "pods": {
                "metric": {"name": "kvrail_engine_sequences", "selector": {"matchLabels": {"state": "running"}}},
                "target": {"type": "AverageValue", "averageValue": "24"},
            },
        }
    ]
    assert scalers["prefill"]["spec"]["metrics"][0]["resource"]["name"] == "cpu"
    assert all("replicas" not in of_kind(objects, "Deployment")[role]["spec"] for role in scalers)


def test_the_ways_in_lead_to_the_routers(cases):
    (rule,) = of_kind(cases["hpa"][0], "Ingress")["router"]["spec"]["rules"]
    assert rule["host"] == "llm.example.com"
    assert rule["http"]["paths"][0]["backend"] == {"service": {"name": "demo-kvrail-router", "port": {"name": "http"}}}
    objects, _ = cases["gateway"]
    (rule,) = of_kind(objects, "HTTPRoute")["router"]["spec"]["rules"]
    pool = of_kind(objects, "InferencePool")["router"]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
    pod = of_kind(objects, "Deployment")["router"]["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pool["spec"]["targetPorts"] == [{"number": settings_of(objects, "router")[0].port}]
    assert of_kind(objects, "Service")["router"]["spec"]["sessionAffinity"] == "ClientIP"
    assert settings_of(objects, "router")[0].api_keys_file == "/keys/keys.toml"
    objects, _ = rendered({"router": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}}})
    (rule,) = of_kind(objects, "HTTPRoute")["router"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "demo-kvrail-router", "port": 80}]


def test_downloads_are_made_once_and_kept(cases):
    objects, _ = cases["everything"]
    claim = of_kind(objects, "PersistentVolumeClaim")["hub"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (job,) = of_kind(objects, "Job").values()
    pods = [of_kind(objects, "Deployment")[role]["spec"]["template"]["spec"] for role in ONE_ROLE]
    for pod in (job["spec"]["template"]["spec"], *pods):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["hub"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "Qwen/Qwen3-8B"
    assert container["image"] == pods[1]["containers"][0]["image"], "the Hub's client of the workers"
    other, _ = rendered({"model": {"name": "a/b", "download": {"enabled": True}}})
    assert of_kind(other, "Job").keys() != of_kind(objects, "Job").keys()


def test_without_prefill_workers_routers_look_for_none():
    objects, _ = rendered({"prefill": {"replicas": 0}})
    assert settings_of(objects, "router")[0].prefill_workers == ()


def test_the_readme_names_every_case():
    text = (CHART / "README.md").read_text()
    assert all(f"ci/{case}-values.yaml" in text for case in CASES)
    assert {path.name for path in (CHART / "ci").iterdir()} == {f"{case}-values.yaml" for case in CASES}
