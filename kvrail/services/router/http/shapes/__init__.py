"""What answers look like, for the OpenAPI document. A test holds real answers against these."""
