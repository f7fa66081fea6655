"""The engine's benchmarks run, write their figures, and take up where they stopped."""

import json

import pytest

from a2t.duplex.engine import Engine
from jobs.bench_serve import __main__ as bench
from jobs.bench_serve.sections import Clock, timed
from jobs.bench_serve.subject import (
    SIZES,
    UNIT_POSITIONS,
    WORDS,
    PlainLoop,
    Told,
    make_engine,
    open_at,
    qwen3,
    units_to,
)


@pytest.fixture(scope="module")
def small() -> Told:
    """The large model's form, very small."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return qwen3(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=64)


def test_both_loops_hold_the_same_residents_and_say_what_they_are_told(small: Told) -> None:
    engine, loop = make_engine(small, 1, 150), PlainLoop(small, 150)
    conversation = open_at(engine, 150, units_to(150))
    loop.fill(conversation, engine)
    for _ in range(12):
        timed(engine)
        loop.unit()
        stats = conversation.stats
        assert stats is not None and stats.forwards == WORDS + 1
        assert conversation.journal.units[-1].transcript_ids == (small.word,) * WORDS
        # text that no longer fits is folded by the engine, and kept by the loop
        assert stats.total_residents <= min(150, len(loop.held))
    assert loop.units == conversation.loop.next_unit
    assert loop.position == conversation.ledger.next_position == loop.units * UNIT_POSITIONS
    assert loop.cache.layers[0].keys.shape[2] == len(loop.held)


def test_waiting_is_skipped_and_work_is_not() -> None:
    clock = Clock()
    begin = clock()
    clock.skip_to(begin + 3600)
    assert begin + 3600 <= clock() < begin + 3660
    clock.skip_to(begin)
    assert clock() >= begin + 3600


def test_sections_are_written_one_by_one_and_not_run_again(
    small: Told, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SIZES, "embedded", lambda: small)
    command = ["--out", str(tmp_path), "--quick", "--sizes", "embedded", "--threads", "1"]
    assert bench.main([*command, "--only", "plain,batch"]) == 0
    first = json.loads((tmp_path / "results.json").read_text())
    assert set(bench.KEYS) <= set(first) and first["hour_over_ten_minutes_time"] is None
    assert first["unit_time_ratio_4k"] > 0 and first["batch16_speedup"] > 0
    assert bench.main([*command, "--only", "batch,bandwidth,hour"]) == 0
    both = json.loads((tmp_path / "results.json").read_text())
    assert both["batch16_speedup"] == first["batch16_speedup"], "it was there"
    assert both["bandwidth_share"] > 0 and both["hour_over_ten_minutes_memory"] == pytest.approx(1, abs=0.1)
    assert both["sizes"]["embedded"]["hour"]["lived_through"] is True
    assert "bench: embedded hour" in capsys.readouterr().out
    assert bench.main([*command, "--only", "bandwidth", "--again"]) == 0
    again = json.loads((tmp_path / "results.json").read_text())
    assert again["bandwidth_share"] != both["bandwidth_share"], "measured once more"
    assert again["batch16_speedup"] == both["batch16_speedup"], "what was not asked for stays"
    with pytest.raises(SystemExit):
        bench.main([*command, "--only", "speed"])
    assert "'speed' is not one of plain, batch" in capsys.readouterr().err
    assert isinstance(make_engine(small, 2, 60), Engine)
