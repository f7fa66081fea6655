"""Settings of the adaptation. Defaults are the paper's; `PRESETS["embedded"]` is what the embedded model needs.

Source: DESIGN.md section 5.  Durations that the paper leaves open (warm-up, minimum rate) are stated here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from a2t.data.alignment import DELTA


@dataclass(frozen=True)
class LoraSettings:
    """On which modules: `a2t.models.adapters`."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0


@dataclass(frozen=True)
class LossWeights:
    transcription: float = 1.0
    kl: float = 1.0
    decision: float = 1.0
    turn: float = 1.0

    @classmethod
    def without_distillation(cls) -> LossWeights:
        """Only the transcription loss: the comparison that shows what the other three are for."""
        return cls(kl=0.0, decision=0.0, turn=0.0)


@dataclass(frozen=True)
class EvictionSettings:
    """Evictions that training simulates in the student's mask.

    A sequence is evicted with `probability`, with `policy` at a budget drawn anew each epoch: the floor 0 in a share
    `floor` of the draws, else uniformly between `low` and `high` (or the sequence's length where that is less).
    """

    probability: float = 0.0
    policy: str = "a2t"
    options: dict[str, Any] = field(default_factory=dict)
    floor: float = 0.25
    low: int = 0
    high: int = 4000


@dataclass(frozen=True)
class DistillConfig:
    epochs: int = 3
    learning_rate: float = 1e-4
    rows_rate: float = 3.0  # the two token rows learn this many times faster
    global_batch: int = 16  # sequences an optimizer step, over all workers
    step_units: int | None = None  # if set, a step takes sequences until they hold this many units instead
    micro_positions: int = 2048  # positions a forward; a longer sequence runs alone
    warmup: float = 0.03  # share of all steps
    max_steps: int | None = None  # fewer steps than the epochs have; the schedule ends there
    final_rate: float = 0.0  # the cosine ends at this share of `learning_rate`
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    delta: float = DELTA
    max_seconds: float | None = 16.0  # utterances with longer audio are left out, and counted
    join_units: int = 0  # lay utterances end to end up to this many units; 0: each alone, as in the paper
    join_share: float = 1.0  # share of the utterances that is joined; the rest stays alone
    weights: LossWeights = LossWeights()
    lora: LoraSettings = LoraSettings()
    eviction: EvictionSettings = EvictionSettings()
    scope: str = "everywhere"  # where LoRA acts: there, or on the "segment" alone (a2t.models.scope)
    hide_transcript: bool = False  # native positions do not see a transcript while its audio is resident
    autocast: str | None = None  # "bfloat16" on accelerators; None computes in the model's dtype
    gradient_checkpointing: bool = False
    logit_rows: int = 256  # rows of vocabulary-wide logits that exist at once
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "epochs": self.epochs >= 1,
            "learning_rate": self.learning_rate > 0,
            "global_batch": self.global_batch >= 1,
            "micro_positions": self.micro_positions >= 1,
            "warmup": 0 <= self.warmup < 1,
            "clip": self.clip > 0,
            "join_units": self.join_units >= 0,
            "join_share": 0 <= self.join_share <= 1,
            "logit_rows": self.logit_rows >= 1,
            "scope": self.scope in ("everywhere", "segment"),
            "autocast": self.autocast in (None, "bfloat16"),
            "step_units": self.step_units is None or self.step_units >= 1,
        }
        for name, fine in checks.items():
            if not fine:
                raise ValueError(f"{name} = {getattr(self, name)!r} is out of range")


PRESETS: dict[str, DistillConfig] = {
    # The paper's recipe, alone on short utterances.
    "paper": DistillConfig(max_seconds=None),
    # The embedded model: far fewer parameters, so a higher rate; utterances that one speaker said one after another,
    # laid end to end, because short ones alone do not teach it to read its own text minutes later.
    "embedded": DistillConfig(
        epochs=10,
        learning_rate=1.5e-3,
        global_batch=2,
        warmup=0.05,
        final_rate=0.02,
        betas=(0.9, 0.98),
        max_seconds=None,
        eviction=EvictionSettings(probability=0.85, floor=0.15, low=500, high=5000),
        autocast="bfloat16",
    ),
    # The embedded model on the paper's data, each utterance alone: what the joined streams start from.
    "embedded-alone": DistillConfig(
        epochs=4,
        learning_rate=2.5e-3,
        global_batch=16,
        step_units=200,
        warmup=0.05,
        final_rate=0.02,
        betas=(0.9, 0.98),
        autocast="bfloat16",
    ),
}

T = TypeVar("T")


def with_overrides(config: T, changes: Mapping[str, Any]) -> T:
    """A copy of a settings dataclass with some fields changed; nested ones by mappings, e.g. {"lora": {"rank": 8}}.

    Raises ValueError for a name that the settings lack or a value of the wrong type.
    """
    known = {f.name: f for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in known:
            raise ValueError(f"{type(config).__name__} has no setting {name!r}; it has {', '.join(sorted(known))}")
        now = getattr(config, name)
        if dataclasses.is_dataclass(now):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} is a group of settings; {value!r} does not name any of them")
            value = with_overrides(now, value)
        else:
            value = _coerce(name, now, value)
        values[name] = value
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def _coerce(name: str, now: Any, value: Any) -> Any:
    if isinstance(now, tuple) and isinstance(value, (list, tuple)):
        return tuple(value)
    if isinstance(now, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if now is not None and value is not None and type(value) is not type(now):
        if isinstance(now, float) and isinstance(value, str):  # YAML reads 1e-4 as text
            return float(value)
        raise ValueError(f"{name} = {value!r}: {type(now).__name__} is needed, as in {now!r}")
    return value
