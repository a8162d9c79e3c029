"""The decode worker: owns the pages, receives KV from prefill workers and generates tokens."""
