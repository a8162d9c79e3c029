"""The chart's life in a cluster: installed, upgraded, rolled back and removed by Helm against a Kubernetes API."""

import helm_python as helm
import pytest
import yaml

from tests.deploy.kubernetes import api_server
from tests.deploy.test_chart import CASES, CHART, rendered


@pytest.fixture
def cluster():
    with (
        api_server() as server,
        helm.Config(
            kubeconfig_content=server.kubeconfig, namespace="llm", storage_driver="memory", qps=1000, burst_limit=1000
        ) as release,
    ):
        release.check_reachable()
        yield release, server.emulator


def values_of(case):
    return yaml.safe_load((CHART / "ci" / f"{case}-values.yaml").read_text())


def wanted(values):
    """The chart's objects by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in rendered(values)[0]}


def specs(objects):
    return {key: each.get("spec", each.get("data")) for key, each in objects.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_installed_and_removed(cluster, case):
    release, api = cluster
    release.install(str(CHART), "demo", values_of(case), namespace="llm")
    assert specs(api.live()) == specs(wanted(values_of(case)))
    release.uninstall("demo")
    kept = {key for key in api.live() if key[0] == "PersistentVolumeClaim"}
    assert set(api.live()) == kept, "downloads are kept, all else is gone"
    assert bool(kept) == (case == "everything")


def test_an_upgrade_changes_what_changed_and_a_rollback_brings_it_back(cluster):
    release, api = cluster
    before = {"decode": {"replicas": 1}, "monitoring": {"enabled": True}}
    after = {"decode": {"replicas": 3, "settings": {"codec": "raw"}}, "router": {"httpRoute": {"enabled": False}}}
    release.install(str(CHART), "demo", before, namespace="llm")
    release.upgrade(str(CHART), "demo", after, namespace="llm")
    assert specs(api.live()) == specs(wanted(after)), "monitors are gone, three decode workers run"
    assert not [kind for kind, _ in api.live() if kind == "ServiceMonitor"]
    release.rollback("demo", version=1)
    assert specs(api.live()) == specs(wanted(before))
    assert [entry["status"] for entry in release.history("demo")] == ["superseded", "superseded", "deployed"]


def test_selectors_never_change():
    """Kubernetes refuses a Deployment whose selector changes: an upgrade between any two sets of values keeps them."""
    selectors = {}
    for case in CASES:
        for key, each in wanted(values_of(case)).items():
            if key[0] == "Deployment":
                assert selectors.setdefault(key, each["spec"]["selector"]) == each["spec"]["selector"], case
    assert len(selectors) == 4, "of the router and of each role"


def test_one_role_becomes_both_in_steps_that_each_serve(cluster):
    """The commands of docs/operations/kubernetes.md."""
    release, api = cluster
    steps = [
        ({}, {"decode": 1, "prefill": 1}),
        ({"workers": {"replicas": 2}}, {"decode": 1, "prefill": 1, "worker": 2}),
        ({"workers": {"replicas": 2}, "decode": {"replicas": 0}, "prefill": {"replicas": 0}}, {"worker": 2}),
    ]
    page = (CHART.parents[2] / "docs" / "operations" / "kubernetes.md").read_text()
    for number, (values, serving) in enumerate(steps):
        (release.upgrade if number else release.install)(str(CHART), "demo", values, namespace="llm")
        deployed = {name: each["spec"] for (kind, name), each in api.live().items() if kind == "Deployment"}
        replicas = {name.removeprefix("demo-kvrail-"): spec["replicas"] for name, spec in deployed.items()}
        assert {role: n for role, n in replicas.items() if n and role != "router"} == serving
        (router,) = deployed["demo-kvrail-router"]["template"]["spec"]["containers"]
        named = {each["name"] for each in router["env"] if each.get("value", "").startswith("dns+")}
        kinds = {"worker": "KVRAIL_ROUTER_WORKERS"} | {
            role: f"KVRAIL_ROUTER_{role.upper()}_WORKERS" for role in ("prefill", "decode")
        }
        assert named == {kinds[role] for role in serving}
        for name, setting in values.items():
            assert f"--set {name}.replicas={setting['replicas']}" in page or f"{name}.replicas=0" in page


def test_a_wrong_value_changes_nothing(cluster):
    release, api = cluster
    release.install(str(CHART), "demo", {}, namespace="llm")
    before = specs(api.live())
    with pytest.raises(helm.HelmError, match="replicas"):
        release.upgrade(str(CHART), "demo", {"decode": {"replicas": 0}}, namespace="llm")
    assert specs(api.live()) == before
