"""The same at a URI as in a folder: a corpus, a teacher's store, a run that is resumed."""

import json
from dataclasses import replace

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from a2t.distill.config import DistillConfig, LoraSettings
from a2t.distill.corpus import CachedCorpus, Examples
from a2t.distill.place import Place
from a2t.distill.recorded import open_recorded
from a2t.distill.teacher import StorePlan, TeacherStore, model_hash, write_store
from a2t.distill.train import distill
from tests.distill.samples import TOKENS, make_example, make_language

EXAMPLES = [make_example(n, 2 + n % 3) for n in range(4)]
CONFIG = DistillConfig(epochs=2, learning_rate=1e-3, global_batch=2, lora=LoraSettings(2, 4))


@pytest.fixture
def there(monkeypatch, tmp_path):
    """A place that is not on this machine's disk, as far as the code can tell."""
    monkeypatch.setenv("A2T_CACHE", str(tmp_path / "cache"))
    yield "memory://a2t"
    fsspec.filesystem("memory").rm("/a2t", recursive=True)


def test_a_run_at_a_uri_is_the_run_in_a_folder(there, tmp_path):
    language = make_language()
    with Place(f"{there}/data/corpus/part-00000").writing(last="corpus.json") as folder:
        CachedCorpus.write(folder, EXAMPLES, torch.float64)
    corpus = open_recorded(f"{there}/data/corpus")
    plan = StorePlan(
        Place(f"{there}/data/teacher"), "tiny", model_hash(language, TOKENS), torch.float64, tuple(corpus.ids), 2
    )
    write_store(plan, language, TOKENS, corpus, plan.unfinished())
    plan.finish()
    TeacherStore(f"{there}/data/teacher", plan.hash).verify()

    class StoppedError(Exception):
        pass

    def stop(log, total):
        if log.step == 3:
            raise StoppedError

    run = f"{there}/run"
    with pytest.raises(StoppedError):
        distill(make_language(), TOKENS, corpus, run, CONFIG, teacher=f"{there}/data/teacher", on_step=stop)
    steps = []
    done = distill(
        make_language(), TOKENS, corpus, run, CONFIG, teacher=f"{there}/data/teacher",
        on_step=lambda log, total: steps.append(log.step),
    )  # fmt: skip
    assert steps == [3, 4], "the checkpoint of the first epoch's end was gone on from"
    assert [json.loads(x)["step"] for x in (Place(run) / "log.jsonl").text().splitlines()] == [1, 2, 3, 4]
    here = distill(make_language(), TOKENS, Examples(EXAMPLES), tmp_path / "here", CONFIG)
    a, b = (load_file((place / "adapter_model.safetensors").local()) for place in (done, here))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-9)
    onward = replace(CONFIG, epochs=1)
    distill(make_language(), TOKENS, corpus, tmp_path / "on", onward, start_from=f"{run}/adapter")


def test_what_is_read_again_is_what_is_there_now(there):
    file = Place(f"{there}/x/file.txt")
    assert not file.is_file() and Place(f"{there}/x").names() == []
    file.write_text("one")
    assert file.local().read_text() == "one" and Place(f"{there}/x").names() == ["file.txt"]
    file.write_text("three")
    assert file.local().read_text() == file.text() == "three"
    file.remove()
    assert not file.is_file()


def test_a_folder_that_was_not_finished_is_not_there(tmp_path):
    place = Place(tmp_path / "made")

    def half():
        with place.writing() as folder:
            folder.mkdir()
            (folder / "half").write_text("")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert not (tmp_path / "made").exists()
    with pytest.raises(ValueError, match="nowhere://x cannot be opened"):
        Place("nowhere://x")
