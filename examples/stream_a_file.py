"""One audio file through one conversation: what is heard, what is answered, and how much stays in the cache.

python examples/stream_a_file.py talk.flac
python examples/stream_a_file.py talk.flac --budget 200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from a2t.audio.files import read_audio
from a2t.duplex.conversation import ConversationConfig
from a2t.duplex.engine import Engine
from a2t.models.loading import OWN, load_model


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--budget", type=int, default=4000, help="most resident positions after each second")
    args = parser.parse_args(argv)

    engine = Engine(load_model(adapter=OWN), rows=1, capacity=args.budget + 4096)
    conversation = engine.open(ConversationConfig(budget=args.budget))
    pcm_S = read_audio(args.file)  # 16 kHz mono float32, whatever the file has
    engine.push(conversation, np.append(pcm_S, np.zeros(2 * 16_000, np.float32)))
    for _, unit, stats in engine.run():
        said = f"   -> {unit.response_text}" if unit.response_text else ""
        print(f"{unit.unit:4d} s  {stats.total_residents:5d} resident  {unit.transcript_text}{said}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # a file that is not there, or no sound
        sys.exit(str(error))
