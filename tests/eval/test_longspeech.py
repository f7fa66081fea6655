"""LongSpeech's file layout, streaming and scoring; rates against jiwer itself and against the engine's own books."""

import json
from pathlib import Path

import jiwer
import numpy as np
import pytest

from a2t.audio.files import read_audio, write_wav
from a2t.duplex.engine import Engine
from a2t.eval.longspeech import (
    ASR,
    TEMPORAL_QA,
    LongRun,
    Session,
    answers,
    contains,
    fingerprint,
    markdown,
    read_samples,
    read_sessions,
    read_verdicts,
    results,
    stream_long,
)
from a2t.eval.longspeech_set import write_set
from a2t.eval.streaming import SYSTEMS
from a2t.models.tiny import random_tiny


def line(task: str, audio: str, content: str, reference: str, language: str = "en") -> str:
    user = {"role": "user", "audio": audio, "content": content}
    messages = [user, {"role": "assistant", "content": reference}]
    return json.dumps({"task": task, "language": language, "messages": messages}) + "\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four recordings in the published layout, one of them in another language, one only asked about."""
    rng = np.random.default_rng(0)
    for n in range(4):
        folder = tmp_path / "LongSpeechQA" / "audio"
        folder.mkdir(parents=True, exist_ok=True)
        write_wav(folder / f"{n}.wav", 0.1 * rng.standard_normal(16000 * (n + 1) + 100))
    for task, lines in {
        ASR: [(0, "w1", "The cat, sat!"), (1, "", "die katze", "de"), (2, "w2", "on a mat")],
        TEMPORAL_QA: [(0, "w3 w4", "a dog"), (0, "w5", "the cat"), (1, "w6", "x", "de"), (3, "w7", "a mat")],
    }.items():
        path = tmp_path / "LongSpeechQA" / task / "test.jsonl"
        path.parent.mkdir()
        path.write_text("".join(line(task, f"audio/{n}.wav", *rest) for n, *rest in lines))
    return tmp_path


def test_the_published_layout(data: Path) -> None:
    assert [(s.line, s.reference) for s in read_samples(data, ASR)] == [(1, "The cat, sat!"), (3, "on a mat")]
    assert [s.line for s in read_samples(data, ASR, first=1)] == [1]
    sessions = read_sessions(data)
    assert [(s.audio.name, s.prompt, s.transcript, [q.line for q in s.questions]) for s in sessions] == [
        ("0.wav", "w1", "The cat, sat!", [1, 2]),
        ("2.wav", "w2", "on a mat", []),
        ("3.wav", "", None, [4]),
    ]
    assert [len(read_sessions(data, language)) for language in ("en", "de")] == [3, 1]
    with pytest.raises(ValueError, match="no sample of language 'fr'"):
        read_sessions(data, "fr")
    with pytest.raises(ValueError, match="give the folder that holds LongSpeechQA"):
        read_sessions(data / "LongSpeechQA")
    path = data / "LongSpeechQA" / ASR / "test.jsonl"
    good = path.read_text()
    for bad, message in [
        ("{", "Expecting"),
        (line(ASR, "audio/9.wav", "", ""), "audio/9.wav' is not below"),
        ('{"language": "en", "messages": []}', "no 'user'"),
        ('{"messages": [{"role": "user"}, {"role": "assistant"}]}', "language"),
    ]:
        path.write_text(good + bad)
        with pytest.raises(ValueError, match="jsonl:4: ") as error:
            read_sessions(data)
        assert message in str(error.value)


def test_a_session_is_streamed_and_then_asked_about(data: Path, tmp_path: Path) -> None:
    model = random_tiny(3, layers=1)
    engine = Engine(model, rows=1, capacity=2048)
    session = read_sessions(data)[0]
    for name in ("a2t", "base", "floor"):
        units: list[int] = []
        run = stream_long(engine, SYSTEMS[name], session, mark="m", on_unit=lambda: units.append(1))  # noqa: B023
        assert len(run.unit_ms) == len(units) == 2 and sorted(run.answers) == [1, 2]
        assert not engine.conversations and run.peak > 0
        path = tmp_path / "raw" / f"{name}.json"
        run.write(path)
        assert LongRun.read(path) == run
    conversation = engine.open(SYSTEMS["base"].conversation("w1"))  # the request of the ASR sample
    engine.push(conversation, np.pad(read_audio(session.audio), (0, 15900)))
    said = [result.response_text for _, result, _ in engine.run()]
    engine.close(conversation)
    assert LongRun.read(tmp_path / "raw" / "base.json").written == " ".join(t for t in said if t)
    path.write_text("{}")
    with pytest.raises(ValueError, match="delete it and run again"):
        LongRun.read(path)


def test_scores_by_hand_and_by_jiwer(data: Path) -> None:
    sessions = read_sessions(data)
    wrote = {"a2t": ["the cat sad", "on mat", "x"], "base": ["", "", ""]}
    replies = {"a2t": {1: "it was A dog.", 2: "cat the", 4: "a matter"}, "base": {1: "", 2: "the cat", 4: ""}}
    runs = {
        name: [
            (s, LongRun("", w, 10 + n, [100.0, 200.0], {q.line: replies[name][q.line] for q in s.questions}))
            for n, (s, w) in enumerate(zip(sessions, wrote[name], strict=True))
        ]
        for name in wrote
    }
    found = results(runs)
    assert found["wer_a2t"] == pytest.approx(
        jiwer.wer(["the cat sat", "on a mat"], ["the cat sad", "on mat"]), abs=1e-6
    )
    assert found["wer_native"] == 1.0
    assert found["temporal_qa_a2t"] == found["temporal_qa_native"] == pytest.approx(1 / 3, abs=1e-6)
    assert (found["peak_residents_a2t"], found["unit_ms_mean_a2t"]) == (12, 150.0)
    judged = {(system, n): verdict for system in runs for n, verdict in [(1, "YES"), (2, "PARTIALLY"), (4, "NO")]}
    assert results(runs, judged)["temporal_qa_strict_a2t"] == pytest.approx(1 / 3, abs=1e-6)
    with pytest.raises(ValueError, match="answers of base have no verdict; the first is of line 2"):
        results(runs, {k: v for k, v in judged.items() if k != ("base", 2)})
    assert [a["answer"] for a in answers(runs)][:3] == ["it was A dog.", "cat the", "a matter"]
    text = markdown(found, runs, "A heading.")
    assert "| native | 100.0% | 33.3% | - | 12 |" in text and "6 words (`nfkc-lower-punctuation`)" in text


def test_contains_goes_by_whole_words_in_a_row() -> None:
    assert contains("Well: Anna came first!", "anna came first")
    assert not contains("banana came first", "anna came first")
    assert not contains("anna came home first", "anna came first")
    assert not contains("anything", "...")


def test_verdicts_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    path.write_text('{"system": "a2t", "line": 3, "verdict": " yes"}\n')
    assert read_verdicts(path) == {("a2t", 3): "YES"}
    for bad, message in [('{"system": "a2t", "line": 3, "verdict": "MAYBE"}', "not one of YES"), ("{}", "is needed")]:
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            read_verdicts(path)


def test_a_fingerprint_sees_texts_audio_and_weights(data: Path) -> None:
    session = read_sessions(data)[0]
    weights = data / "w"
    weights.write_bytes(b"1")
    marks = {fingerprint(SYSTEMS[n], session, [weights]) for n in ("a2t", "base", "floor", "unbounded")}
    assert len(marks) == 4
    before = fingerprint(SYSTEMS["a2t"], session, [weights])
    assert before != fingerprint(SYSTEMS["a2t"], Session(session.audio, "", session.transcript, ()), [weights])
    weights.write_bytes(b"2")
    assert before != fingerprint(SYSTEMS["a2t"], session, [weights])


def test_the_equivalent_set_is_in_the_same_layout_and_repeats(tmp_path: Path) -> None:
    made = [read_sessions(write_set(tmp_path / name, sessions=1, seed=4, minutes=0.3)) for name in "ab"]
    assert made[0][0].audio.read_bytes() == made[1][0].audio.read_bytes()
    (session,) = made[0]
    words = (session.transcript or "").split()
    assert 18 < session.seconds < 40 and len(words) > 15
    assert session.questions
    for q in session.questions:
        first, came, in_which = q.reference.split()
        others = [w for w in q.question.split()[3:] if w not in ("or", first)]
        assert (came, in_which) == ("came", "first") and len(others) == 1
        assert words.index(first) < words.index(others[0])
