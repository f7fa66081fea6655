import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from a2t.kv.cache import ArenaFull, KVArena, Leaving
from a2t.kv.ledger import Ledger
from a2t.kv.policies import a2t
from a2t.kv.shape import LanguageShape
from tests.kv.unit_sequences import decode_step

SHAPE = LanguageShape(
    layers=2, kv_heads=2, head_dim=4, hidden=8, vocab=10, dtype=torch.float32, device=torch.device("cpu")
)


def feed(arena: KVArena, rows: list[int], marks: list[list[int]]) -> None:
    """Feeds tokens whose keys hold their mark in every layer, head and dimension, whose values hold its negative."""
    batch = arena.pack(rows, [len(m) for m in marks])
    flat = torch.tensor([mark for row in marks for mark in row], dtype=torch.float32)
    k_1HTD = flat.view(1, 1, -1, 1).expand(1, 2, -1, 4)
    for layer in range(SHAPE.layers):
        batch.update(layer, k_1HTD + 0.25 * layer, -k_1HTD)
    batch.commit()


def marks(arena: KVArena, row: int) -> list[int]:
    """The marks that a row holds, by slot; asserts that all layers, heads and dimensions agree."""
    tensors = arena.export(row)
    keys = tensors["keys"] - 0.25 * torch.arange(SHAPE.layers).view(-1, 1, 1, 1)
    assert torch.equal(keys, keys[:1, :1, :, :1].expand_as(keys))
    assert torch.equal(tensors["values"], -keys)
    return [int(mark) for mark in keys[0, 0, :, 0]]


def test_what_leaves_in_the_middle_of_a_feed_leaves_the_rows_as_if_it_had_left_before():
    arenas = [KVArena(SHAPE, rows=2, capacity=32) for _ in range(2)]
    for arena in arenas:
        row, other = arena.allocate(), arena.allocate()
        feed(arena, [row, other], [[*range(12)], [50, 51]])
    late, early = arenas
    gone = (1, 2, 3, 7, 13)  # one of them is fed with what sees the others leave
    batch = late.pack([other, row], [1, 5], [None, Leaving(2, gone)])
    k_1HTD = torch.tensor([52.0, 12, 13, 14, 15, 16]).view(1, 1, -1, 1).expand(1, 2, -1, 4)
    for layer in range(SHAPE.layers):
        batch.update(layer, k_1HTD + 0.25 * layer, -k_1HTD)
    batch.commit()
    feed(early, [row], [[12, 13]])
    early.drop(row, gone)
    feed(early, [other, row], [[52], [14, 15, 16]])
    assert marks(late, row) == marks(early, row) and sorted(marks(late, row)) == [
        0,
        4,
        5,
        6,
        8,
        9,
        10,
        11,
        12,
        14,
        15,
        16,
    ]
    assert marks(late, other) == [50, 51, 52] and late.lengths == early.lengths
    late.take_back(row, 2)
    assert marks(late, row) == marks(early, row)[:-2]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 127)), min_size=1, max_size=25))
def test_slots_of_the_ledger_always_mirror_the_arena(feeds):
    arena, policy = KVArena(SHAPE, rows=3, capacity=400), a2t(2, "fold")
    rows, ledgers = [arena.allocate() for _ in range(3)], [Ledger() for _ in range(3)]
    for unit, (who, byte) in enumerate(feeds):
        also = (who + 1) % 3  # two conversations share every forward
        fed = [list(ledgers[i].append(decode_step(byte).kinds, unit)) for i in (who, also)]
        feed(arena, [rows[who], rows[also]], fed)
        slots = policy.plan_eviction(ledgers[who], 25).drop
        ledgers[who].drop(slots)
        arena.drop(rows[who], slots)
        for row, ledger in zip(rows, ledgers, strict=True):
            assert marks(arena, row) == ledger.positions
            assert arena.lengths[row] == ledger.residents
            assert arena.nbytes_resident(row) == ledger.residents * 2 * 2 * 2 * 4 * 4


def test_a_row_is_exported_and_loaded_bit_for_bit():
    arena = KVArena(SHAPE, rows=2, capacity=32)
    row = arena.allocate()
    batch = arena.pack([row], [20])
    for layer in range(SHAPE.layers):
        batch.update(layer, torch.randn(1, 2, 20, 4), torch.randn(1, 2, 20, 4))
    batch.commit()
    arena.drop(row, [1, 3, 4, 18])
    saved = load(save(arena.export(row)))
    other = KVArena(SHAPE, rows=3, capacity=17)
    other.allocate()
    target = other.allocate()
    other.load(target, saved)
    again = other.export(target)
    assert other.lengths[target] == 16
    assert all(torch.equal(again[name], saved[name]) for name in ("keys", "values"))


def test_an_export_is_a_copy():
    arena = KVArena(SHAPE, rows=1, capacity=8)
    row = arena.allocate()
    feed(arena, [row], [[1, 2, 3]])
    saved = arena.export(row)
    arena.drop(row, [0])
    feed(arena, [row], [[9]])
    assert saved["keys"][0, 0, :, 0].tolist() == [1, 2, 3]
    assert marks(arena, row) == [3, 2, 9]


def test_rows_are_lent_and_given_back():
    arena = KVArena(SHAPE, rows=2, capacity=4)
    first, second = arena.allocate(), arena.allocate()
    feed(arena, [first, second], [[1], [2, 3]])
    with pytest.raises(ArenaFull, match="all 2 rows"):
        arena.allocate()
    arena.release(first)
    with pytest.raises(ValueError, match="not allocated"):
        arena.pack([first], [1])
    assert arena.allocate() == first
    assert arena.lengths == [0, 2]
    arena.clear(second)
    feed(arena, [second], [[7, 8, 9, 10]])
    assert marks(arena, second) == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        ([0], [5], "do not fit the capacity of 4"),
        ([0, 0], [1, 1], "each row once"),
        ([0], [0], "leave it out"),
        ([0], [1, 1], "with its count"),
        ([], [], "each row once"),
        ([1], [1], "row 1 is not allocated"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(rows, counts, message):
    arena = KVArena(SHAPE, rows=2, capacity=4)
    arena.allocate()
    with pytest.raises(ValueError, match=message):
        arena.pack(rows, counts)


def test_a_row_of_another_model_is_refused():
    arena = KVArena(SHAPE, rows=1, capacity=4)
    row = arena.allocate()
    good = torch.zeros(2, 2, 3, 4)
    for keys in (torch.zeros(3, 2, 3, 4), good.double(), good[0], torch.zeros(2, 2, 5, 4)):
        with pytest.raises(ValueError, match="fit"):
            arena.load(row, {"keys": keys, "values": keys})
    with pytest.raises(ValueError, match="fit"):
        arena.load(row, {"keys": good, "values": torch.zeros(2, 2, 2, 4)})
    arena.load(row, {"keys": good, "values": good})
