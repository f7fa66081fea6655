"""A policy's decision, carried out on the ledger and the arena together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from a2t.duplex.conversation import Conversation
from a2t.kv.cache import KVArena
from a2t.kv.eviction import Eviction, Refeed
from a2t.kv.kinds import Kind
from a2t.kv.ledger import Ledger
from a2t.kv.split import make_arena
from a2t.kv.windows import ReadsText
from a2t.models.base import DuplexModel


def plan(conversation: Conversation) -> Eviction:
    """What the conversation's policy wants to leave."""
    ledger, policy = conversation.ledger, conversation.policy
    if isinstance(policy, ReadsText):
        return policy.plan_with_text(ledger, [unit.response_ids for unit in conversation.journal.units])
    return policy.plan_eviction(ledger, conversation.budget)


def carry_out(model: DuplexModel, arena: KVArena, conversation: Conversation, eviction: Eviction) -> None:
    """Does what the policy says: drop, then renumber and rotate, then feed a prefix anew.

    The tokens held over from the last unit are to see what is dropped: then the ledger drops it now, the arena with the
    feed that brings them.  Rotation needs the arena as it is, so nothing may be held over then (Engine.settle).
    """
    ledger, row, held = conversation.ledger, conversation.row, conversation.held
    if eviction.drop:
        ledger.drop(eviction.drop)
        if held is not None:
            conversation.held = replace(held, leaving=eviction.drop)
        else:
            arena.drop(row, eviction.drop)
    if eviction.rotation is not None:
        first, delta = eviction.rotation.first, eviction.rotation.delta
        slots = ledger.slots(lambda resident: resident.position >= first)
        ledger.shift(slots, delta)
        arena.rotate(row, slots, delta, _inv_freq(model))
    if eviction.refeed is not None:
        _feed_before(model, arena, row, ledger, eviction.refeed)


def _feed_before(model: DuplexModel, arena: KVArena, row: int, ledger: Ledger, refeed: Refeed) -> None:
    """Feeds a part of the prefix anew, which sees the residents before it alone: in an arena of its own."""
    before = [slot for p in range(refeed.first) if (slot := ledger.slot_at(p)) is not None]
    aside = make_arena(model.shape, 1, len(before) + len(refeed.ids))
    aside.load(aside.allocate(), arena.gather(row, before))
    positions = ledger.insert([Kind.PREFIX] * len(refeed.ids), refeed.first)
    device = model.shape.device
    e_TD = model.embed(torch.tensor(refeed.ids, device=device))
    model.forward(e_TD, torch.tensor(list(positions), device=device), aside.pack([0], [len(refeed.ids)]))
    arena.extend(row, aside.gather(0, range(len(before), aside.lengths[0])))


def _inv_freq(model: DuplexModel) -> Tensor:
    inv_freq: Tensor | None = getattr(model, "inv_freq", None)
    if inv_freq is None:
        raise ValueError(f"a policy that renumbers positions needs `inv_freq` of model {model.name}; it has none")
    return inv_freq
