"""An eviction policy is a frozen dataclass with one method. This one forgets the sound of every second after `seconds`
seconds, whatever the budget: with text and prompt kept, the cache then grows by its text alone.

    python examples/eviction_policy.py talk.wav --seconds 10
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from a2t.audio.files import read_audio
from a2t.duplex.conversation import ConversationConfig
from a2t.duplex.engine import Engine
from a2t.kv.eviction import Eviction
from a2t.kv.ledger import Ledger, Tier
from a2t.kv.policies import POLICIES
from a2t.models.loading import OWN, load_model


@dataclass(frozen=True)
class Hourglass:
    """Called after each second; reads the ledger and names the slots that leave."""

    name: ClassVar[str] = "hourglass"
    seconds: int = 10

    def plan_eviction(self, ledger: Ledger, budget: int | None) -> Eviction:
        old = [u for u in ledger.resident_units(Tier.EVICTABLE) if u <= ledger.last_unit - self.seconds]
        drop = [slot for unit in old for slot in ledger.unit_slots(unit, Tier.EVICTABLE)]
        return Eviction(drop=tuple(sorted(drop)), units=tuple(old))


POLICIES[Hourglass.name] = Hourglass  # now `ConversationConfig(policy="hourglass")` knows it


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--seconds", type=int, default=10)
    args = parser.parse_args(argv)

    engine = Engine(load_model(adapter=OWN), rows=1)
    conversation = engine.open(ConversationConfig(policy=Hourglass.name, policy_options={"seconds": args.seconds}))
    engine.push(conversation, read_audio(args.file))
    for _, unit, stats in engine.run():
        kinds = {kind.name.lower(): count for kind, count in stats.residents.items() if count}
        print(f"{unit.unit:4d} s  {stats.total_residents:5d} resident, {stats.evicted:3d} left: {kinds}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # a file that is not there, or no sound
        sys.exit(str(error))
