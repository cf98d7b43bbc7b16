"""When a silent peer is probed and when it is lost, on a made-up clock."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.peers.liveness import Liveness, Verdict


def liveness():
    return Liveness(heartbeat_s=1.0, timeout_s=5.0, now=100.0)


def test_a_peer_that_talks_is_not_probed():
    peer = liveness()
    for second in range(101, 120):
        peer.heard(second - 0.5)
        assert peer.tick(float(second)) is Verdict.ALIVE


def test_silence_is_probed_then_fatal():
    peer = liveness()
    verdicts = [peer.tick(100.0 + second) for second in range(1, 7)]
    assert verdicts == [Verdict.PROBE] * 5 + [Verdict.LOST]
    assert peer.silence(106.0) == 6.0


def test_an_answer_to_a_probe_counts():
    peer = liveness()
    for second in range(1, 50):
        assert peer.tick(100.0 + second) is not Verdict.LOST
        if second % 4 == 0:
            peer.heard(100.0 + second)


def test_time_in_which_this_process_stood_still_is_not_the_peers_silence():
    peer = liveness()
    assert peer.tick(101.0) is Verdict.PROBE
    assert peer.tick(161.0) is not Verdict.LOST
    verdicts = [peer.tick(161.0 + second) for second in range(1, 7)]
    assert verdicts[-1] is Verdict.LOST


@given(st.lists(st.floats(1.0, 2.0), min_size=1, max_size=100))
def test_a_peer_that_never_answers_is_lost_in_bounded_time(steps):
    """Ticks that are up to a heartbeat late do not lengthen anything."""
    peer, now = liveness(), 100.0
    for step in steps:
        now += step
        if peer.tick(now) is Verdict.LOST:
            return
    assert now - 100.0 <= 5.0 + 1e-9


def test_an_older_time_never_shortens_life():
    peer = liveness()
    peer.heard(104.0)
    peer.heard(101.0)
    assert peer.silence(104.0) == 0.0
