"""The processes of a cluster: router, prefill worker, decode worker."""
