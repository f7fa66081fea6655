"""A conversation in a folder, exactly: `conversation.safetensors` (cache, encoder), `conversation.json` (the rest)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from a2t.duplex.conversation import Conversation, ConversationConfig
from a2t.duplex.feeds import Held
from a2t.duplex.journal import Journal
from a2t.kv.ledger import Ledger

if TYPE_CHECKING:
    from a2t.duplex.engine import Engine

VERSION = 2
TENSORS, VALUES = "conversation.safetensors", "conversation.json"
CACHE, ENCODER = "cache.", "encoder."


def save(engine: Engine, conversation: Conversation, folder: Path) -> None:
    """Writes a conversation with nothing in flight. The JSON is written last, so a folder with it is complete."""
    c = conversation
    folder.mkdir(parents=True, exist_ok=True)
    (folder / VALUES).unlink(missing_ok=True)
    encoder, encoder_meta = c.encoder_state.export()
    tensors = {CACHE + k: t for k, t in engine.arena.export(c.row).items()}
    tensors |= {ENCODER + k: t for k, t in encoder.items()}
    save_file({k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}, folder / TENSORS)
    values = {
        "version": VERSION,
        "model": engine.model.name,
        "id": c.id,
        "config": c.config.to_json(),
        "ledger": c.ledger.to_json(),
        "held": None if c.held is None else c.held.to_json(),
        "loop": c.loop.state_dict(),
        "journal": c.journal.to_json(),
        "encoder": encoder_meta,
        "force_listen_waiting": [unit.force_listen for unit in c.waiting],
        "force_listen_asked": c.force_listen_asked,
        "units": c.units,
        "deadline_misses": c.deadline_misses,
    }
    (folder / VALUES).write_text(json.dumps(values))


def restore(engine: Engine, folder: Path, id: str | None) -> Conversation:
    values, tensors = _read(folder)
    if values["model"] != engine.model.name:
        raise ValueError(
            f"{folder} was written by model {values['model']!r} and this is {engine.model.name!r}; use that"
        )
    c = engine.admit(ConversationConfig.from_json(values["config"]), id or values["id"])
    try:
        engine.arena.load(c.row, {k.removeprefix(CACHE): t for k, t in tensors.items() if k.startswith(CACHE)})
        c.ledger = Ledger.from_json(values["ledger"])
        c.held = None if values["held"] is None else Held.from_json(values["held"])
        unfed, leaving = (len(c.held.ids), len(c.held.leaving)) if c.held is not None else (0, 0)
        if c.ledger.residents != engine.arena.lengths[c.row] + unfed - leaving:
            raise ValueError(
                f"{folder}: the ledger lists {c.ledger.residents} positions and the cache holds "
                f"{engine.arena.lengths[c.row]}; it is damaged, rebuild from the journal"
            )
    except ValueError:
        engine.close(c)
        raise
    encoder = {k.removeprefix(ENCODER): t for k, t in tensors.items() if k.startswith(ENCODER)}
    c.encoder_state = engine.model.encoder.restore_state(encoder, values["encoder"])
    c.loop.load_state_dict(values["loop"])
    c.journal = Journal.from_json(values["journal"])
    now = engine.clock()
    for forced in values["force_listen_waiting"]:
        c.queue(now, forced)
    c.force_listen_asked, c.units = values["force_listen_asked"], values["units"]
    c.deadline_misses = values["deadline_misses"]
    return c


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    missing = [name for name in (VALUES, TENSORS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} holds no saved conversation: {missing[0]} is missing")
    try:
        values = json.loads((folder / VALUES).read_text())
        tensors = load_file(folder / TENSORS)
    except (json.JSONDecodeError, SafetensorError) as damaged:
        raise ValueError(f"{folder} is damaged ({damaged}); rebuild the conversation from its journal") from damaged
    if values.get("version") != VERSION:
        raise ValueError(
            f"{folder} has version {values.get('version')} and this program reads {VERSION}; use the other"
        )
    return values, tensors
