"""The store gives back what the teacher said, exactly, and refuses to be used for anything else."""

import json
from dataclasses import replace

import pytest
import torch

from a2t.distill.config import DistillConfig, LoraSettings
from a2t.distill.corpus import Examples
from a2t.distill.place import Place
from a2t.distill.sequences import Example, native_layout, strip_segments
from a2t.distill.step import Student
from a2t.distill.teacher import StorePlan, TeacherStore, model_hash, write_store
from a2t.duplex.protocol import AUDIO_ID, UnitTokens
from tests.distill.samples import TOKENS, make_example, make_language, randomize_adapter

EXAMPLES = [make_example(n, 2 + n % 4) for n in range(7)]


def store(folder, language, dtype=torch.float64, examples=EXAMPLES, shards=None):
    corpus = Examples(examples)
    plan = StorePlan(Place(folder), "tiny", model_hash(language, TOKENS), dtype, tuple(corpus.ids), shard_examples=3)
    write_store(plan, language, TOKENS, corpus, plan.unfinished() if shards is None else shards, micro_positions=80)
    return plan


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_logits_rebuilt_from_the_store_equal_the_direct_ones(tmp_path, dtype):
    language = make_language(dtype=dtype)
    store(tmp_path, language, dtype).finish(corpus="random")
    read = TeacherStore(tmp_path, model_hash(language, TOKENS))
    assert len(read) == len(EXAMPLES) and read.manifest["events"] == sum(
        len(u.native) for e in EXAMPLES for u in e.units
    )
    for e in EXAMPLES:
        layout = native_layout(TOKENS, e)
        ids = torch.tensor(layout.ids)
        embeddings = language.model.embed_tokens(ids.clamp(min=0))
        embeddings[ids == AUDIO_ID] = e.audio_AD.to(dtype)
        direct = language(inputs_embeds=embeddings[None]).logits[0][[x.position for x in layout.events]]
        rebuilt = language.lm_head(read.hidden(e))
        # In bf16 packed and single forwards round differently; what was said is stored to the bit (next test).
        atol = 1e-12 if dtype == torch.float64 else 0.05 * float(direct.abs().max())
        torch.testing.assert_close(rebuilt, direct, rtol=0, atol=atol)
        assert read[e.id].native == [list(u.native) for u in e.units]


def test_the_store_is_small_and_exact_in_its_dtype(tmp_path):
    language = make_language(dtype=torch.bfloat16)
    plan = store(tmp_path, language, torch.bfloat16)
    plan.finish()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    # Hidden state, token, unit and group; the rest is a header a shard.
    assert (
        manifest["events"] * (2 * 32 + 9) <= manifest["bytes"] <= manifest["events"] * (2 * 32 + 9) + plan.shards * 800
    )
    with pytest.raises(ValueError, match="bfloat16 cannot hold this teacher's float64 states exactly"):
        store(tmp_path / "lossy", make_language(), torch.bfloat16)


def test_the_hash_is_of_the_base_and_not_of_its_adapter_or_its_new_rows():
    language = make_language()
    bare = model_hash(language, TOKENS)
    with torch.no_grad():
        language.lm_head.weight[TOKENS.asr_start] += 1
    assert model_hash(language, TOKENS) == bare
    student = Student(language, TOKENS, DistillConfig(lora=LoraSettings(2, 4)))
    randomize_adapter(student)
    assert model_hash(student.peft, TOKENS) == model_hash(language, TOKENS) == bare
    with torch.no_grad():
        student.decoder.norm.weight[0] += 1e-9
    assert model_hash(student.peft, TOKENS) != bare


def test_a_store_goes_on_where_it_was_stopped(tmp_path):
    language = make_language()
    plan = store(tmp_path, language, shards=[1])
    stamp = (tmp_path / "shard-00001.safetensors").stat().st_mtime_ns
    (tmp_path / "shard-00002.part").write_bytes(b"half a shard")
    (tmp_path / "shard-00000.safetensors").write_bytes(b"renamed, but its side file was never written")
    assert plan.unfinished() == [0, 2]
    with pytest.raises(ValueError, match="lacks 2 of 3 shards, the first is 0"):
        plan.finish()
    with pytest.raises(ValueError, match="no manifest.json"):
        TeacherStore(tmp_path, plan.hash)
    store(tmp_path, language).finish()
    assert (tmp_path / "shard-00001.safetensors").stat().st_mtime_ns == stamp, "a finished shard was computed again"
    read = TeacherStore(tmp_path, plan.hash)
    read.verify()
    assert all(e.id in read for e in EXAMPLES)


def test_a_store_of_something_else_is_refused(tmp_path):
    language = make_language()
    plan = store(tmp_path, language)
    plan.finish()
    with pytest.raises(ValueError, match="holds what tiny .* said, not this model"):
        TeacherStore(tmp_path, model_hash(make_language(seed=1), TOKENS))
    with pytest.raises(ValueError, match="was written for another ids"):
        replace(plan, ids=("other", *plan.ids[1:])).unfinished()
    read = TeacherStore(tmp_path, plan.hash)
    with pytest.raises(ValueError, match="nothing on example 'e99'"):
        read.hidden(make_example(99))
    e = strip_segments(EXAMPLES[0])
    other = Example(e.id, e.prefix, (UnitTokens((TOKENS.speak, *e.units[0].native)), *e.units[1:]), e.audio_AD)
    with pytest.raises(ValueError, match="'e0' was recorded with other native tokens"):
        read.hidden(other)
    path = tmp_path / "shard-00001.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="shard-00001.safetensors is missing or damaged"):
        TeacherStore(tmp_path, plan.hash).verify()
