"""The four losses over event-aligned rows. No tokenizer, no sequences: hidden states in, sums out.

    transcription  cross-entropy on segments, delimiters and the decision to open, mean over targets
    kl             KL(teacher || student), mean over all native events; the teacher gives the two new tokens zero
    decision       cross-entropy on the token fed, first decisions: mean within listen, speak, other; then over groups
    turn           the same for the other events: turn end, continuation

Means are over a whole optimizer step, however it is cut into forwards and workers: `Counts` of the step are known
before any forward, every row carries its share of the mean, and shares add up.  Source: DESIGN.md section 5.

Shapes: N rows (events and targets), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from a2t.distill.config import LossWeights
from a2t.distill.sequences import DECISIONS, TURNS, Group

TERMS = ("transcription", "kl", "decision", "turn")


@dataclass(frozen=True)
class Counts:
    """How many rows of each sort an optimizer step has."""

    targets: int = 0
    groups: tuple[int, ...] = (0,) * len(Group)

    @property
    def events(self) -> int:
        return sum(self.groups)

    @classmethod
    def of(cls, groups: Sequence[Group], targets: int) -> Counts:
        return cls(targets, tuple(sum(g == group for g in groups) for group in Group))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.targets + other.targets, tuple(a + b for a, b in zip(self.groups, other.groups, strict=True))
        )


@dataclass(frozen=True)
class Shares:
    """What one row of each sort weighs in its term's mean over the step."""

    target: float
    event: float
    group: tuple[float, ...]  # by Group, of the decision or the turn term

    @classmethod
    def of(cls, counts: Counts) -> Shares:
        group = [0.0] * len(Group)
        for term in (DECISIONS, TURNS):
            present = [g for g in term if counts.groups[g]]
            for g in present:
                group[g] = 1 / (len(present) * counts.groups[g])
        return cls(1 / max(1, counts.targets), 1 / max(1, counts.events), tuple(group))


def kl_rows(teacher_NV: Tensor, log_q_NV: Tensor, new_tokens: Sequence[int]) -> Tensor:
    """KL(teacher || student) of each row, [N], from the teacher's logits, to which `new_tokens` have probability zero,
    and the student's log-probabilities."""
    excluded = teacher_NV.new_zeros(teacher_NV.shape[-1])
    excluded[list(new_tokens)] = float("-inf")
    p_NV = (teacher_NV + excluded).softmax(-1)
    return (torch.xlogy(p_NV, p_NV) - p_NV * log_q_NV).sum(-1)


Head = Callable[[Tensor], Tensor]
"""Hidden states [N, D] to logits [N, V] in float32 or float64."""


def step_losses(
    hidden_ND: Tensor,
    tokens_N: Tensor,
    groups_N: Tensor,
    teacher_ED: Tensor,
    student_head: Head,
    teacher_head: Head,
    new_tokens: Sequence[int],
    counts: Counts,
    weights: LossWeights,
    logit_rows: int,
) -> tuple[Tensor, Tensor]:
    """The weighted loss (a scalar with gradient) and the four unweighted terms [4] of some rows of a step.

    The E event rows come first in `hidden_ND`, then the targets; `tokens_N` is the token fed (events) or to be
    predicted (targets); `groups_N` is an event's Group and -1 for a target.  No more than `logit_rows` rows of
    vocabulary-wide logits exist at once; they are computed again in the backward pass.  Sums of the results over
    all forwards of a step are the step's loss and terms.
    """
    events = len(teacher_ED)
    shares = Shares.of(counts)
    by_group = hidden_ND.new_tensor([*shares.group, shares.target], dtype=torch.float64)  # -1 picks the last: a target
    share_N = by_group[groups_N]

    def rows(hidden: Tensor, tokens: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        log_q = student_head(hidden).log_softmax(-1)
        ce = F.nll_loss(log_q, tokens, reduction="none")
        if not len(teacher):
            return ce, ce.new_zeros(0)
        with torch.no_grad():
            taught = teacher_head(teacher)
        return ce, kl_rows(taught, log_q[: len(teacher)], new_tokens)

    ces, kls = [], []
    for start in range(0, len(hidden_ND), logit_rows):
        stop = min(start + logit_rows, len(hidden_ND))
        part = (hidden_ND[start:stop], tokens_N[start:stop], teacher_ED[start : min(stop, events)])
        once = stop - start == len(hidden_ND)
        ce, kl = rows(*part) if once else checkpoint(rows, *part, use_reentrant=False)
        ces.append(ce)
        kls.append(kl)
    ce_N, kl_E = torch.cat(ces), torch.cat(kls)
    shared_N = ce_N * share_N.to(ce_N.dtype)
    is_turn_E = groups_N[:events] >= Group.TURN_END
    terms = torch.stack(
        [
            shared_N[events:].sum(),
            kl_E.sum() * shares.event,
            shared_N[:events][~is_turn_E].sum(),
            shared_N[:events][is_turn_E].sum(),
        ]
    )
    scale = terms.new_tensor([getattr(weights, term) for term in TERMS])
    return (terms * scale).sum(), terms.detach()
