from itertools import pairwise

import pytest
import torch
from torch import Tensor

from a2t.kv import attention
from a2t.kv.cache import KVArena, PackedBatch
from a2t.kv.shape import LanguageShape

QUERY_HEADS, SCALE = 6, 0.3


def shape(device: str = "cpu", dtype: torch.dtype = torch.float64, head_dim: int = 8) -> LanguageShape:
    return LanguageShape(2, 2, head_dim, 48, 10, dtype, torch.device(device))


def fed_batch(shape: LanguageShape, capacity: int, held: list[int], counts: list[int]) -> tuple[PackedBatch, Tensor]:
    """A batch over rows that hold `held` positions, its new keys and values written; and queries."""
    arena = KVArena(shape, len(held) + 1, capacity)
    arena.allocate()
    rows = [arena.allocate() for _ in held]
    rows.reverse()  # the packed order is not the order of the rows
    for row, length in zip(rows, held, strict=True):
        states = torch.randn(shape.layers, shape.kv_heads, length, shape.head_dim).to(shape.device, shape.dtype)
        arena.load(row, {"keys": states, "values": states.flip(-1)})
    batch = arena.pack(rows, counts)
    for layer in range(shape.layers):
        k, v = (torch.randn(1, shape.kv_heads, sum(counts), shape.head_dim) for _ in range(2))
        batch.update(layer, k.to(shape.device, shape.dtype), v.to(shape.device, shape.dtype))
    return batch, torch.randn(1, QUERY_HEADS, sum(counts), shape.head_dim).to(shape.device, shape.dtype)


def by_definition(q_1QTD: Tensor, batch: PackedBatch, layer: int) -> Tensor:
    """softmax(scale q k) v, one query and head at a time: new token t sees what was held and t + 1 new ones."""
    out = []
    for i, (row, start, count) in enumerate(zip(batch.rows, batch.starts, batch.counts, strict=True)):
        k_HCD, v_HCD = batch.arena.kv_N2RHCD[layer, :, row].to(q_1QTD.dtype)
        for t in range(count):
            q_QD, seen = q_1QTD[0, :, batch.offsets[i] + t], start + t + 1
            heads = [
                torch.softmax(SCALE * k_HCD[q // 3, :seen] @ q_QD[q], 0) @ v_HCD[q // 3, :seen]
                for q in range(QUERY_HEADS)
            ]
            out.append(torch.stack(heads))
    return torch.stack(out)[None]


TOGETHER = [([9, 11, 10], [1, 1, 1]), ([12, 11, 12, 2, 12], [1, 1, 1, 5, 1]), ([6, 6], [1, 1])]
CASES = [*TOGETHER, ([5], [1]), ([0], [7]), ([9], [4]), ([3, 11, 0], [1, 1, 1]), ([8, 0, 2, 20], [1, 6, 3, 11])]


@pytest.mark.parametrize(("held", "counts"), CASES)
def test_packed_rows_attend_by_the_definition(held, counts, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    batch, q_1QTD = fed_batch(shape(), 40, held, counts)
    for layer in range(2):
        out = attention.packed_attention(q_1QTD, batch, layer, SCALE)
        assert out.shape == (1, sum(counts), QUERY_HEADS, 8)
        assert (out - by_definition(q_1QTD, batch, layer)).abs().max() < 1e-12


def test_rows_of_like_length_attend_in_one_call():
    for held, counts in TOGETHER:
        together = fed_batch(shape(), 40, held, counts)[0].together
        assert together is not None and len(together.members) == counts.count(1)
    assert fed_batch(shape(), 40, [3, 30], [1, 1])[0].together is None, "one would mostly wait for the other"


def documented_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table
) -> Tensor:
    """What torch documents `varlen_attn` to compute from a paged cache, page by page, without its kernel."""
    assert window_size == (-1, 0)
    assert enable_gqa
    groups = query.shape[1] // key.shape[2]
    assert max_q == cu_seq_q.diff().max()
    assert max_k == seqused_k.max() == cu_seq_k.diff().max()
    assert {t.dtype for t in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
    out = torch.empty_like(query)
    for n, (begin, end) in enumerate(pairwise(cu_seq_q.tolist())):
        k, v = (pages[block_table[n].long()].flatten(0, 1)[: seqused_k[n]] for pages in (key, value))
        q_tQD = query[begin:end]
        scores = scale * torch.einsum("tqd,lqd->qtl", q_tQD, k.repeat_interleave(groups, 1))
        t, length = scores.shape[1:]
        scores.masked_fill_(torch.ones(t, length, dtype=torch.bool).triu(length - t + 1), float("-inf"))
        out[begin:end] = torch.einsum("qtl,lqd->tqd", scores.softmax(-1), v.repeat_interleave(groups, 1))
    return out


@pytest.mark.parametrize(("held", "counts"), CASES)
def test_rows_are_handed_to_the_variable_length_kernel_as_pages(held, counts):
    batch, q_1QTD = fed_batch(shape(), 40, held, counts)
    written = [tuple(states.clone() for states in batch.dense(1, i)) for i in range(len(held))]
    k_HTD, v_HTD = (
        torch.cat([batch.dense(1, i)[which][:, start:] for i, start in enumerate(batch.starts)], 1)
        for which in range(2)
    )
    for i, start in enumerate(batch.starts):
        for states in batch.dense(1, i):
            states[:, start:] = 0
    batch._scatter(1, k_HTD, v_HTD)
    for i, states in enumerate(written):
        assert all(map(torch.equal, batch.dense(1, i), states))
    out = attention.varlen_attention(q_1QTD, batch, 1, SCALE, documented_varlen)
    assert (out - by_definition(q_1QTD, batch, 1)).abs().max() < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_cuda_kernel_is_the_definition(head_dim):
    batch, q_1QTD = fed_batch(shape("cuda", torch.bfloat16, head_dim), 512, [300, 0, 17], [1, 40, 11])
    assert attention.varlen_fits(q_1QTD, batch)
    out = attention.packed_attention(q_1QTD, batch, 0, SCALE)
    assert (out - by_definition(q_1QTD.float(), batch, 0)).abs().max() < 2e-2
