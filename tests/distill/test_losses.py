"""The four terms against a float64 reference written from DESIGN.md section 5, row by row."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a2t.distill.config import LossWeights
from a2t.distill.losses import Counts, step_losses
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


def rows_of(p, student_hidden, teacher_hidden):
    at = [e.position for e in p.student.events] + [position for position, _ in p.targets]
    tokens = [e.token for e in p.student.events] + [token for _, token in p.targets]
    groups = [*map(int, p.groups)] + [-1] * len(p.targets)
    teacher = teacher_hidden[[e.position for e in p.teacher.events]]
    return student_hidden[at], torch.tensor(tokens), torch.tensor(groups), teacher


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), logit_rows=st.sampled_from([3, 7, 1000]))
def test_terms_equal_the_reference_however_the_step_is_cut(seed, logit_rows):
    generator = torch.Generator().manual_seed(seed)
    pairs = [pair(TOKENS, make_example(seed + n, units)) for n, units in enumerate((4, 1))]
    student_head, teacher_head = (torch.randn(VOCAB, D, generator=generator, dtype=torch.float64) for _ in range(2))
    hs = [torch.randn(len(p.student), D, generator=generator, dtype=torch.float64) for p in pairs]
    ht = [torch.randn(len(p.teacher), D, generator=generator, dtype=torch.float64) for p in pairs]
    expected = reference(
        pairs, [(h @ student_head.T).tolist() for h in hs], [(h @ teacher_head.T).tolist() for h in ht]
    )
    counts = sum((Counts.of(p.groups, len(p.targets)) for p in pairs), Counts())
    weights = LossWeights(1.0, 0.5, 2.0, 3.0)
    loss, terms = torch.zeros((), dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for p, s, t in zip(pairs, hs, ht, strict=True):  # two forwards make the step
        part = step_losses(
            *rows_of(p, s, t), lambda h: h @ student_head.T, lambda h: h @ teacher_head.T,
            (TOKENS.asr_start, TOKENS.asr_end), counts, weights, logit_rows,
        )  # fmt: skip
        loss, terms = loss + part[0], terms + part[1]
    torch.testing.assert_close(terms, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    expected_loss = sum(w * x for w, x in zip((1.0, 0.5, 2.0, 3.0), expected, strict=True))
    torch.testing.assert_close(float(loss), expected_loss, rtol=1e-10, atol=1e-12)


def test_chunks_of_logits_do_not_change_the_gradient():
    p = pair(TOKENS, make_example(1, 6))
    head = torch.randn(VOCAB, D, dtype=torch.float64, requires_grad=True)
    h, teacher = (
        torch.randn(len(p.student), D, dtype=torch.float64),
        torch.randn(len(p.teacher), D, dtype=torch.float64),
    )
    grads = []
    for rows in (2, 1000):
        head.grad = None
        hidden = h.clone().requires_grad_()
        loss, _ = step_losses(
            *rows_of(p, hidden, teacher), lambda x: x @ head.T, lambda x: x @ head.detach().T, (10, 11),
            Counts.of(p.groups, len(p.targets)), LossWeights(), rows,
        )  # fmt: skip
        loss.backward()
        grads.append((hidden.grad, head.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_the_kl_is_zero_only_where_the_student_gives_the_new_tokens_nothing():
    p = pair(TOKENS, make_example(2, 5))
    logits = torch.randn(len(p.teacher), VOCAB, dtype=torch.float64)
    alike = logits.clone()
    alike[:, [10, 11]] = -1e9
    at = [e.position for e in p.teacher.events]
    tokens, groups = torch.tensor([e.token for e in p.teacher.events]), torch.tensor([*map(int, p.groups)])

    def kl(student):
        counts = Counts.of(p.groups, 0)
        return float(step_losses(
            student[at], tokens, groups, logits[at], lambda h: h, lambda h: h, (10, 11), counts, LossWeights(), 1000
        )[1][1])  # fmt: skip

    assert abs(kl(alike)) < 1e-12
    # A student that gives the new tokens the share r loses -log(1 - r).
    share = logits.softmax(-1)[at][:, [10, 11]].sum(-1)
    torch.testing.assert_close(kl(logits), float((-(1 - share).log()).mean()), rtol=1e-9, atol=1e-12)
