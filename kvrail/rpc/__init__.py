"""gRPC between services: channels, servers, health, deadlines and the one mapping of errors."""
