"""What is measured: moments, spans, every metric's name, and the text in which it is shown.

docs/metrics.md lists all metrics; `make docs-metrics` writes it from here. Router and workers share no name but those
of `show_process`.
"""
