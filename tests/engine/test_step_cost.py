"""The cost of steps, by tokens and by sequences, is a line through what was measured."""

from kvrail.engine.schedule.cost import LineFit, StepCostModel


def test_a_line_through_steps():
    fit = LineFit()
    assert (fit.line().base, fit.line().each) == (0, 0)
    fit.note(8, 0.4)
    assert (fit.line().base, fit.line().each) == (0, 0.05)
    for size in (1, 4, 16, 8, 2):
        fit.note(size, 0.1 + 0.02 * size)
    for size in (1, 4, 16, 8, 2) * 40:
        fit.note(size, 0.1 + 0.02 * size)
    assert abs(fit.line().base - 0.1) < 1e-4 and abs(fit.line().each - 0.02) < 1e-5
    cost = StepCostModel()
    cost.note(0, 4, 0.02)
    cost.note(100, 4, 0.5)
    assert (cost.decode.each, cost.prefill.each, cost.full_prefill) == (0.005, 0.005, 0.0)
    cost.note(300, 4, 0.5)
    cost.note(500, 4, 1.1)
    assert abs(cost.full_prefill - 0.002) < 1e-9
