"""The student is the frozen model until it learns, learns only its adapter, and saves it in PEFT's form."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from peft import PeftModel

from a2t.distill.batches import Sequences, collate, counts_of
from a2t.distill.config import DistillConfig, LoraSettings
from a2t.distill.optimizer import Optimizer
from a2t.distill.sequences import pair, strip_segments
from a2t.distill.step import Student, train_step
from a2t.distill.teacher import frozen_hidden
from a2t.duplex.protocol import SpecialTokens
from a2t.models.adapters import load_adapter, save_adapter
from tests.distill.samples import TOKENS, VOCAB, make_example, make_language, randomize_adapter

NEW = [TOKENS.asr_start, TOKENS.asr_end]
OLD = [i for i in range(VOCAB) if i not in NEW]
SMALL = DistillConfig(lora=LoraSettings(rank=2, alpha=4), learning_rate=1e-2, warmup=0.0)


def optimizer_of(student, steps):
    return Optimizer(student, student.trainable(), student.config, steps)


def sequences_of(examples, side):
    pairs = [pair(TOKENS, e) for e in examples]
    return pairs, Sequences.of([getattr(p, side) for p in pairs], [e.audio_AD for e in examples])


@torch.no_grad()
def test_a_fresh_adapter_leaves_native_distributions_where_nothing_is_inserted():
    examples = [strip_segments(make_example(n, 5)) for n in range(3)]
    student = Student(make_language(), TOKENS, SMALL)
    pairs, sequences = sequences_of(examples, "student")
    batch = collate(pairs)
    events = batch.at_N[batch.groups_N >= 0]
    mine = student.head(student.hidden(sequences)[events])[:, OLD].log_softmax(-1)
    stock = make_language()
    embeddings = stock.model.embed_tokens(sequences.ids_T).index_copy(0, sequences.audio_at_A, sequences.audio_AD)
    for start, p in zip(sequences.starts, pairs, strict=True):
        out = stock(inputs_embeds=embeddings[None, start : start + len(p.student)]).logits[0]
        at = [e.position for e in p.student.events]
        rows = slice(sum(len(q.groups) for q in pairs[: pairs.index(p)]), None)
        expected = out[at][:, OLD].log_softmax(-1)
        torch.testing.assert_close(mine[rows][: len(at)], expected, rtol=0, atol=1e-12)
    _, terms = student(batch, counts_of(pairs))
    share = student.head(student.hidden(sequences)[events]).softmax(-1)[:, NEW].sum(-1)
    assert float(terms[1]) == pytest.approx(float(-(1 - share).log().mean()), rel=1e-9), "all that is left of the KL"


@torch.no_grad()
def test_with_segments_a_fresh_adapter_is_the_frozen_model_on_the_longer_sequence():
    example = make_example(4, 6)
    language = make_language()
    student = Student(make_language(), TOKENS, SMALL)
    [p], sequences = sequences_of([example], "student")
    for weight in (language.model.embed_tokens.weight, language.lm_head.weight):
        weight[NEW] = weight[TOKENS.unit_end].clone()
    stock = frozen_hidden(language.model, language.model.embed_tokens.weight, sequences)
    mine = student.hidden(sequences)
    torch.testing.assert_close(mine, stock, rtol=0, atol=1e-12)
    torch.testing.assert_close(student.head(mine), language.lm_head(stock), rtol=0, atol=1e-12)
    # What was inserted is context: predictions equal the teacher's before the first segment, and not after it.
    taught = student.teacher_hidden(Sequences.of([p.teacher], [example.audio_AD]))
    first = next(n for n, u in enumerate(example.units) if u.segment is not None)
    far = [
        float((mine[s.position] - taught[t.position]).abs().max())
        for s, t in zip(p.student.events, p.teacher.events, strict=True)
    ]
    split = next(n for n, e in enumerate(p.student.events) if e.unit == first) + 1
    assert max(far[:split]) < 1e-12 and min(far[split:]) > 1e-6


@torch.no_grad()
def test_the_teacher_inside_a_trained_student_is_the_bare_model():
    language = make_language()
    student = Student(copy.deepcopy(language), TOKENS, SMALL)
    randomize_adapter(student)
    _, sequences = sequences_of([make_example(1)], "teacher")
    bare = frozen_hidden(language.model, language.model.embed_tokens.weight, sequences)
    taught = student.teacher_hidden(sequences)
    torch.testing.assert_close(taught, bare, rtol=0, atol=0)
    assert (student.hidden(sequences) - taught).abs().max() > 1e-3
    assert all(p.requires_grad for n, p in student.named_parameters() if "lora" in n or "trainable" in n)


def test_the_direct_reading_of_the_rows_equals_pefts_layers_forward_and_backward():
    student = Student(make_language(), TOKENS, SMALL)
    randomize_adapter(student)
    [p], sequences = sequences_of([make_example(3)], "student")
    weights = torch.randn(len(p.student), VOCAB, dtype=torch.float64)
    trainable = list(student.trainable().values())
    mine = student.head(student.hidden(sequences))
    grads = torch.autograd.grad((mine * weights).sum(), trainable)
    embeddings = student.peft.get_input_embeddings()(sequences.ids_T)
    embeddings = embeddings.index_copy(0, sequences.audio_at_A, sequences.audio_AD)
    stock = student.peft(inputs_embeds=embeddings[None]).logits[0]
    torch.testing.assert_close(mine, stock, rtol=0, atol=1e-11)
    for a, b in zip(grads, torch.autograd.grad((stock * weights).sum(), trainable), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_step_moves_the_adapter_and_nothing_else_and_the_loss_falls():
    language = make_language()
    before = {n: v.clone() for n, v in language.state_dict().items()}
    student = Student(language, TOKENS, SMALL)
    expected = 2 * sum(2 * (a + b) for a, b in [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)])
    named = student.trainable()
    assert sum(p.numel() for n, p in named.items() if "lora" in n) == expected
    assert sorted(tuple(p.shape) for n, p in named.items() if "lora" not in n) == [(2, 32), (2, 32)]
    for p in (p for n, p in named.items() if "lora" not in n):
        rows = [before["model.embed_tokens.weight"][2], before["lm_head.weight"][2]]
        assert any(torch.equal(p, torch.stack([row, row])) for row in rows), "new rows start as </unit>'s"
    pairs = [pair(TOKENS, make_example(n)) for n in range(4)]
    batch, counts = collate(pairs), counts_of(pairs)
    optimizer = optimizer_of(student, 40)
    logs = [train_step(optimizer, [lambda: (batch, True)], counts) for _ in range(25)]
    assert logs[-1].terms["transcription"] < 0.6 * logs[0].terms["transcription"]
    assert logs[-1].loss < 0.8 * logs[0].loss
    assert logs[0].loss == pytest.approx(sum(logs[0].terms.values()))
    assert logs[0].counts == counts and logs[0].units == 24 and logs[0].positions == len(batch.student)
    after = {n.replace(".base_layer", "").replace(".token_adapter", ""): v for n, v in language.state_dict().items()}
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def test_without_distillation_only_the_transcription_loss_teaches():
    student = Student(make_language(), TOKENS, replace(SMALL, weights=SMALL.weights.without_distillation()))
    pairs = [pair(TOKENS, make_example(1))]
    loss, terms = student(collate(pairs), counts_of(pairs))
    assert float(loss.detach()) == pytest.approx(float(terms[0])) and all(terms > 0)


@torch.no_grad()
def test_the_saved_adapter_loads_with_peft_and_merges(tmp_path):
    language = make_language()
    fresh = [copy.deepcopy(language) for _ in range(2)]
    student = Student(language, TOKENS, SMALL)
    randomize_adapter(student)
    save_adapter(student.peft, tmp_path / "adapter", base="tiny")
    [_], sequences = sequences_of([make_example(3)], "student")
    mine = student.head(student.hidden(sequences))
    loaded = PeftModel.from_pretrained(fresh[0], str(tmp_path / "adapter"))
    merged = load_adapter(fresh[1], tmp_path / "adapter", merge=True)
    for model in (loaded, merged):
        embeddings = model.get_input_embeddings()(sequences.ids_T)
        embeddings = embeddings.index_copy(0, sequences.audio_at_A, sequences.audio_AD)
        torch.testing.assert_close(model(inputs_embeds=embeddings[None]).logits[0], mine, rtol=0, atol=1e-11)


def test_the_schedule_and_the_rows_rate():
    config = replace(SMALL, learning_rate=1e-3, warmup=0.1, final_rate=0.1)
    optimizer = optimizer_of(Student(make_language(), TOKENS, config), 100)
    rates = [optimizer.rate(n) for n in range(101)]
    assert rates[:10] == pytest.approx([1e-4 * (n + 1) for n in range(10)])
    assert (
        rates[10] == pytest.approx(1e-3)
        and rates[55] == pytest.approx(1e-3 * 0.55)
        and rates[100] == pytest.approx(1e-4)
    )
    assert all(a > b for a, b in pairwise(rates[10:]))
    for group in optimizer.adam.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 1e-3)
    before = [p.detach().clone() for g in optimizer.adam.param_groups for p in (g["params"][0],)]
    optimizer.step()
    moved = [
        float((g["params"][0].detach() - b).abs().max())
        for g, b in zip(optimizer.adam.param_groups, before, strict=True)
    ]
    assert moved[1] == pytest.approx(3 * moved[0], rel=1e-6)


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match=r"no <\|asr_start\|>"):
        Student(make_language(), SpecialTokens(1, 2, 3, 4, 5, 6, 7, 8, 9), SMALL)
    with pytest.raises(ValueError, match="40 token rows, the side channel needs row 99"):
        Student(make_language(), replace(TOKENS, asr_end=99), SMALL)
    student = Student(make_language(), TOKENS, SMALL)
    optimizer = optimizer_of(student, 10)
    first = next(iter(student.trainable().values()))
    first.grad = torch.full_like(first, float("nan"))
    with pytest.raises(FloatingPointError, match="step 0"):
        optimizer.step()
