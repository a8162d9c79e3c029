"""Where a prompt is computed, against the sum of what everybody waits, counted out for each number of tokens."""

from hypothesis import assume, given
from hypothesis import strategies as st

from kvrail.engine.schedule.cost import Line
from kvrail.services.decode.local import UNMEASURED_TOKENS, LocalPrefill, local_tokens

SECONDS = st.floats(1e-6, 0.1)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.integers(0, 64), st.integers(1, 600))
def test_as_many_as_cost_less_than_fetching_them(base, each, far_base, far_each, running, most):
    found = local_tokens(Line(base, each), Line(far_base, far_each), running, most)

    def loss(tokens: int) -> float:
        """Seconds that computing here costs everybody, less those that fetching costs the request."""
        return (base + each * tokens) * (1 + running) - (far_base + far_each * tokens)

    assume(all(abs(loss(tokens)) > 1e-9 for tokens in (found, found + 1, most)))
    if each * (1 + running) > far_each:  # then the loss grows, and there is one turning point
        assert found == 0 or loss(found) <= 0
        assert found == most or loss(found + 1) > 0
    else:
        assert found == (most if loss(most) <= 0 else 0)


def test_more_streams_beside_it_leave_less_to_compute_here():
    local, remote = Line(2e-3, 25e-6), Line(15e-3, 30e-6)
    found = [local_tokens(local, remote, running, 512) for running in (0, 1, 4, 16, 64)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (512, 0)


def test_what_is_not_measured_is_the_old_constant_and_a_number_of_the_operators_holds():
    local = LocalPrefill(-1, 256)
    assert local.tokens(3, Line()) == UNMEASURED_TOKENS
    local.remote.note(1000, 0.05)
    assert local.tokens(0, Line()) == UNMEASURED_TOKENS
    line = Line(1e-3, 1e-5)
    assert local.tokens(0, line) == 256
    assert LocalPrefill(7, 256).tokens(0, line) == 7
