"""A Kubernetes API that keeps objects in memory, for Helm to install into: `with api_server() as server`."""

import asyncio
import json
import threading
from contextlib import contextmanager

import kmock
import yaml

KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "PersistentVolumeClaim": "persistentvolumeclaims",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"Deployment": "deployments"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "batch/v1": {"Job": "jobs"},
    "cert-manager.io/v1": {"Certificate": "certificates"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute": "httproutes"},
    "inference.networking.k8s.io/v1": {"InferencePool": "inferencepools"},
    "keda.sh/v1alpha1": {"ScaledObject": "scaledobjects"},
    "monitoring.coreos.com/v1": {"PrometheusRule": "prometheusrules", "ServiceMonitor": "servicemonitors"},
    "networking.k8s.io/v1": {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
}
"""What a cluster with the operators that the chart knows has: plural names by version and kind."""
START_S = 30.0


class Emulator(kmock.KubernetesEmulator):
    """Adds what Helm needs: server-side apply, the core group's name in discovery, and no schemas to validate by."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        self["get /version"] << {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
        self["get /openapi/v2"] << b""
        self["get /openapi/v3"] << {"paths": {}}
        for version, kinds in KINDS.items():
            for kind, plural in kinds.items():
                verbs = {"create", "delete", "get", "list", "patch", "update", "watch"}
                self.resources[f"{version}/{plural}"] = kmock.ResourceInfo(kind=kind, namespaced=True, verbs=verbs)

    async def _serve_version(self, request):
        found = await super()._serve_version(request)
        return found | {"groupVersion": found["groupVersion"].removeprefix("/")}

    async def _handle(self, request):
        """Apply as a server does: the whole object is what was sent last. A manager's fields are not followed."""
        if request.method.value.upper() == "PATCH" and request.resource is not None:
            key = (request.resource, request.namespace, request.name)
            sent = request.data if isinstance(request.data, dict) else json.loads(request.body)
            if key not in self.objects:
                self.objects[key] = sent
            else:
                self.objects[key].create(sent)
        return await super()._handle(request)

    def live(self):
        """All objects that there are, by kind and name."""
        raws = [each.last.raw for each in self.objects.values() if not each.deleted]
        return {(raw["kind"], raw["metadata"]["name"]): raw for raw in raws}


class ApiServer:
    """An emulator that runs in a thread of its own; `kubeconfig` leads to it."""

    def __init__(self):
        self.emulator = None
        self.kubeconfig = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    async def _serve(self):
        self._end = asyncio.Event()
        emulator = Emulator()
        async with emulator, kmock.Server(emulator) as server:
            self.emulator = emulator
            self.kubeconfig = _kubeconfig(f"http://127.0.0.1:{server.port}")
            self._ready.set()
            await self._end.wait()

    def start(self):
        self._thread.start()
        assert self._ready.wait(START_S), "the API did not start"

    def stop(self):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_S)


@contextmanager
def api_server():
    server = ApiServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _kubeconfig(url):
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [context],
            "current-context": "c",
        }
    )
