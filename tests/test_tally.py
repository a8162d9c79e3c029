"""What the router counts once a token shows as prometheus_client's own metrics would."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kvrail.metrics import TOKEN_SECONDS
from kvrail.tally import TallyCounter, TallyHistogram


def shown(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


def test_tallies_show_what_prometheus_metrics_show():
    own, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("h_seconds", "A time.", ["model_name"], registry=theirs, buckets=TOKEN_SECONDS).labels("m")
    counter = Counter("c", "A count.", ["model_name"], registry=theirs).labels("m")
    tally, count = (
        TallyHistogram("h_seconds", "A time.", "m", TOKEN_SECONDS, own),
        TallyCounter("c", "A count.", "m", own),
    )
    assert shown(own) == shown(theirs)
    for value, times in ((0.0, 1), (0.001, 2), (0.0010001, 1), (5.0, 3), (6.0, 1), (0.25, 4)):
        tally.observe(value, times)
        count.inc(times)
        for _ in range(times):
            histogram.observe(value)
            counter.inc()
    assert shown(own) == shown(theirs)
