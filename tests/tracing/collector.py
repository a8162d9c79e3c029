"""An OTLP collector with the official service definition: in a test's process, or as a program that prints spans."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

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
    def __init__(self, address="127.0.0.1:0"):
        self.spans = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(address)
        self._server.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request, context):
        for resource in request.resource_spans:
            service = values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.keep(told(service, span))
        return trace_service_pb2.ExportTraceServiceResponse()

    def keep(self, span):
        self.spans.append(span)

    def stop(self):
        self._server.stop(0)

    def wait(self):
        self._server.wait_for_termination()


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


class Printer(Collector):
    """Prints each span as a line of JSON."""

    def keep(self, span):
        sys.stdout.write(f"{json.dumps(asdict(span))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    Printer(sys.argv[1]).wait()
