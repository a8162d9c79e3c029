"""An OTLP collector in this process, with the official service definition."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Told:
    """One span, and which service told it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    begin: int
    end: int
    attributes: dict
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request, context):
        for resource in request.resource_spans:
            service = values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [told(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self):
        self._server.stop(0)


def values(attributes):
    found = {}
    for each in attributes:
        value = each.value
        kind = value.WhichOneof("value")
        found[each.key] = [v.string_value for v in value.array_value.values] if kind == "array_value" else value
        if kind != "array_value":
            found[each.key] = getattr(value, kind)
    return found


def told(service, span):
    return Told(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        values(span.attributes),
        span.status.code == 2,
    )
