"""The demo model attends over what Lynx leaves in pages nearly as over exact KV: Lynx, section 6.2 and Table 3."""

from dataclasses import replace

import pytest

from benchmarks import anchor_drafts
from benchmarks.attention_error import LIMITS, Candidate, check, exact_outputs, measure
from kvrail.codec.papers.lynx.codec import lynx_exact

CONTEXTS = 1


@pytest.fixture(scope="module")
def results():
    model = anchor_drafts.Model()
    rows = anchor_drafts.windows(model)[anchor_drafts.LENGTHS[0]][:CONTEXTS]
    groups = [anchor_drafts.continued(model, rows)]
    return measure(model, groups, exact_outputs(model, groups), Candidate("lynx-exact", lynx_exact()))


def test_error_of_attention_s_outputs_is_below_the_paper_s(results):
    check(results)
    anchor, residual, exact = (result.vnmse for result in results)
    assert LIMITS[0] / 30 < anchor <= LIMITS[0] and LIMITS[1] / 100 < residual <= LIMITS[1] and exact == 0
    assert results[0].accepted < results[2].accepted == anchor_drafts.DRAFTS


def test_bits_of_real_kv(results):
    sizes = [result.bits for result in results]
    assert sizes == pytest.approx([4.5, 8.75, 12.5], abs=0.1)
    assert sizes[1] < 8.76


def test_a_larger_error_is_an_error(results):
    with pytest.raises(SystemExit, match="stage 1"):
        check([results[0], replace(results[1], vnmse=LIMITS[1] * 1.1)])
