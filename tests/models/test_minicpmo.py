"""MiniCPM-o against the recorded official run, and what only this project does with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from a2t.duplex.conversation import ConversationConfig
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Engine, EngineConfig
from a2t.eval.parity import check_folder
from a2t.kv.kinds import Kind
from a2t.models import adapters
from a2t.models.memory import on_paper
from a2t.models.minicpmo import MiniCPMO, load_minicpmo
from jobs import check_parity

GOLDEN = Path(os.environ.get("A2T_GOLDEN", "../shared/golden"))
DUPLEX = Path(__file__).parent.parent / "data" / "minicpmo-duplex"


@pytest.mark.parametrize("name", ["minicpmo-duplex", "minicpmo-duplex-window", "minicpmo-duplex-context"])
def test_parity_with_the_official_code(name: str) -> None:
    folder = DUPLEX if name == DUPLEX.name else GOLDEN / name
    if not folder.is_dir():
        pytest.skip("no golden files (A2T_GOLDEN)")
    report = check_folder(folder)
    assert report.ok, "\n".join(report.lines())
    assert report.quantities["decision logits"].compared == 40
    assert report.quantities["decision logits"].largest < 5e-6  # the bound is 1e-4


def altered(folder: Path, change: dict[str, object]) -> Path:
    """The golden folder's first three units with the second unit's recorded facts changed."""
    folder.mkdir()
    for file in DUPLEX.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    told = json.loads((DUPLEX / "expected.json").read_text())
    told["units"] = told["units"][:3]
    told["units"][1] |= change
    (folder / "expected.json").unlink()
    (folder / "expected.json").write_text(json.dumps(told))
    return folder


def test_the_job_tells_agreement_from_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_parity.main([str(altered(tmp_path / "same", {}))]) == 0
    assert check_parity.main([str(altered(tmp_path / "fed", {"fed_ids": [272, 260]}))]) == 1
    assert "tokens fed" in (out := capsys.readouterr().out) and "DIFFERS, first at its largest in unit 1" in out
    assert check_parity.main([str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err


def engine_of(model: MiniCPMO, rows: int = 1) -> Engine:
    return Engine(model, rows, 2048, config=EngineConfig(side_channel_budget_s=None))


def config(**changes: object) -> ConversationConfig:
    duplex = DuplexConfig.minicpmo(greedy=True, max_new_speak_tokens_per_chunk=6, max_transcript_tokens=4)
    return ConversationConfig(**{"duplex": duplex, "budget": 200, **changes})  # type: ignore[arg-type]


def samples(units: int) -> np.ndarray:
    return soundfile.read(DUPLEX / "input.flac", dtype="float32")[0][: 16_000 * units]


@pytest.fixture(scope="module")
def writing() -> MiniCPMO:
    """The recorded checkpoint with a side channel, whose opening row is made to win after the first unit's decision."""
    model = load_minicpmo(DUPLEX, side_channel=True)
    start, end = model.tokens.asr_start, model.tokens.asr_end
    assert start is not None and end is not None
    assert (start, end) == (281, 282) and model.shape.vocab == 283  # there was no spare row
    assert model.tokenizer.decode([start, 72, end]) == model.tokenizer.decode([72])
    heard: list[torch.Tensor] = []
    engine = Engine(model, 1, 512, observer=lambda _c, _f, _p, h_TD: heard.append(h_TD[-1].clone()))
    engine.push(engine.open(config(duplex=DuplexConfig.minicpmo(greedy=True, draft=False))), samples(1))
    engine.run()
    after_decision = heard[2]  # after the prompt, and the unit's audio
    with torch.no_grad():
        model.language.lm_head.weight[start] = 20 * after_decision / after_decision.square().sum()
    return model


def test_one_loop_engine_and_policy_run_it_with_the_side_channel(writing: MiniCPMO) -> None:
    engine = engine_of(writing)
    conversation = engine.open(config())
    engine.push(conversation, samples(16))
    finished = engine.run()
    assert len(finished) == 16
    assert finished[0][1].segment_opened
    peak = max(stats.total_residents for _, _, stats in finished)
    text = conversation.ledger.counts()
    kept = text[Kind.PREFIX] + text[Kind.TRANSCRIPT] + text[Kind.RESPONSE]
    assert text[Kind.PREFIX] == 69 and any(stats.evicted for _, _, stats in finished)
    assert peak <= max(200, kept + 5 * 30)
    conversation.ledger.check()


def test_a_saved_conversation_goes_on_bit_for_bit(writing: MiniCPMO, tmp_path: Path) -> None:
    pcm = samples(12)
    engine = engine_of(writing)
    whole = engine.open(config())
    engine.push(whole, pcm[: 16_000 * 7 + 500])
    engine.run()
    engine.save(whole, tmp_path / "saved")
    again = engine_of(writing)
    copy = again.restore(tmp_path / "saved")
    results = []
    for e, c in ((engine, whole), (again, copy)):
        e.push(c, pcm[16_000 * 7 + 500 :])
        results.append([(r.native_ids, r.transcript_ids) for _, r, _ in e.run()])
    assert results[0] == results[1] and len(results[0]) == 5
    a, b = engine.arena.export(whole.row), again.arena.export(copy.row)
    assert torch.equal(a["keys"], b["keys"]) and torch.equal(a["values"], b["values"])


def test_an_adapter_is_merged_on_loading_and_several_serve_from_one_base(tmp_path: Path) -> None:
    base = load_minicpmo(DUPLEX, side_channel=True)
    rows = [i for i in (base.tokens.asr_start, base.tokens.asr_end) if i is not None]
    for seed, name in enumerate(("a", "b")):
        wrapped = adapters.new_adapter(load_minicpmo(DUPLEX, side_channel=True).lm, rows)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(seed)
        for p in wrapped.parameters():
            if p.requires_grad:
                p.data += 0.05 * torch.randn(p.shape, generator=generator)
        adapters.save_adapter(wrapped, tmp_path / name)
    shared = load_minicpmo(DUPLEX, side_channel=True)
    both = adapters.load_adapters(shared.lm, {n: tmp_path / n for n in ("a", "b")})  # type: ignore[arg-type]
    several = MiniCPMO(both, shared.encoder, shared.tokenizer, "several")

    def first_logits(model: MiniCPMO) -> torch.Tensor:
        heard: list[torch.Tensor] = []
        engine = Engine(model, 1, 512, observer=lambda _c, feed, _p, h: heard.append(h[-1:].clone()))
        engine.push(engine.open(config()), samples(1))
        engine.run()
        return model.logits(heard[1])

    plain = first_logits(base)
    for name in ("b", "a"):
        adapters.use_adapter(both, name)
        merged = first_logits(load_minicpmo(DUPLEX, adapter=tmp_path / name))
        torch.testing.assert_close(first_logits(several), merged, rtol=0, atol=2e-5)
        assert (merged - plain).abs().max() > 0.01


def test_memory_on_paper_is_what_is_measured() -> None:
    model = load_minicpmo(DUPLEX)
    paper = on_paper(json.loads((DUPLEX / "config.json").read_text()), torch.float32)
    engine = engine_of(model)
    conversation = engine.open(config(policy="unbounded"))
    largest = 0
    for unit in range(30):
        engine.push(conversation, samples(31)[16_000 * unit : 16_000 * (unit + 1)], force_listen=True)
        engine.run()
        tensors, _ = conversation.encoder_state.export()
        largest = max(largest, sum(t.nbytes for t in tensors.values()))
    engine.settle(conversation)
    kv = sum(t.nbytes for t in engine.arena.export(conversation.row).values())
    assert kv == paper.bytes_per_position * conversation.ledger.residents
    assert largest == pytest.approx(paper.fixed, rel=0.02)


@pytest.mark.parametrize("policy", ["unbounded", "basic"])
def test_batched_conversations_are_those_held_alone(policy: str) -> None:
    """Two conversations that start at different times, in one batch, against each by itself."""
    model = load_minicpmo(DUPLEX, dtype=torch.float64)
    options = {"high": 150, "low": 110} if policy == "basic" else {}
    pcm = [samples(9), samples(20)[-16_000 * 9 :]]
    wanted = []
    for p in pcm:
        engine = engine_of(model)
        engine.push(engine.open(config(policy=policy, policy_options=options)), p)
        wanted.append([r.native_ids for _, r, _ in engine.run()])
    engine = engine_of(model, rows=2)
    first = engine.open(config(policy=policy, policy_options=options))
    engine.push(first, pcm[0][:40_000])
    found: dict[str, list[list[int]]] = {}
    done = engine.run()
    second = engine.open(config(policy=policy, policy_options=options))
    engine.push(first, pcm[0][40_000:])
    engine.push(second, pcm[1])
    for c, r, _ in done + engine.run():
        found.setdefault(c.id, []).append(r.native_ids)
    assert [found[first.id], found[second.id]] == wanted
