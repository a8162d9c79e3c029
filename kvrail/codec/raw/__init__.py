"""The codec that changes nothing: the baseline of every other one."""
