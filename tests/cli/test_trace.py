"""What `kvrail trace` draws: lanes that do not overlap, parts that add up."""

import pytest

from kvrail.cli.remote.trace import chrome_trace, summary


def span(begin, seconds, name="frame", track="send", **sizes):
    fields = {"process": "prefill worker", "track": track, "name": name, "begin": begin, "seconds": seconds}
    return {**fields, **sizes}


def drawn(*spans, moments=None):
    told = chrome_trace({"codec": "raw", "trace": {"moments": moments or {}, "spans": list(spans)}})
    events = told["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return told, [event for event in events if event["ph"] == "X"], lanes


def test_what_overlaps_lies_in_lanes_of_its_own():
    told, events, lanes = drawn(span(0.0, 2.0), span(1.0, 2.0), span(2.0, 1.0), span(0.5, 1.0, track="encode"))
    assert told["otherData"] == {"codec": "raw"}
    placed = [(event["ts"], event["dur"], lanes[event["tid"]]) for event in events]
    assert placed == [
        (0.0, 2e6, "send"),
        (5e5, 1e6, "encode"),
        (1e6, 2e6, "send 2"),
        (2e6, 1e6, "send"),
    ]


def test_sizes_are_arguments():
    _, (event,), _ = drawn(span(0.0, 1.0, bytes=7, stage=1))
    assert event["args"] == {"bytes": 7, "stage": 1} and event["name"] == "frame"


def test_parts_add_up_to_the_request():
    moments = {
        "received": 0.0,
        "planned": 0.5,
        "dispatched": 0.5,
        "admitted": 0.5,
        "prefill_started": 1.0,
        "finished": 4.0,
    }
    _, events, _ = drawn(moments=moments)
    whole = next(event for event in events if event["cat"] == "whole")
    parts = [(event["name"], event["ts"], event["dur"]) for event in events if event["cat"] == "parts"]
    assert (whole["ts"], whole["dur"]) == (0.0, 4e6)
    assert sum(seconds for *_, seconds in parts) == pytest.approx(4e6)
    assert parts[0] == ("frontend", 0.0, 5e5)


def test_the_summary_lists_parts_and_names_the_file(tmp_path):
    text = summary({"stage_seconds": {"prefill": 0.25, "kv_wait": 0.001}}, tmp_path / "t.json")
    assert text.splitlines()[0] == "prefill     250.00 ms" and str(tmp_path / "t.json") in text
