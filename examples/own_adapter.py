"""Loads an adapter of your own, an ordinary PEFT folder as `jobs.distill` writes it, and shows what it is and what it
hears. The same folder goes to `a2t stream --adapter`, and to `model_options: {adapter: PATH}` in `serve_apps/app.yaml`.

    python examples/own_adapter.py out/distill/adapter talk.wav
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from peft import PeftConfig

from a2t.audio.files import read_audio
from a2t.duplex.engine import Engine, EngineConfig
from a2t.models.loading import load_model


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter")
    parser.add_argument("file")
    parser.add_argument("--model", help="folder of a checkpoint; the embedded default otherwise")
    args = parser.parse_args(argv)

    config = PeftConfig.from_pretrained(args.adapter)
    print(f"{config.peft_type.value}, rank {config.r}, on {', '.join(sorted(config.target_modules))}")
    model = load_model(args.model, args.adapter)  # merged into the weights: it costs nothing at inference
    engine = Engine(model, rows=1, config=EngineConfig(side_channel_budget_s=None))  # write all, however long it takes
    engine.push(engine.open(), read_audio(args.file))
    print("heard:", " ".join(unit.transcript_text.strip() for _, unit, _ in engine.run()))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:  # a file that is not there, or no sound
        sys.exit(str(error))
