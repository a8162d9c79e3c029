"""The benchmark's tables of answers whose moments are known."""

import pytest

from benchmarks.progressive_client import Trace
from benchmarks.progressive_tables import LYNX_TABLE_1, lynx_table, parts_table, times_table

PLAIN = Trace("a", [(1.0, 1), *((2.0 + k / 10, k) for k in range(2, 81))], [], {"codec": "raw", "lossy": False})
PLAIN.shown = PLAIN.verified
PLAIN.usage |= {"kv_bytes": 11_000_000_000, "drafts_proposed": 0, "drafts_accepted": 0}
MADE, ACCEPTED, VERIFIED_AT = 40, 20, 6.0


def drafted() -> Trace:
    """40 drafts, a tenth of a second each, of which 20 stand; the rest decodes from second 6 on."""
    drafts = [(1.0 + k / 10, k) for k in range(2, 2 + MADE)]
    after = [(VERIFIED_AT + (k - 22) / 10, k) for k in range(22, 81)]
    usage = {"codec": "lynx", "lossy": True, "kv_bytes": 6_000_000_000}
    usage |= {"drafts_proposed": MADE, "drafts_accepted": ACCEPTED}
    return Trace("b", [(1.0, 1), *after], [(1.0, 1), *drafts, *after], usage)


def test_a_draft_counts_from_when_it_was_made_if_it_stood():
    trace = drafted()
    assert trace.kept_at(1) == 1.0
    assert (trace.kept_at(2), trace.kept_at(21)) == (1.2, 3.1)
    assert trace.kept_at(22) == trace.verified_at(2) == VERIFIED_AT
    assert trace.shown_at(22) == pytest.approx(3.2)  # a draft that did not stand
    assert trace.kept_at(32) == trace.verified_at(32) == 7.0


def test_lynx_own_figures_stand_beside_its_own_setting():
    answers = {"raw": [PLAIN], "lynx": [drafted()]}
    table = lynx_table(16384, "10gbit", answers, "qwen3-32b")
    assert table.rows == [
        ["raw", "2.200", "2.800", "5.200", "8.400", LYNX_TABLE_1["raw"]],
        ["lynx", "1.200", "1.800", "7.000", "10.200", LYNX_TABLE_1["lynx"]],
    ]
    for other in (lynx_table(8192, "10gbit", answers, "qwen3-32b"), lynx_table(16384, "10gbit", answers, "")):
        assert {row[-1] for row in other.rows} == {""}


def test_texts_that_are_not_compared_have_no_verdict():
    answers = {"raw": [PLAIN], "lynx": [drafted()]}
    table = times_table(4096, "1gbit", answers, unlike={"lynx"}, words=False, notes="Imposed.")
    same = table.header.index("same text")
    assert [row[same] for row in table.rows] == ["1 of 1", ""]
    compared = times_table(4096, "1gbit", answers, words=False)
    assert [row[same] for row in compared.rows] == ["1 of 1", "0 of 1"]
    assert table.notes.endswith("Imposed.")
    sent = table.header.index("MB")
    assert [row[sent : sent + 2] for row in table.rows] == [["11000.0", "40.000"], ["6000.0", "8.000"]]


def test_parts_are_those_of_a_requests_life():
    trace = drafted()
    trace.usage["stage_seconds"] = {"frontend": 0.001, "kv_wait": 1.5, "draft": 2.0, "verify": 0.25}
    plain = Trace("a", [], [], {"stage_seconds": {"frontend": 0.002, "kv_wait": 4.0}})
    table = parts_table(4096, "1gbit", {"raw": [plain, plain, plain], "lynx": [trace]})
    found = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [row["kv_wait"] for row in found] == ["4.000", "1.500"]
    assert [row["draft"] for row in found] == ["0.000", "2.000"]
    assert [row["verify"] for row in found] == ["0.000", "0.250"]
    assert table.header[1] == "frontend"
    assert table.header[-1] == "respond"
