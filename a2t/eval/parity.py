"""Holds this project's MiniCPM-o against what the official code answered, from a folder of the golden files' form.

A folder holds a checkpoint and `expected.json` with `expected.safetensors`: a duplex run (with or without one of the
two windows), or the speech-token decoder.  Everything is recomputed from the input; nothing expected is fed back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile
import torch
from safetensors.torch import load_file
from torch import Tensor

from a2t.audio.mel import StreamingMel
from a2t.duplex.conversation import Conversation, ConversationConfig
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import Engine, EngineConfig
from a2t.duplex.unit_loop import Feed
from a2t.kv.windows import ContextWindow
from a2t.models.minicpmo import MiniCPMO, load_minicpmo
from a2t.models.minicpmo_speech import SpeechSettings, SpeechTokenStream, load_speech_tokens

GREEDY = {
    "greedy": True, "max_new_speak_tokens_per_chunk": 12, "repetition_penalty": 1.0, "length_penalty": 1.0,
    "listen_prob_scale": 1.0, "side_channel": False,
}  # fmt: skip


@dataclass
class Quantity:
    """One compared quantity: the largest difference found, how many values were compared, and what is allowed."""

    name: str
    bound: float
    largest: float = 0.0
    compared: int = 0
    where: str = ""

    def see(self, found: Any, expected: Any, where: str) -> None:
        """Tensors: their largest difference (a differing shape is infinite); anything else: 0 if equal, else 1."""
        self.compared += 1
        if isinstance(expected, Tensor):
            same = isinstance(found, Tensor) and found.shape == expected.shape
            off = float((found - expected).abs().max()) if same and expected.numel() else 0.0 if same else float("inf")
        else:
            off = 0.0 if found == expected else 1.0
        off = float("inf") if off != off else off  # NaN agrees with nothing
        if off > self.largest:
            self.largest, self.where = off, where

    @property
    def ok(self) -> bool:
        return self.compared > 0 and self.largest <= self.bound


class Report:
    """Quantities by name, in the order in which they were first seen."""

    def __init__(self, bounds: dict[str, float]):
        self.quantities = {name: Quantity(name, bound) for name, bound in bounds.items()}

    def see(self, name: str, found: Any, expected: Any, where: str) -> None:
        self.quantities[name].see(found, expected, where)

    @property
    def ok(self) -> bool:
        return all(q.ok for q in self.quantities.values())

    def lines(self) -> list[str]:
        width = max(len(name) for name in self.quantities)
        out = []
        for q in self.quantities.values():
            verdict = "ok" if q.ok else f"DIFFERS, first at its largest in {q.where}" if q.compared else "NOT COMPARED"
            out.append(
                f"{q.name:<{width}}  {q.largest:9.2e}  bound {q.bound:7.0e}  {q.compared:5d} compared  {verdict}"
            )
        return out


def check_folder(folder: str | Path) -> Report:
    """ValueError if the folder is of no known form."""
    folder = Path(folder)
    for name in ("config.json", "expected.json", "expected.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: a folder of the golden files' form is expected")
    told = json.loads((folder / "expected.json").read_text())
    tensors = load_file(folder / "expected.safetensors")
    if "chunks" in told:
        return check_speech(folder, told, tensors)
    if "units" in told:
        return check_duplex(folder, told, tensors)
    raise ValueError(f"{folder}/expected.json has neither units nor chunks: its form is not known")


def check_duplex(folder: Path, told: dict[str, Any], tensors: dict[str, Tensor]) -> Report:
    """The duplex loop over input.wav, whatever the window."""
    report = Report(
        {"mel frames": 1e-4, "audio embeddings": 1e-4, "decision logits": 1e-4, "step logits": 1e-4}
        | {"tokens fed": 0, "decisions and turns": 0, "text": 0, "cache lengths": 0, "encoder cache lengths": 0}
    )
    model = load_minicpmo(folder)
    heard_from = next((f for f in (folder / "input.wav", folder / "input.flac") if f.is_file()), None)
    if heard_from is None:
        raise ValueError(f"{folder} has no input.wav (or input.flac)")
    samples_S, rate = soundfile.read(heard_from, dtype="float32")
    if rate != 16_000 or samples_S.ndim != 1 or len(samples_S) < 16_000 * len(told["units"]):
        raise ValueError(
            f"{heard_from} is {list(samples_S.shape)} at {rate} Hz; one channel at 16000 Hz, a second for each of "
            f"{len(told['units'])} units, is expected"
        )
    heard: list[tuple[Tensor | None, Tensor]] = []

    def observe(_: Conversation, feed: Feed, __: Any, h_TD: Tensor) -> None:
        if feed.want:
            heard.append((feed.audio_AD, model.logits(h_TD[-1:])[0].cpu().clone()))

    engine = Engine(model, 1, 8192, config=EngineConfig(side_channel_budget_s=None), observer=observe)
    conversation = engine.open(_config(model, told))
    engine.run()
    report.see("cache lengths", conversation.ledger.residents, told["system_len"], "the prompt")
    mel = StreamingMel(model.encoder.mels)
    for n, unit in enumerate(told["units"]):
        where, pcm_S = f"unit {n}", samples_S[16_000 * n : 16_000 * (n + 1)]
        mel.push(pcm_S)
        frames_MF = mel.next_unit()
        if f"mel.{n}" in tensors:
            report.see("mel frames", frames_MF, tensors[f"mel.{n}"][0], where)
        report.see("cache lengths", conversation.ledger.residents, unit["kv_before"], where)
        heard.clear()
        engine.push(conversation, pcm_S, force_listen=unit["force_listen"])
        ((_, result, stats),) = engine.run()
        embeddings, logits = [a for a, _ in heard if a is not None], [x for _, x in heard]
        report.see("audio embeddings", embeddings[0].float().cpu(), tensors[f"audio_embeds.{n}"], where)
        report.see("decision logits", logits[0], tensors[f"decision_logits.{n}"], where)
        if f"step_logits.{n}" in tensors:
            steps = tensors[f"step_logits.{n}"]
            report.see("step logits", torch.stack(logits[: len(steps)]), steps, where)
        report.see("tokens fed", [*result.native_ids, model.tokens.unit_end], unit["fed_ids"], where)
        turn = (result.listening, result.end_of_turn)
        report.see("decisions and turns", turn, (unit["is_listen"], unit["end_of_turn"]), where)
        report.see("text", result.response_text, unit["text"], where)
        report.see("cache lengths", stats.total_residents, unit["kv_after"], where)
        report.see("encoder cache lengths", conversation.encoder_state.length, unit["audio_kv"], where)  # type: ignore[attr-defined]
    if isinstance(conversation.policy, ContextWindow):
        report.quantities["kept text"] = Quantity("kept text", 0)
        spoken = [unit.response_ids for unit in conversation.journal.units]
        kept = conversation.policy.previous(spoken, len(spoken) - conversation.policy.max_units)
        report.see("kept text", list(kept), told["window"]["previous_ids"], "the end")
    return report


def _config(model: MiniCPMO, told: dict[str, Any]) -> ConversationConfig:
    window = told["window"]
    policy, options = "unbounded", dict[str, Any]()
    if window["mode"] == "basic":
        policy, options = "basic", {"high": window["high"], "low": window["low"]}
    elif window["mode"] == "context":
        policy = "context"
        options = model.context_window(
            window["suffix"], window["max_units"], window["previous_max_tokens"], window["marker"]
        )
    elif window["mode"] != "off":
        raise ValueError(f"the window mode {window['mode']!r} is not known; off, basic and context are")
    duplex = DuplexConfig.minicpmo(**(GREEDY | told.get("settings", {})))
    return ConversationConfig(
        budget=None, policy=policy, policy_options=options, duplex=duplex, system_prompt=told["system_prompt"]
    )


def check_speech(folder: Path, told: dict[str, Any], tensors: dict[str, Tensor]) -> Report:
    """The speech-token decoder over given tokens and hidden states."""
    report = Report({"conditions": 1e-5, "raw logits": 1e-3, "audio tokens": 0, "positions": 0})
    decoder = load_speech_tokens(folder)
    settings = SpeechSettings(
        temperature=told["temperature"],
        repetition_penalty=told["repetition_penalty"],
        max_tokens_per_chunk=told["max_tokens_per_chunk"],
        seed=told["seed"],
    )
    if decoder.eos != told["eos"]:
        raise ValueError(f"the decoder's end token is {decoder.eos}, expected.json says {told['eos']}")
    stream = SpeechTokenStream(decoder, settings)
    for chunk in told["chunks"]:
        n = chunk["chunk"]
        ids, hidden_NH = tensors[f"token_ids.{n}"].tolist(), tensors[f"hidden.{n}"]
        report.see("conditions", decoder.condition(ids, hidden_NH), tensors[f"condition.{n}"], f"chunk {n}")
        report.see("positions", stream.position, chunk["text_start_pos"], f"chunk {n}")
        found, logits = stream.chunk(ids, hidden_NH, chunk["end_of_turn"])
        report.see("raw logits", torch.stack(logits).cpu(), tensors[f"step_logits.{n}"], f"chunk {n}")
        report.see("audio tokens", found, chunk["audio_tokens"], f"chunk {n}")
    return report
