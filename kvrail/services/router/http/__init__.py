"""The HTTP door: connections, middleware, bodies, keys and quotas, routes, the OpenAPI document."""
