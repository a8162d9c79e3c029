"""The processes of a cluster: router, prefill worker, decode worker, and the command line over them."""
