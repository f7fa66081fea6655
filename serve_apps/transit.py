"""How a conversation leaves an engine and comes to another: as it is, or rebuilt. In the engines' threads; no Ray."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from a2t.duplex.conversation import Conversation
from a2t.duplex.engine import Engine
from a2t.duplex.journal import Journal, UnitRecord
from a2t.models.base import DuplexModel
from serve_apps.book import Book

MEMORY = Path("/dev/shm")
"""Where a conversation on its way is written, where there is such a place: the engine waits for the writing."""


def pack(engine: Engine, conversation: Conversation) -> dict[str, bytes]:
    """The conversation leaves the engine as the files of a snapshot."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        engine.save(conversation, folder)
        engine.close(conversation)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def unpack(engine: Engine, files: dict[str, bytes], session: str) -> Conversation:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        for name, content in files.items():
            (Path(folder) / Path(name).name).write_bytes(content)
        return engine.restore(folder, session)


def rebuild(engine: Engine, journal: Journal, book: Book) -> Conversation:
    """From a session's book; units in which the client wants it to listen are still such."""
    conversation = journal.rebuild(engine, book.id)
    flags = [conversation.units + n in book.forced for n in range(len(conversation.waiting) + 1)]
    conversation.force_listen_asked = flags.pop()
    for n, (unit, forced) in enumerate(zip(list(conversation.waiting), flags, strict=True)):
        conversation.waiting[n] = replace(unit, force_listen=forced)
    return conversation


def journal_of_record(model: DuplexModel, prompt: str | None, transcript: str) -> Journal:
    """Of a conversation that is over, as far as text can tell. ValueError for words that the model does not know."""
    prompt = model.default_prompt if prompt is None else prompt
    journal = Journal()
    journal.start({}, model.tokenizer.encode(prompt) if prompt else [], model.encoder.samples_per_unit)
    heard = tuple(model.tokenizer.encode(transcript)) if transcript else ()
    journal.units.append(UnitRecord(0, (), heard, ()))
    return journal
