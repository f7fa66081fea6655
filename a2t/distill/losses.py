"""The four losses over event-aligned rows. No tokenizer, no sequences: hidden states in, sums out.

    transcription  cross-entropy on segments, delimiters and the decision to open, mean over targets
    kl             KL(teacher || student), mean over all native events; the teacher gives the two new tokens zero
    decision       cross-entropy on the token fed, first decisions: mean within listen, speak, other; then over groups
    turn           the same for the other events: turn end, continuation

Means are over a whole optimizer step, however it is cut into forwards and workers: `Counts` of the step are known
before any forward, every row carries its share of the mean, and shares add up.  Source: DESIGN.md section 5.

Vocabulary-wide rows exist for a few rows at a time only, and once: a row's gradient with respect to its hidden state
is known as soon as its logits are, so the forward takes it along and the backward has nothing to compute again.

Shapes: N rows (events, then targets), E events, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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


@dataclass(frozen=True)
class Rows:
    """What the rows of a forward are held to.

    The E event rows come first, then the targets; `tokens_N` is the token fed (events) or to be predicted (targets);
    `groups_N` is an event's Group and -1 for a target.  `teacher_ED`: the teacher's final hidden states at the events.
    """

    tokens_N: Tensor
    groups_N: Tensor
    teacher_ED: Tensor

    @property
    def terms_N(self) -> Tensor:
        """Which of TERMS a row's cross-entropy belongs to."""
        events = torch.where(self.groups_N >= Group.TURN_END, TERMS.index("turn"), TERMS.index("decision"))
        return torch.where(self.groups_N < 0, TERMS.index("transcription"), events)


def step_losses(
    hidden_ND: Tensor,
    rows_2D: Tensor,
    output_VD: Tensor,
    rows: Rows,
    new_tokens: Sequence[int],
    counts: Counts,
    weights: LossWeights,
    logit_rows: int,
) -> tuple[Tensor, Tensor]:
    """The weighted loss (a scalar with gradient) and the four unweighted terms [4] of some rows of a step.

    `output_VD` is the frozen output matrix, the teacher's too; the student's has `rows_2D` at `new_tokens`, to which
    the teacher gives probability zero.  No more than `logit_rows` rows of logits exist at once.  Sums of the results
    over all forwards of a step are the step's loss and terms.
    """
    shares = Shares.of(counts)
    by_group = hidden_ND.new_tensor([*shares.group, shares.target], dtype=torch.float64)  # -1 picks the last: a target
    scale = hidden_ND.new_tensor([getattr(weights, term) for term in TERMS], dtype=torch.float64)
    share_N = by_group[rows.groups_N]
    loss, terms = _Losses.apply(
        hidden_ND,
        rows_2D,
        output_VD,
        rows,
        list(new_tokens),
        share_N,
        share_N * scale[rows.terms_N],
        shares.event,
        shares.event * weights.kl,
        logit_rows,
    )
    return loss, terms


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        rows_2D: Tensor,
        output_VD: Tensor,
        rows: Rows,
        new: list[int],
        share_N: Tensor,
        pull_N: Tensor,
        kl_share: float,
        kl_pull: float,
        logit_rows: int,
    ) -> tuple[Tensor, Tensor]:
        """`share_N` weighs a row in its term, `pull_N` in the loss; likewise for every event's KL."""
        exact = torch.float64 if output_VD.dtype == torch.float64 else torch.float32
        gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dh_ND, drows_2D = torch.empty_like(hidden_ND), torch.zeros_like(rows_2D)
        terms = hidden_ND.new_zeros(len(TERMS), dtype=torch.float64)
        loss = hidden_ND.new_zeros((), dtype=torch.float64)
        of_term_N, new_rows_2D = rows.terms_N, rows_2D.to(output_VD.dtype)
        for start in range(0, len(hidden_ND), logit_rows):
            part = slice(start, start + logit_rows)
            h_ND, tokens_N1 = hidden_ND[part].to(output_VD.dtype), rows.tokens_N[part, None]
            z_NV = F.linear(h_ND, output_VD).to(exact)
            z_NV[:, new] = F.linear(h_ND, new_rows_2D).to(exact)
            log_z_N1 = z_NV.logsumexp(-1, keepdim=True)
            ce_N = (log_z_N1 - z_NV.gather(1, tokens_N1))[:, 0].double()
            terms.index_add_(0, of_term_N[part], ce_N * share_N[part])
            loss += ce_N @ pull_N[part]
            taught_ED = rows.teacher_ED[part]
            events = len(taught_ED)
            if events:
                t_EV = F.linear(taught_ED.to(output_VD.dtype), output_VD).to(exact)
                t_EV[:, new] = float("-inf")
                log_t_E1 = t_EV.logsumexp(-1, keepdim=True)
                p_EV = (t_EV - log_t_E1).exp_()
                # log p - log q, but where p is zero; p sums to one, so both normalisers leave the sum
                t_EV[:, new] = z_NV[:events, new]
                kl_E = (t_EV.sub_(z_NV[:events]).mul_(p_EV).sum(-1) - (log_t_E1 - log_z_N1[:events])[:, 0]).double()
                del t_EV
                terms[TERMS.index("kl")] += kl_E.sum() * kl_share
                loss += kl_E.sum() * kl_pull
            if not gradient:
                continue
            # d loss / d logits = pull (q - token) + kl_pull (q - p)
            pull_N1 = pull_N[part, None].to(exact)
            by_q_N1 = pull_N1.clone()
            by_q_N1[:events] += kl_pull
            dz_NV = z_NV.sub_(log_z_N1).exp_().mul_(by_q_N1)
            dz_NV.scatter_add_(1, tokens_N1, -pull_N1)
            if events:
                dz_NV[:events].sub_(p_EV.mul_(kl_pull))
            dnew_N2 = dz_NV[:, new].to(output_VD.dtype)
            dz_NV[:, new] = 0
            dh_ND[part] = dz_NV.to(output_VD.dtype) @ output_VD + dnew_N2 @ new_rows_2D
            drows_2D += (dnew_N2.T @ h_ND).to(drows_2D.dtype)
        ctx.save_for_backward(dh_ND, drows_2D)
        ctx.mark_non_differentiable(terms)
        return loss, terms

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        dh_ND, drows_2D = ctx.saved_tensors
        return (dh_ND * outer[0], drows_2D * outer[0], *[None] * 8)
