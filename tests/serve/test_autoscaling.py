"""The policy by itself; engines that come and go on Ray are test_rollout.py's."""

from __future__ import annotations

from types import SimpleNamespace

from serve_apps.autoscaling import RowsAndHeadroom


def wanted(policy: RowsAndHeadroom, *replicas: dict[str, float], target: int = 1) -> int:
    names = {name for r in replicas for name in r}
    metrics = {name: {n: r[name] for n, r in enumerate(replicas)} for name in names}
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)
    return policy(context)[0]


def engine(held: float, rows: float = 4, unit_ms: float = 50, waiting: float = 0) -> dict[str, float]:
    return {"rows": rows, "held": held, "unit_ms": unit_ms, "waiting": waiting}


def test_engines_by_rows() -> None:
    policy = RowsAndHeadroom(max_load=0.85)
    assert wanted(policy, engine(2)) == 1
    assert wanted(policy, engine(4)) == 2  # full: the next caller should not wait for an engine to start
    assert wanted(policy, engine(4, waiting=9)) == 4
    assert wanted(policy, engine(4), engine(3)) == 2
    assert wanted(policy, engine(1), engine(2)) == 1  # the other one has room for everybody
    assert wanted(policy, engine(2), engine(2)) == 2  # room for everybody, and none for a caller


def test_engines_by_unit_time() -> None:
    policy = RowsAndHeadroom(max_load=0.8)
    assert policy.conversations(89, 100) == 8
    assert wanted(policy, engine(8, rows=89, unit_ms=100)) == 2
    assert wanted(policy, engine(7, rows=89, unit_ms=100)) == 1
    assert wanted(policy, engine(1, rows=4, unit_ms=5000), target=1) == 2  # even one is too much: one each


def test_none_without_callers() -> None:
    policy = RowsAndHeadroom()
    assert wanted(policy, engine(0), engine(0)) == 0
    assert wanted(policy, target=3) == 3  # nobody has reported yet
