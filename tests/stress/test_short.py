"""A minute's worth of the long run (`make stress`): the same phases, the same zeros."""

from __future__ import annotations

from run import Run, Scale

SCALE = Scale(hits=20_000, hot_hits=30_000, retries=200, kills=50, families=32, phase_s=200.0)


def test_every_hit_is_right_and_every_kill_leaves_everything_in_agreement() -> None:
    run = Run(SCALE)
    report = run.all()
    assert report.is_good, (report, run.findings)
    assert report.is_enough(SCALE), report
    # Writer, reader, replies and start: each was killed at steps that have a name.
    for step in ("P", "reader", "send", "start"):
        assert any(name.startswith(step) for name in run.named), run.named
