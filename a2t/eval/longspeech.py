"""LongSpeech: word errors over sessions of about ten minutes, and questions about what came before what.

The published files are `LongSpeechQA/<task>/test.jsonl`, a JSON line a sample:

    {"task", "language", "messages": [{"role": "user", "audio", "content"}, {"role": "assistant", "content"}]}

Definitions.  Samples are the first N of one language in file order.  **WER** is the corpus rate over whole sessions:
what a system wrote (its side channel; of the native system, what it said) against the reference.  **Temporal QA**: at
the end of a session each question is typed and answered from the re-encoded transcript, no sound; the native system
wrote none, so its answers show what can be guessed.  `contains`: the reference's words stand in the answer, in a row.
`strict`: the share of YES among a judge model's verdicts (YES, PARTIALLY, NO), as published; the verdicts are read from
a file, since the judge is no part of this project.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from a2t.audio.files import audio_info, stream_audio
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Engine
from a2t.eval.embedded import Rate
from a2t.eval.latency import unit_latency
from a2t.eval.longspeech_set import ASR, TEMPORAL_QA
from a2t.eval.streaming import RATE, System
from a2t.eval.wer import normaliser, word_errors

SYSTEMS = ("a2t", "base", "unbounded", "floor")
VERDICTS = ("YES", "PARTIALLY", "NO")
NORMALISER = "nfkc-lower-punctuation"


@dataclass(frozen=True)
class Sample:
    task: str
    line: int  # in the task's file, from 1
    audio: Path
    question: str
    reference: str


@dataclass(frozen=True)
class Session:
    """One audio file and all that is asked about it. `transcript` None: no ASR sample has it."""

    audio: Path
    prompt: str
    transcript: str | None
    questions: tuple[Sample, ...]

    @property
    def name(self) -> str:
        """Of its raw results: the file's own name, and its folder's mark, since names repeat."""
        return f"{self.audio.stem}-{hashlib.sha256(str(self.audio.parent).encode()).hexdigest()[:8]}"

    @property
    def seconds(self) -> float:
        return audio_info(self.audio).seconds


def read_samples(folder: Path, task: str, language: str = "en", first: int | None = 100) -> list[Sample]:
    """ValueError naming file and line for a sample that is not of the published form or whose audio is missing."""
    path = folder / "LongSpeechQA" / task / "test.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing: give the folder that holds LongSpeechQA/")
    samples: list[Sample] = []
    with path.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            if len(samples) == first:
                break
            try:
                line = json.loads(text)
                by_role = {message["role"]: message for message in line["messages"]}
                user, assistant = by_role["user"], by_role["assistant"]
                if line["language"] == language:
                    audio = _find(folder, path.parent, user["audio"])
                    samples.append(Sample(task, number, audio, user["content"], assistant["content"]))
            except KeyError as error:
                raise ValueError(f"{path}:{number}: there is no {error}") from error
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    return samples


def _find(folder: Path, beside: Path, audio: str) -> Path:
    """The files do not say what their audio paths are relative to."""
    for base in (folder, folder / "LongSpeechQA", beside):
        if (base / audio).is_file():
            return (base / audio).resolve()
    raise ValueError(f"audio {audio!r} is not below {folder}")


def read_sessions(folder: Path, language: str = "en", first: int | None = 100) -> list[Session]:
    """Both tasks by audio file; ValueError if there is no sample of the language."""
    transcripts = {s.audio: s for s in read_samples(folder, ASR, language, first)}
    questions: dict[Path, list[Sample]] = {}
    if (folder / "LongSpeechQA" / TEMPORAL_QA).is_dir():
        for s in read_samples(folder, TEMPORAL_QA, language, first):
            questions.setdefault(s.audio, []).append(s)
    if not transcripts and not questions:
        raise ValueError(f"{folder} has no sample of language {language!r}")
    sessions = []
    for audio in dict.fromkeys([*transcripts, *questions]):
        asr = transcripts.get(audio)
        prompt, reference = (asr.question, asr.reference) if asr else ("", None)
        sessions.append(Session(audio, prompt, reference, tuple(questions.get(audio, ()))))
    return sessions


@dataclass(frozen=True)
class LongRun:
    """What a system did in one session. `answers` by the question's line."""

    fingerprint: str
    written: str
    peak: int
    unit_ms: list[float]
    answers: dict[int, str]

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> LongRun:
        """ValueError where the file is not what `write` wrote."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["answers"] = {int(k): v for k, v in values["answers"].items()}
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a raw result of this suite ({error}): delete it and run again") from error


def fingerprint(system: System, session: Session, files: Iterable[Path]) -> str:
    """SHA-256 over the system, the session's texts and the bytes of its audio and of `files` (the weights)."""
    spec = {k: v for k, v in asdict(system).items() if k != "says"}
    asked = [session.prompt, session.transcript, [(q.line, q.question) for q in session.questions]]
    digest = hashlib.sha256(json.dumps([spec, asked], sort_keys=True).encode())
    for path in (session.audio, *files):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def stream_long(
    engine: Engine,
    system: System,
    session: Session,
    duplex: DuplexConfig | None = None,
    mark: str = "",
    on_unit: Callable[[], None] = lambda: None,
) -> LongRun:
    """Streams the session second by second, then asks. The native system's prompt is the ASR sample's request."""
    config = system.conversation(None if system.side_channel else session.prompt or None, engine.model)
    if duplex is not None:
        config = replace(config, duplex=replace(duplex, side_channel=system.side_channel))
    conversation = engine.open(config)
    written: list[str] = []
    unit_ms: list[float] = []
    peak = 0
    try:
        for pcm_S in stream_audio(session.audio, RATE):
            engine.push(conversation, np.pad(pcm_S, (0, RATE - len(pcm_S))))
            for _, result, stats in engine.run():
                written.append(result.transcript_text if system.side_channel else result.response_text)
                unit_ms.append(round(stats.unit_ms, 3))
                peak = max(peak, stats.peak)
                on_unit()
        answers = {q.line: engine.ask(conversation, q.question) for q in session.questions}
    finally:
        engine.close(conversation)
    return LongRun(mark, " ".join(w for w in written if w), peak, unit_ms, answers)


def contains(answer: str, reference: str, normalise: str = NORMALISER) -> bool:
    clean = normaliser(normalise)
    said, wanted = clean(answer).split(), clean(reference).split()
    return bool(wanted) and any(said[i : i + len(wanted)] == wanted for i in range(len(said) - len(wanted) + 1))


def read_verdicts(path: Path) -> dict[tuple[str, int], str]:
    """A judge's verdicts, JSON lines {"system", "line", "verdict"}, by system and question."""
    out: dict[tuple[str, int], str] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            verdict = line["verdict"].strip().upper()
            out[line["system"], line["line"]] = verdict
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'{path}:{number}: {error}; {{"system", "line", "verdict"}} is needed') from error
        if verdict not in VERDICTS:
            raise ValueError(f"{path}:{number}: verdict {verdict!r} is not one of {', '.join(VERDICTS)}")
    return out


def strict(verdicts: Sequence[str]) -> Rate:
    return Rate.count(v == "YES" for v in verdicts)


Runs = Mapping[str, Sequence[tuple[Session, LongRun]]]
"""By system."""


def results(runs: Runs, verdicts: Mapping[tuple[str, int], str] | None = None) -> dict[str, float | int | None]:
    """The flat keys of results.json, each with the system's name; `native` is the system `base`. Rates are fractions;
    None where nothing was there to count. ValueError if a question has no verdict."""
    out: dict[str, float | int | None] = {}
    for system, pairs in runs.items():
        name = "native" if system == "base" else system
        said = [(s.transcript, run.written) for s, run in pairs if s.transcript is not None]
        errors = word_errors([r for r, _ in said], [w for _, w in said], NORMALISER)
        asked = [(q, run.answers[q.line]) for s, run in pairs for q in s.questions]
        latency = unit_latency(ms for _, run in pairs for ms in run.unit_ms)
        out |= {
            f"wer_{name}": errors.rate if errors.words else None,
            f"temporal_qa_{name}": Rate.count(contains(a, q.reference) for q, a in asked).value,
            f"peak_residents_{name}": max(run.peak for _, run in pairs),
            f"unit_ms_mean_{name}": latency.mean,
            f"unit_ms_p99_{name}": latency.p99,
        }
        if verdicts is not None:
            if lacking := [q.line for q, _ in asked if (system, q.line) not in verdicts]:
                raise ValueError(
                    f"{len(lacking)} answers of {system} have no verdict; the first is of line {lacking[0]}"
                )
            out[f"temporal_qa_strict_{name}"] = strict([verdicts[system, q.line] for q, _ in asked]).value
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in out.items()}


def answers(runs: Runs) -> Iterator[dict[str, Any]]:
    """What a judge needs, a line an answer."""
    for system, pairs in runs.items():
        for session, run in pairs:
            for q in session.questions:
                about = {"system": system, "line": q.line, "question": q.question}
                yield {**about, "reference": q.reference, "answer": run.answers[q.line]}


def markdown(found: Mapping[str, float | int | None], runs: Runs, heading: str) -> str:
    sessions = [s for s, _ in next(iter(runs.values()))]
    words = sum(len((s.transcript or "").split()) for s in sessions)
    asked = sum(len(s.questions) for s in sessions)
    lines = ["# LongSpeech", "", heading, ""]
    lines += [f"WER over {words:,} words (`{NORMALISER}`), temporal QA over {asked} questions, from text alone.", ""]
    lines += ["| system | WER | temporal QA, contains | strict (judge) | peak residents | unit ms mean / p99 |"]
    lines += ["|---|---|---|---|---|---|"]
    for system in runs:
        name = "native" if system == "base" else system
        rates = [found.get(f"{k}_{name}") for k in ("wer", "temporal_qa", "temporal_qa_strict")]
        cells = ["-" if r is None else f"{r:.1%}" for r in rates]
        ms = f"{found[f'unit_ms_mean_{name}']:.1f} / {found[f'unit_ms_p99_{name}']:.1f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {found[f'peak_residents_{name}']:,} | {ms} |")
    return "\n".join([*lines, ""])
