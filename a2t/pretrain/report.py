"""The learning curve of a pretraining run, from its log."""

from __future__ import annotations

import json
from pathlib import Path

SHOWN = {
    "encoder": ("word_accuracy", "dev_word_errors"),
    "text": ("thing", "person", "speak"),
    "audio": ("thing", "person", "speak", "dev_thing", "dev_speak"),
}


def learning_curve(log: Path, png: Path) -> None:
    """One panel a phase: loss on the left axis, accuracies on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log.read_text().splitlines()]
    phases = list(dict.fromkeys(r["phase"] for r in records))
    figure, panels = plt.subplots(1, len(phases), figsize=(5 * len(phases), 3.6), squeeze=False)
    for phase, panel in zip(phases, panels[0], strict=True):
        mine = [r for r in records if r["phase"] == phase]
        panel.plot([r["step"] for r in mine], [r["loss"] for r in mine], color="0.6", label="loss")
        panel.set(title=phase, xlabel="step", ylabel="loss", yscale="log")
        right = panel.twinx()
        right.set_ylim(0, 1)
        for key in SHOWN.get(phase, ()):
            points = [(r["step"], r[key]) for r in mine if key in r]
            if points:
                right.plot(*zip(*points, strict=True), label=key, marker="." if key.startswith("dev") else None)
        right.legend(loc="center right", fontsize=8)
    figure.tight_layout()
    figure.savefig(png, dpi=110)
    plt.close(figure)
