"""What is recorded is what the model says when it streams, and the teacher run on it says the same."""

import json
from dataclasses import replace

import fsspec
import numpy as np
import pytest
import torch

from a2t.audio.files import write_wav
from a2t.data.manifest import Manifest, Row, Word
from a2t.distill import recording
from a2t.distill.config import DistillConfig
from a2t.distill.corpus import Joined
from a2t.distill.recorded import RecordPlan, open_recorded, record_corpus
from a2t.distill.recording import Report, known_rows, record
from a2t.distill.teacher import model_hash, teach
from a2t.duplex.conversation import ConversationConfig
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Engine, EngineConfig
from a2t.duplex.protocol import SpecialTokens
from a2t.models.tiny import random_tiny

CONFIG = DistillConfig()


@pytest.fixture(autouse=True)
def short_settling(monkeypatch):
    monkeypatch.setattr(recording, "SETTLE_UNITS", 2)


@pytest.fixture(scope="module")
def model():
    """A random model that speaks: the choice between listening and the rest is near even."""
    return random_tiny(3, torch.float64)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    rows = []
    for n, seconds in enumerate((2.4, 1.0, 3.7, 0.6, 17.0)):
        write_wav(folder / f"{n}.wav", 0.1 * rng.standard_normal(int(seconds * 16000)))
        words = [Word(f"w{i}", t, t + 0.3) for i, t in enumerate(np.arange(0.1, seconds - 0.3, 0.35).tolist())]
        words += {2: [Word("w9", seconds + 3, seconds + 3.2)], 3: [Word("w1", 0.45, 0.6)]}.get(n, [])
        native = [["<|listen|>"], ["<|speak|>", "w3", 40, "<|turn_eos|>", "<|chunk_eos|>"]] if n != 3 else None
        rows.append(
            Row(f"r{n}", f"{n}.wav", seconds, "s", "train", tuple(words), native=native, extra={"prompt": f"w{n}"})
        )
    Manifest.write(folder / "manifest.jsonl", rows)
    return folder / "manifest.jsonl"


def test_recorded_native_tokens_and_teacher_states_are_those_of_the_live_stream(model, manifest):
    rows = Manifest.read(manifest)[:3]
    tokens = SpecialTokens.from_lookup(model.tokenizer.token_id)
    report = Report()
    examples = list(record(model, manifest, rows, at_once=3, report=report))
    taught = teach(model.modules.llm, tokens, examples)
    said = set()
    for row, example, t in zip(rows, examples, taught, strict=True):
        live = []

        def watch(conversation, feed, positions, h_TD, live=live):
            live.append((list(feed.ids), h_TD.clone()))

        engine = Engine(model, 1, 1024, config=EngineConfig(side_channel_budget_s=None), observer=watch)
        duplex = DuplexConfig(side_channel=False)
        conversation = engine.open(
            ConversationConfig(budget=None, policy="unbounded", duplex=duplex, system_prompt=row.extra["prompt"])
        )
        pcm = np.zeros(16000 * len(example.units), np.float32)
        wav = np.frombuffer((manifest.parent / row.audio).read_bytes()[44:], np.int16) / 32768
        pcm[: len(wav)] = wav
        engine.push(conversation, pcm)
        results = [result for _, result, _ in engine.run()]
        engine.settle(conversation)
        assert [list(u.native) for u in example.units] == [r.native_ids for r in results]
        assert not conversation.loop.turn_open or len(results) > row.units()
        hidden = torch.cat([h for _, h in live])
        # Fed positions are those of the layout: the state that predicts a token stands just before it.
        predicting = [n for n, i in enumerate(i for ids, _ in live for i in ids)]
        assert len(predicting) == len(example.prefix) + sum(12 + len(u.native) for u in example.units)
        at, n = [], len(example.prefix)
        for u in example.units:
            at += [n + 10 + k for k in range(len(u.native))]
            n += 12 + len(u.native)
        torch.testing.assert_close(t.hidden_ED, hidden[at], rtol=0, atol=1e-10)
        assert example.prefix == tuple(model.tokenizer.encode(row.extra["prompt"]))
        said |= {i for u in example.units for i in u.native}
    assert len(said) > 3, "a model that only listens shows little"
    words = [[model.tokenizer.decode(u.segment or ()) for u in e.units] for e in examples]
    assert words[0] == ["w0", "w1 w2 w3", "w4 w5"] + [""] * (len(words[0]) - 3)
    assert report.rows == 3 and report.words == sum(len(r.words) for r in rows) - 1
    assert report.past_end == ["r2: w9"] and report.trailing_units == 2
    assert "1 words past the end of their audio (r2: w9)" in str(report)


def test_one_at_a_time_and_from_a_uri_it_records_the_same(model, manifest):
    memory = fsspec.filesystem("memory")
    for file in manifest.parent.iterdir():
        memory.pipe_file(f"/a2t-recording/{file.name}", file.read_bytes())
    there = f"memory://a2t-recording/{manifest.name}"
    rows, report = Manifest.read(manifest), Report()
    once = list(record(model, there, Manifest.read(there), at_once=5, max_seconds=None, report=report))
    memory.rm("/a2t-recording", recursive=True)
    for a, b in zip(once, record(model, manifest, rows, at_once=1, max_seconds=None), strict=True):
        assert (a.id, a.prefix, a.units) == (b.id, b.prefix, b.units)
        torch.testing.assert_close(a.audio_AD, b.audio_AD, rtol=0, atol=1e-5)  # the encoder runs in float32
    # Shorter than a unit, its last word heard out only in the unit after it; and longer than most.
    short, long = ([model.tokenizer.decode(u.segment or ()) for u in e.units] for e in once[3:])
    assert short[:2] == ["w0", "w1"] and not any(short[2:])
    assert len(long) >= 17 and " ".join(filter(None, long)).split() == [w.word for w in rows[4].words]
    assert not report.too_long


def test_native_units_of_the_manifest_are_taken_as_they_are(model, manifest):
    rows = Manifest.read(manifest)
    [example] = record(model, manifest, rows[:1], "manifest")
    ids = [model.tokenizer.token_id(t) for t in ("<|speak|>", "w3", "<|turn_eos|>", "<|chunk_eos|>")]
    listen = model.tokenizer.token_id("<|listen|>")
    assert [u.native for u in example.units] == [(listen,), (ids[0], ids[1], 40, ids[2], ids[3]), (listen,)]
    [streamed] = record(model, manifest, rows[:1])
    torch.testing.assert_close(example.audio_AD, streamed.audio_AD[:30], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="row 'r3' has no native units"):
        list(record(model, manifest, rows[3:4], "manifest"))
    with pytest.raises(ValueError, match="row 'r0': the vocabulary has no native token 'hm'"):
        list(record(model, manifest, [replace(rows[0], native=(("hm",),))], "manifest"))
    with pytest.raises(ValueError, match="row 'r0': .* does not know 'hm'"):
        list(record(model, manifest, [replace(rows[0], words=(Word("hm", 0.0, 0.1),))], "manifest"))


def test_unknown_words_are_named_all_at_once(model, manifest):
    rows = Manifest.read(manifest)
    encode = model.tokenizer.encode
    assert known_rows(rows, encode) == (rows, "")
    odd = [replace(rows[0], words=(Word("hm", 0.0, 0.1), Word("ah", 0.1, 0.2))), *rows[1:]]
    with pytest.raises(ValueError, match=rf"^1 of {len(rows)} rows .* know: ah, hm\. --leave-out-unknown goes on"):
        known_rows(odd, encode)
    kept, said = known_rows(odd, encode, leave_out=True)
    assert kept == rows[1:] and said.startswith(f"left out: 1 of {len(rows)} rows")
    with pytest.raises(ValueError, match="None is left"):
        known_rows(odd[:1], encode, leave_out=True)


def test_a_recorded_corpus_goes_on_where_it_was_stopped_and_joins(model, manifest, tmp_path):
    tokens = SpecialTokens.from_lookup(model.tokenizer.token_id)
    rows = Manifest.read(manifest)
    plan = RecordPlan.of(
        tmp_path, manifest, rows, model_hash(model.modules.llm, tokens), CONFIG, rows_per_part=2, dtype=torch.float64
    )
    assert plan.unfinished() == [0, 1, 2]
    plan.write(1, model)
    (tmp_path / "part-00000.part").mkdir()
    with pytest.raises(ValueError, match="lacks 2 of 3 parts, the first is 0"):
        plan.open()
    stamp = (tmp_path / "part-00001").stat().st_mtime_ns
    corpus = record_corpus(plan, model)
    assert (tmp_path / "part-00001").stat().st_mtime_ns == stamp
    assert list(corpus.ids) == ["r0", "r1", "r2", "r3"], "the row of 17 s is too long"
    assert plan.report().too_long == ["r4"] and plan.report().rows == 4
    again = open_recorded(tmp_path)
    for n, e in enumerate(record(model, manifest, rows[:4])):
        assert (again[n].id, again[n].prefix, again[n].units) == (e.id, e.prefix, e.units)
        torch.testing.assert_close(again[n].audio_AD, e.audio_AD, rtol=0, atol=1e-5)
    joined = Joined(again, replace(CONFIG, join_units=50))
    assert len(joined) == 4, "utterances with different prompts do not meet"
    with pytest.raises(ValueError, match="part-00000 was recorded with another delta"):
        replace(plan, delta=0.8).unfinished()
    with pytest.raises(ValueError, match="part-00001 was recorded with another rows"):
        replace(plan, rows=(*rows[:3], replace(rows[3], speaker="t"))).unfinished()
    assert json.loads((tmp_path / "part-00000" / "report.json").read_text())["rows"] == 2
