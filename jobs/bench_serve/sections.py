"""The measurements. Each gives JSON values; what is compared in one of them runs side by side in this process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from a2t.duplex.engine import Conversation, ConversationConfig, Engine, EngineConfig
from a2t.models.base import DuplexModel
from a2t.models.tiny import ADAPTER, load_tiny
from jobs.bench_serve.subject import SILENCE, UNIT, UNIT_POSITIONS, PlainLoop, Told, make_engine, open_at, units_to

BUDGET = 4000
SEARCH_S = 900.0
"""After so long no further number of conversations is tried."""


def say(line: str) -> None:
    print(f"bench: {line}", flush=True)


@dataclass(frozen=True)
class Effort:
    """How much is done: all of it, or what shows that it works (`quick`). `large`: a model whose units take seconds."""

    quick: bool
    large: bool
    name: str

    def say(self, line: str) -> None:
        say(f"{self.name}: {line}")

    def of(self, full: int, large: int, quick: int) -> int:
        return quick if self.quick else large if self.large else full


def timed(engine: Engine) -> float:
    """Seconds for one unit of every conversation of the engine."""
    begin = time.perf_counter()
    for c in engine.conversations.values():
        engine.push(c, SILENCE)
    engine.run()
    return time.perf_counter() - begin


def plain(model: Told, effort: Effort) -> dict[str, Any]:
    """(a) One conversation against the plain loop, unit by unit in turn: ten minutes from nothing, or, for the large
    model, units at the budget."""
    budget = effort.of(BUDGET, BUDGET, 300)
    units = effort.of(600, 4, 12)
    whole = not effort.large and not effort.quick
    engine = make_engine(model, 1, budget)
    c = open_at(engine, budget, 0 if whole else units_to(budget) + 3)
    loop = PlainLoop(model, budget)
    if not whole:
        loop.fill(c, engine)
        timed(engine)
        loop.unit()
    ours, theirs = [], []
    for n in range(units):
        ours.append(timed(engine))
        begin = time.perf_counter()
        loop.unit()
        theirs.append(time.perf_counter() - begin)
        assert abs(len(loop.held) - c.ledger.residents) <= UNIT_POSITIONS, "both hold the same"
        if n % 100 == 99:
            effort.say(
                f"{n + 1} units, {c.ledger.residents} residents: {ours[-1] * 1e3:.0f} / {theirs[-1] * 1e3:.0f} ms"
            )
    full = slice(-(units // 2), None)  # by then the budget is reached
    return {
        "unit_time_ratio_4k": median(ours[full]) / median(theirs[full]),
        "residents": c.ledger.residents,
        "unit_ms": 1e3 * median(ours[full]),
        "plain_unit_ms": 1e3 * median(theirs[full]),
        "all_units": {"units": units, "from_nothing": whole, "time_ratio": sum(ours) / sum(theirs)},
    }


def batch(model: Told, effort: Effort) -> dict[str, Any]:
    """(b) N conversations in one engine against the same one by one, at several sizes of their memories."""
    found: dict[str, Any] = {}
    for residents in (60,) if effort.quick else (400,) if effort.large else (400, 960, 4000):
        engines = {n: make_engine(model, n, residents) for n in (1, 4, 16)}
        for n, engine in engines.items():
            for seed in range(n):
                open_at(engine, residents, units_to(residents) + 3, seed)
        times: dict[int, list[float]] = {n: [] for n in engines}
        for _ in range(1 + effort.of(12, 3, 2)):
            for n, engine in engines.items():
                times[n] += [timed(engine) for _ in range(4 if n == 1 and not effort.large else 1)]
        for spent in times.values():
            del spent[0]
        one = median(times[1])
        found[str(residents)] = {
            **{f"batch{n}_speedup": one / (median(spent) / n) for n, spent in times.items() if n > 1},
            **{f"unit_ms_at_{n}": 1e3 * median(spent) / n for n, spent in times.items()},
        }
        effort.say(
            f"{residents} residents: 16 together are {found[str(residents)]['batch16_speedup']:.2f} times as fast"
        )
    first = next(iter(found.values()))
    return {"batch16_speedup": first["batch16_speedup"], "batch4_speedup": first["batch4_speedup"], "residents": found}


def hour(model: Told, effort: Effort) -> dict[str, Any]:
    """(c) A conversation in its 60th minute against one in its 10th, in turn. Small models live through the hour, the
    large one's state is laid out as it would be (its keys and values random)."""
    minutes = (1, 3) if effort.quick else (10, 60)
    budget = effort.of(BUDGET, BUDGET, 300)
    lived = not effort.large
    engines, peak_rss = [], []
    for n in minutes:
        engine = make_engine(model, 1, budget)
        open_at(engine, budget, 0 if lived else 60 * n)
        if lived:
            for minute in range(n):
                for _ in range(60):
                    timed(engine)
                if minute % 10 == 9:
                    effort.say(f"minute {minute + 1} of {n}")
        peak_rss.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        engines.append(engine)
    times: list[list[float]] = [[], []]
    for _ in range(effort.of(60, 3, 10)):
        for engine, spent in zip(engines, times, strict=True):
            spent.append(timed(engine))
    held = [_bytes(next(iter(engine.conversations.values()))) for engine in engines]
    early, late = (median(t) for t in times)
    return {
        "hour_over_ten_minutes_time": late / early,
        "hour_over_ten_minutes_memory": held[1] / held[0],
        "minutes": list(minutes),
        "lived_through": lived,
        "unit_ms": [1e3 * early, 1e3 * late],
        "bytes": held,
        "peak_rss_ratio": peak_rss[1] / peak_rss[0],
    }


def _bytes(c: Conversation) -> int:
    assert c.stats is not None
    return c.stats.kv_bytes + c.stats.encoder_bytes


def forwards(model: Told, effort: Effort) -> dict[str, Any]:
    """Forwards of a listening unit with three transcript tokens, and of a silent one. The small model hears speech and
    decides for itself; the large one's words are given."""
    if effort.large:
        engine = make_engine(model, 1, 100)
        c = open_at(engine, 100)
        for _ in range(3):
            timed(engine)
        assert c.stats is not None
        return {"forwards_listen_unit": float(c.stats.forwards), "decides": False}
    from jobs.demo.script import script

    duplex: DuplexModel = load_tiny(adapter=ADAPTER)  # type: ignore[assignment]
    engine = Engine(duplex, config=EngineConfig(side_channel_budget_s=None))
    conversation = engine.open(ConversationConfig(BUDGET))
    with TemporaryDirectory() as folder:
        _, pcm_S = script(Path(folder), 0.5 if effort.quick else 3.0, 0)
    engine.push(conversation, pcm_S)
    done = [(result, stats.forwards) for _, result, stats in engine.run()]
    listened = [(len(r.transcript_ids) if r.segment_opened else 0, n) for r, n in done if r.listening]
    silent, three = ([n for words, n in listened if words == wanted] for wanted in (0, 3))
    written = [(words, n) for words, n in listened if words]
    return {
        "forwards_listen_unit": mean(three) if three else None,
        "forwards_silent_unit": mean(silent) if silent else None,
        "forwards_all_units": mean(n for _, n in done),
        "forwards_over_words_plus_one": mean(n / (words + 1) for words, n in written) if written else None,
        "units": {"all": len(done), "three_words": len(three), "silent": len(silent)},
        "decides": True,
    }


def bandwidth(model: Told, effort: Effort) -> dict[str, Any]:
    """(e) Bytes that a unit must read (weights and residents, once a forward) at this machine's bandwidth, over the
    time it takes."""
    read_bytes_s = _read_bandwidth(effort)
    found: dict[str, Any] = {}
    residents = effort.of(BUDGET, BUDGET, 300)
    for n in (1,) if effort.large or effort.quick else (1, 16):
        engine = make_engine(model, n, residents)
        for seed in range(n):
            open_at(engine, residents, units_to(residents) + 3, seed)
        timed(engine)
        spent = median(timed(engine) for _ in range(effort.of(10, 3, 3)))
        c = next(iter(engine.conversations.values()))
        assert c.stats is not None
        read = c.stats.forwards * (model.weight_bytes + n * c.stats.kv_bytes)
        found[f"share_at_{n}"] = read / read_bytes_s / spent
        found[f"bytes_at_{n}"] = read
    return {"bandwidth_share": found["share_at_1"], "read_gb_s": read_bytes_s / 1e9, "residents": residents, **found}


def _read_bandwidth(effort: Effort) -> float:
    """Bytes a second that this machine reads from memory: the best of several passes over more than any cache holds."""
    x_N = torch.ones((64 if effort.quick else 512) * 2**20 // 4)
    best = min(_seconds(x_N.sum) for _ in range(3 if effort.quick else 7))
    return x_N.nbytes / best


def _seconds(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


class Clock:
    """Time goes as it does, but what would be spent waiting is skipped: a machine that is not full needs no hour to
    show what it does in one."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.skipped

    def skip_to(self, then: float) -> None:
        self.skipped += max(0.0, then - self())


def realtime(model: Told, effort: Effort) -> dict[str, Any]:
    """(d) How many conversations, each a unit a second and all out of step, go through without a unit over its second:
    in one engine, and with an engine for each."""
    units, residents = effort.of(10_000, 60, 60), effort.of(1000, 400, 60)
    found: dict[str, Any] = {"units": units, "residents": residents}
    for name, together in (("realtime_conversations", True), ("realtime_conversations_unbatched", False)):
        engine = make_engine(model, 16 if together else 1, residents)
        for seed in range(engine.rows):
            open_at(engine, residents, units_to(residents) + 3, seed)
        cost = min(timed(engine) for _ in range(3)) / engine.rows
        del engine
        found[name] = 0
        until = time.perf_counter() + SEARCH_S
        for n in _fewer(int(1.05 / cost)):
            if time.perf_counter() > until:
                found[name] = None  # this machine is too unsteady to say
                break
            lengths = (min(units, 10 * n), units)  # a short one first: most that are too many show it soon
            if all(_all_in_time(model, n, together, residents, length) for length in lengths):
                found[name] = n
                break
            effort.say(f"{n} are too many")
        effort.say(f"{found[name]} conversations {'in one engine' if together else 'in an engine each'}")
    return found


def _fewer(n: int) -> Iterator[int]:
    while n > 0:
        yield n
        n = min(n - 1, int(n * 0.92))


def _all_in_time(model: Told, n: int, together: bool, residents: int, units: int) -> bool:
    """Whether `units` units in all go through without a miss, the n conversations out of step."""
    clock = Clock()
    engines = [make_engine(model, n if together else 1, residents, clock) for _ in range(1 if together else n)]
    calls = [
        (engine, open_at(engine, residents, units_to(residents) + 3, seed))
        for engine in engines
        for seed in range(engine.rows)
    ]
    begin = clock()
    due = [(begin + i / n, i) for i in range(n)]
    done = 0
    while done < units:
        while due[0][0] <= clock():
            at, i = due.pop(0)
            engine, c = calls[i]
            engine.push(c, SILENCE)
            due.append((at + 1, i))
        busy = [engine for engine in engines if engine.busy]
        if not busy:
            clock.skip_to(due[0][0])
            continue
        urgent = busy[0] if together else min(busy, key=_deadline)
        for _, _, stats in urgent.step():
            done += 1
            if stats.deadline_missed:
                return False
    return True


def _deadline(engine: Engine) -> float:
    (c,) = engine.conversations.values()
    return c.due


SECTIONS: dict[str, Callable[[Told, Effort], dict[str, Any]]] = {
    "plain": plain,
    "batch": batch,
    "forwards": forwards,
    "bandwidth": bandwidth,
    "hour": hour,
    "realtime": realtime,
}
assert len(SILENCE) == UNIT
