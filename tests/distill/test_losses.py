"""The four terms against a float64 reference written from DESIGN.md section 5, row by row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a2t.distill.config import LossWeights
from a2t.distill.losses import Counts, Rows, step_losses
from a2t.distill.sequences import pair
from tests.distill.samples import TOKENS, VOCAB, make_example

D = 6


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    e = [math.exp(x - top) for x in logits]
    return [x / sum(e) for x in e]


def reference(pairs, student, teacher):
    """`student[i]`, `teacher[i]`: logits by position of pair i, as lists of floats. Returns the four terms."""
    transcription, kl = [], []
    decisions: dict[str, list[float]] = {}
    turns: dict[str, list[float]] = {}
    for p, s, t in zip(pairs, student, teacher, strict=True):
        for u, unit in enumerate(p.example.units):
            first = min(e.fed_at for e in p.student.events if e.unit == u)
            if unit.segment is not None:
                wanted = [TOKENS.asr_start, *unit.segment, TOKENS.asr_end]
                for n, token in enumerate(wanted):  # the decision opens, each token predicts the next, the last closes
                    transcription.append(-math.log(softmax(s[first + n])[token]))
            elif len(unit.native) == 1:
                transcription.append(-math.log(softmax(s[first])[TOKENS.unit_end]))
        for es, et in zip(p.student.events, p.teacher.events, strict=True):
            q = softmax(s[es.position])
            seen = [
                x if i not in (TOKENS.asr_start, TOKENS.asr_end) else -math.inf for i, x in enumerate(t[et.position])
            ]
            pt = softmax(seen)
            kl.append(sum(a * (math.log(a) - math.log(b)) for a, b in zip(pt, q, strict=True) if a > 0))
            ce = -math.log(q[es.token])
            if es.first:
                name = {TOKENS.listen: "listen", TOKENS.speak: "speak"}.get(es.token, "other")
                decisions.setdefault(name, []).append(ce)
            else:
                turns.setdefault("end" if es.token == TOKENS.turn_eos else "continuation", []).append(ce)

    def mean(values):
        return sum(values) / len(values) if values else 0.0

    return [
        mean(transcription),
        mean(kl),
        mean([mean(g) for g in decisions.values()]),
        mean([mean(g) for g in turns.values()]),
    ]


NEW = (TOKENS.asr_start, TOKENS.asr_end)


def rows_of(p, student_hidden, teacher_hidden):
    at = [e.position for e in p.student.events] + [position for position, _ in p.targets]
    tokens = [e.token for e in p.student.events] + [token for _, token in p.targets]
    groups = [*map(int, p.groups)] + [-1] * len(p.targets)
    teacher = teacher_hidden[[e.position for e in p.teacher.events]]
    return student_hidden[at], Rows(torch.tensor(tokens), torch.tensor(groups), teacher)


def random(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), logit_rows=st.sampled_from([3, 7, 1000]))
def test_terms_equal_the_reference_however_the_step_is_cut(seed, logit_rows):
    generator = torch.Generator().manual_seed(seed)
    pairs = [pair(TOKENS, make_example(seed + n, units)) for n, units in enumerate((4, 1))]
    output, new_rows = random(generator, VOCAB, D), random(generator, 2, D)
    student_head = output.clone()
    student_head[list(NEW)] = new_rows
    hs = [random(generator, len(p.student), D) for p in pairs]
    ht = [random(generator, len(p.teacher), D) for p in pairs]
    expected = reference(pairs, [(h @ student_head.T).tolist() for h in hs], [(h @ output.T).tolist() for h in ht])
    counts = sum((Counts.of(p.groups, len(p.targets)) for p in pairs), Counts())
    weights = LossWeights(1.0, 0.5, 2.0, 3.0)
    loss, terms = torch.zeros((), dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for p, s, t in zip(pairs, hs, ht, strict=True):  # two forwards make the step
        hidden, rows = rows_of(p, s, t)
        part = step_losses(hidden, new_rows, output, rows, NEW, counts, weights, logit_rows)
        loss, terms = loss + part[0], terms + part[1]
    torch.testing.assert_close(terms, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    expected_loss = sum(w * x for w, x in zip((1.0, 0.5, 2.0, 3.0), expected, strict=True))
    torch.testing.assert_close(float(loss), expected_loss, rtol=1e-10, atol=1e-12)


def plain_loss(hidden, new_rows, output, rows, counts, weights):
    """The same loss in torch's own functions, all logits at once."""
    events = len(rows.teacher_ED)
    log_q = (hidden @ output.index_copy(0, torch.tensor(NEW), new_rows).T).log_softmax(-1)
    seen = rows.teacher_ED @ output.T
    seen[:, list(NEW)] = -1e9
    kl = torch.nn.functional.kl_div(log_q[:events], seen.softmax(-1), reduction="sum") / counts.events
    ce = torch.nn.functional.nll_loss(log_q, rows.tokens_N, reduction="none")
    loss = weights.kl * kl + weights.transcription * ce[rows.groups_N < 0].sum() / counts.targets
    for weight, term in ((weights.decision, (0, 1, 2)), (weights.turn, (3, 4))):
        present = [g for g in term if counts.groups[g]]
        loss = loss + weight * sum(ce[rows.groups_N == g].sum() / counts.groups[g] for g in present) / len(present)
    return loss


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), logit_rows=st.sampled_from([2, 9, 1000]))
def test_the_gradient_taken_along_is_autograds(seed, logit_rows):
    generator = torch.Generator().manual_seed(seed)
    p = pair(TOKENS, make_example(seed, 6))
    output, new_rows = random(generator, VOCAB, D), random(generator, 2, D).requires_grad_()
    states = random(generator, len(p.student), D).requires_grad_()
    hidden, rows = rows_of(p, states, random(generator, len(p.teacher), D))
    counts, weights = Counts.of(p.groups, len(p.targets)), LossWeights(1.0, 0.5, 2.0, 3.0)
    loss, _ = step_losses(hidden, new_rows, output, rows, NEW, counts, weights, logit_rows)
    expected = plain_loss(hidden, new_rows, output, rows, counts, weights)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    mine = torch.autograd.grad(3 * loss, (states, new_rows), retain_graph=True)
    for a, b in zip(mine, torch.autograd.grad(3 * expected, (states, new_rows)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_kl_is_zero_only_where_the_student_gives_the_new_tokens_nothing():
    p = pair(TOKENS, make_example(2, 5))
    logits = torch.randn(len(p.teacher), VOCAB, dtype=torch.float64)
    output = torch.eye(VOCAB, dtype=torch.float64)  # hidden states are logits
    at = [e.position for e in p.teacher.events]
    rows = Rows(torch.tensor([e.token for e in p.teacher.events]), torch.tensor([*map(int, p.groups)]), logits[at])

    def kl(new_rows):
        counts = Counts.of(p.groups, 0)
        return float(step_losses(logits[at], new_rows, output, rows, NEW, counts, LossWeights(), 1000)[1][1])

    shut = torch.zeros(2, VOCAB, dtype=torch.float64)
    top = logits[at].max() + 100
    states = torch.cat([logits, torch.full((len(logits), 1), float(top))], 1)  # a direction that only these rows read
    wide = torch.cat([output, torch.zeros(VOCAB, 1, dtype=torch.float64)], 1)
    wide_rows = Rows(rows.tokens_N, rows.groups_N, states[at])
    never = torch.cat([shut, torch.full((2, 1), -10.0, dtype=torch.float64)], 1)
    counts = Counts.of(p.groups, 0)
    alike = step_losses(states[at], never, wide, wide_rows, NEW, counts, LossWeights(), 1000)[1][1]
    assert abs(float(alike)) < 1e-12
    # A student that gives the new tokens the share r loses -log(1 - r).
    share = logits.softmax(-1)[at][:, list(NEW)].sum(-1)
    assert kl(output[list(NEW)]) == pytest.approx(float((-(1 - share).log()).mean()), rel=1e-9)
