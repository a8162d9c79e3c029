"""Events are delivered in the order of the changes, whichever thread delivers them."""

import threading

from tests.engine.bench import Bench


def test_events_of_a_later_change_do_not_overtake():
    """One thread is held up while it delivers; another one submits meanwhile."""
    bench, seen = Bench(), []
    begun, go_on = threading.Event(), threading.Event()

    def deliver(events):
        names = [name for name, _ in events]
        if names == ["first"]:
            begun.set()
            assert go_on.wait(30)
        seen.extend(names)

    bench.engine._sink = deliver
    first = threading.Thread(target=bench.submit, args=("first", [1, 2, 3]))
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=bench.submit, args=("second", [4, 5, 6]))
    second.start()
    second.join(0.2)
    go_on.set()
    first.join(30)
    second.join(30)
    assert seen == ["first", "second"]
