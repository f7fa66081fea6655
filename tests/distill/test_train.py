"""The loop: cut into forwards or workers, stopped and resumed, with a store or a live teacher, it trains the same."""

import json
import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from a2t.distill.config import DistillConfig, EvictionSettings, LoraSettings
from a2t.distill.corpus import Examples, Joined
from a2t.distill.place import Place
from a2t.distill.step import Student
from a2t.distill.teacher import StorePlan, model_hash, write_store
from a2t.distill.train import distill
from a2t.distill.zero import STAGES
from a2t.models.adapters import save_adapter
from tests.distill.samples import TOKENS, make_example, make_language

CORPUS = Examples([make_example(n, 2 + n % 5) for n in range(9)])
CONFIG = DistillConfig(
    epochs=2,
    learning_rate=1e-2,
    global_batch=3,
    join_units=7,
    join_share=0.6,
    lora=LoraSettings(2, 4),
    eviction=EvictionSettings(probability=0.7, options={"retention_units": 1}),
)


def folder(place):
    return Path(place.path)


def adapter(where):
    return load_file(where / "adapter_model.safetensors")


def log_of(folder):
    """Without what depends on the machine's speed."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("_per_s")} for line in lines]


def assert_same(a, b, atol):
    a, b = adapter(a), adapter(b)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol)


def work(rank, workers, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.rendezvous", rank=rank, world_size=workers)
    distill(make_language(), TOKENS, CORPUS, out, CONFIG, wrap=DistributedDataParallel)
    dist.destroy_process_group()


def in_processes(workers, target, *args):
    context = multiprocessing.get_context("fork")  # the imports are paid already
    processes = [context.Process(target=target, args=(rank, workers, *args)) for rank in range(workers)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(240)
    assert [p.exitcode for p in processes] == [0] * workers


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The adapter of an undisturbed run on one process."""
    return folder(distill(make_language(), TOKENS, CORPUS, tmp_path_factory.mktemp("whole"), CONFIG))


def test_small_forwards_train_the_same(whole, tmp_path):
    small = distill(make_language(), TOKENS, CORPUS, tmp_path, replace(CONFIG, micro_positions=1, logit_rows=5))
    assert_same(whole, small, 1e-9)
    log = log_of(whole.parent)
    assert [line["step"] for line in log] == list(range(1, len(log) + 1))
    assert sum(line["units"] for line in log) == 2 * sum(CORPUS.units)
    for key in ("loss", "transcription", "kl", "decision", "turn", "gradient_norm", "learning_rate", "events_listen"):
        assert key in log[0]


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_train_the_same_as_one_process(whole, tmp_path, workers):
    in_processes(workers, work, tmp_path / "out")
    assert_same(whole, tmp_path / "out" / "adapter", 1e-6)  # sums in another order, which Adam magnifies
    for a, b in zip(log_of(whole.parent), log_of(tmp_path / "out"), strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def both_stages(rank, workers, out, config):
    """ZeRO-2 and ZeRO-3 from the start, and each of them on from the other's last checkpoint but one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=workers)
    for stage in STAGES:
        distill(make_language(), TOKENS, CORPUS, out / f"{stage}", config, zero=stage, checkpoint_seconds=0.0)
    if rank == 0:
        for stage in STAGES:
            without_the_last_step(out / f"{stage}", out / f"on-from-{stage}")
    dist.barrier()
    for stage, other in zip(STAGES, reversed(STAGES), strict=True):
        distill(make_language(), TOKENS, CORPUS, out / f"on-from-{other}", config, zero=stage, checkpoint_seconds=0.0)
    dist.destroy_process_group()


def without_the_last_step(run, copy):
    shutil.copytree(run, copy)
    last = sorted((copy / "checkpoints").iterdir())[-1]
    shutil.rmtree(last)
    shutil.rmtree(copy / "adapter")


def test_sharded_by_deepspeed_it_trains_the_same(tmp_path):
    """DeepSpeed keeps its masters and sums in float32: at the paper's rate that moves nothing by 1e-6."""
    pytest.importorskip("deepspeed")
    paper = replace(CONFIG, learning_rate=1e-4, epochs=1)
    alone = folder(distill(make_language(), TOKENS, CORPUS, tmp_path / "alone", paper))
    in_processes(2, both_stages, tmp_path, paper)
    for run in ("2", "3", "on-from-2", "on-from-3"):
        assert_same(alone, tmp_path / run / "adapter", 1e-6)
        for a, b in zip(log_of(alone.parent), log_of(tmp_path / run), strict=True):
            assert a == pytest.approx(b, rel=1e-5)
    start = Student(make_language(), TOKENS, paper)
    save_adapter(start.peft, tmp_path / "start")
    moved = [float((adapter(alone)[k] - v).abs().max()) for k, v in adapter(tmp_path / "start").items()]
    assert min(moved) > 5e-5, "the comparison is of adapters that have moved"
    # What it left is what one process can go on from, without DeepSpeed.
    without_the_last_step(tmp_path / "3", tmp_path / "again")
    assert_same(alone, distill(make_language(), TOKENS, CORPUS, tmp_path / "again", paper), 1e-6)


def test_a_stopped_run_goes_on_to_the_same_adapter(whole, tmp_path):
    class StoppedError(Exception):
        pass

    def stop(log, total):
        if log.step == 4:
            raise StoppedError

    with pytest.raises(StoppedError):  # the checkpoint of step 3 is the newest
        distill(make_language(), TOKENS, CORPUS, tmp_path, CONFIG, on_step=stop, checkpoint_seconds=0)
    steps = []
    resumed = distill(
        make_language(), TOKENS, CORPUS, tmp_path, CONFIG, on_step=lambda log, total: steps.append((log.step, total))
    )
    assert steps[0][0] == 4 and steps[-1][0] == steps[-1][1]
    assert_same(whole, resumed, 0)
    assert log_of(tmp_path) == log_of(whole.parent)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    with pytest.raises(ValueError, match="was trained with another learning_rate"):
        distill(make_language(), TOKENS, CORPUS, tmp_path, replace(CONFIG, learning_rate=1e-3))


def test_a_store_teaches_what_the_live_teacher_teaches(whole, tmp_path):
    language = make_language()
    joined = Joined(CORPUS, CONFIG)
    plan = StorePlan(
        Place(tmp_path / "store"), "tiny", model_hash(language, TOKENS), torch.float64, tuple(joined.ids), 4
    )
    write_store(plan, language, TOKENS, joined, plan.unfinished())
    plan.finish()
    taught = distill(make_language(), TOKENS, CORPUS, tmp_path / "out", CONFIG, teacher=tmp_path / "store")
    assert_same(whole, taught, 1e-9)
    with pytest.raises(ValueError, match=r"lacks .* streams, .* same join_units"):
        distill(
            make_language(), TOKENS, CORPUS, tmp_path / "no", replace(CONFIG, join_units=4), teacher=tmp_path / "store"
        )
    with pytest.raises(ValueError, match="not this model"):
        distill(make_language(1), TOKENS, CORPUS, tmp_path / "no", CONFIG, teacher=tmp_path / "store")
    with pytest.raises(ValueError, match="corpus is empty"):
        distill(make_language(), TOKENS, Examples([]), tmp_path / "no", CONFIG)
