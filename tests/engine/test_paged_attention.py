"""Paged attention over ragged batches against a naive one, token by token, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from core.step import SequencePart, StepPlan
from engine import paged_attention
from engine.attention_layout import AttentionLayer, Window, read_layout
from engine.kv_store import KvStore, PagedCache
from engine.paged_attention import LayerAttention
from engine.paged_runner import PagedRunner
from engine.step_layout import StepLayoutBuilder
from tests.models.families import FAMILIES, make_config
from tests.models.tiny_checkpoint import fill_weights

BLOCK = 4
NUM_BLOCKS = 64
KEY_DIM = 8


class Case:
    """Sequences of random keys, values and queries, laid into scattered pages part by part."""

    def __init__(
        self, seed: int, window: Window, groups: int, dtype: torch.dtype, scratch: int
    ) -> None:
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.torch = torch.Generator().manual_seed(seed)
        self.window, self.kv_heads, self.heads, self.dtype = window, 2, 2 * groups, dtype
        layer = AttentionLayer(torch.nn.Module(), 0, self.kv_heads, KEY_DIM, KEY_DIM, window)
        self.store = KvStore((layer,), NUM_BLOCKS, BLOCK, dtype, torch.device("cpu"), scratch)
        self.cache = PagedCache(self.store, (layer,))
        self.attention = LayerAttention(layer, self.store)
        self.builder = StepLayoutBuilder(256, BLOCK, torch.device("cpu"))
        self.free = self.random.permutation(NUM_BLOCKS).tolist()

    def tensor(self, heads: int, tokens: int) -> torch.Tensor:
        return torch.randn((1, heads, tokens, KEY_DIM), generator=self.torch).to(self.dtype)

    def worst(
        self,
        cuts: list[list[int]],
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> float:
        """Largest difference over all steps; `cuts` are each sequence's part lengths."""
        totals = [sum(parts) for parts in cuts]
        blocks = [[self.free.pop() for _ in range(-(-total // BLOCK))] for total in totals]
        keys = [self.tensor(self.kv_heads, total) for total in totals]
        values = [self.tensor(self.kv_heads, total) for total in totals]
        queries = [self.tensor(self.heads, total) for total in totals]
        done = [0] * len(cuts)
        worst = 0.0
        for step in range(max(len(parts) for parts in cuts)):
            live = [n for n, parts in enumerate(cuts) if step < len(parts)]
            parts, spans = [], []
            for n in live:
                end = done[n] + cuts[n][step]
                spans.append((n, done[n], end))
                parts.append(
                    SequencePart(
                        sequence_id=n,
                        start=done[n],
                        token_ids=(0,) * cuts[n][step],
                        block_ids=tuple(blocks[n][: -(-end // BLOCK)]),
                        is_decode=False,
                        wants_logits=False,
                    )
                )
                done[n] = end

            def flat(source: list[torch.Tensor], spans: Any = tuple(spans)) -> torch.Tensor:
                return torch.cat([source[n][:, :, a:b] for n, a, b in spans], dim=2)

            self.store.step = self.builder.build(StepPlan(parts=tuple(parts)))
            fresh = self.cache.update(flat(keys), flat(values), 0)
            out = self.attention(flat(queries), *fresh, 0.3, softcap, sinks)[0]
            row = 0
            for n, start, end in spans:
                for position in range(start, end):
                    expected = self.naive(queries[n], keys[n], values[n], position, softcap, sinks)
                    worst = max(worst, float((out[row].double() - expected).abs().max()))
                    row += 1
        return worst

    def naive(self, query, key, value, position, softcap, sinks) -> torch.Tensor:
        first = {
            "full": 0,
            "sliding": max(0, position + 1 - self.window.tokens),
            "chunked": position - position % max(1, self.window.tokens),
        }[self.window.kind]
        out = []
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            seen = key[0, kv, first : position + 1].double()
            scores = seen @ query[0, head, position].double() * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double()[None]])
            probs = scores.softmax(0)[: position + 1 - first]
            out.append(probs @ value[0, kv, first : position + 1].double())
        return torch.stack(out)


WINDOWS = [Window(), Window("sliding", 5), Window("sliding", 1), Window("chunked", 6)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    window=st.sampled_from(WINDOWS),
    groups=st.sampled_from([1, 3]),
    scratch=st.sampled_from([100, 2000, 1 << 20]),
    cuts=st.lists(
        st.lists(st.sampled_from([1, 1, 1, 2, 7, 13]), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
)
def test_every_query_sees_what_it_should(seed, window, groups, scratch, cuts) -> None:
    case = Case(seed, window, groups, torch.float32, scratch)
    assert case.worst(cuts) < 1e-5


CUTS = [[9, 1, 1, 4], [1, 1, 1, 1], [17, 1, 6, 1]]


@pytest.mark.parametrize("scratch", [100, 1 << 20])
def test_sinks_and_softcap(scratch: int) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    assert Case(1, Window(), 2, torch.float32, scratch).worst(CUTS, sinks=sinks) < 1e-5
    assert Case(2, Window("sliding", 6), 2, torch.float32, scratch).worst(CUTS, 1.5) < 1e-5


@pytest.mark.parametrize("scratch", [100, 1 << 20])
def test_sixteen_bit_pages_lose_only_their_rounding(scratch: int) -> None:
    assert Case(3, Window(), 2, torch.bfloat16, scratch).worst(CUTS) < 0.02


def test_a_wrong_window_would_be_seen() -> None:
    case = Case(4, Window("sliding", 5), 1, torch.float32, 1 << 20)
    naive_window, case.window = case.window, Window("sliding", 6)
    assert case.worst(CUTS) > 1e-3
    assert naive_window.tokens == 5


def test_stale_pages_of_a_failed_sequence_do_not_leak() -> None:
    case = Case(5, Window(), 1, torch.float32, 1 << 20)
    for pages in case.store.pages.values():
        pages.fill_(float("nan"))
    case.store.clear_blocks(list(range(NUM_BLOCKS)))
    assert case.worst(CUTS) < 1e-5


def test_one_call_a_length_bucket_and_one_a_prompt_part(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(6, Window(), 1, torch.float32, 1 << 20)
    calls = []
    real = paged_attention.attend

    def counting(query: torch.Tensor, *rest: Any) -> Any:
        calls.append(query.shape[0])
        return real(query, *rest)

    monkeypatch.setattr(paged_attention, "attend", counting)
    # Twelve short sequences and a long one decode, two prompts prefill.
    lengths = [4 + n % 3 for n in range(12)] + [60]
    cuts = [[length, 1] for length in lengths]
    case.worst(cuts)
    decode_calls = calls[13:]
    assert sum(decode_calls) == 13
    assert len(decode_calls) <= 3


def test_windows_and_geometry_of_every_paged_family() -> None:
    chunked = read_layout(AutoModelForCausalLM.from_config(make_config("llama4_text")))
    assert {layer.window for layer in chunked} == {Window(), Window("chunked", 16)}
    shared = read_layout(AutoModelForCausalLM.from_config(make_config("gemma4_text")))
    assert [layer.shares_layer for layer in shared] == [None, None, 0, 1]
    assert [layer.key_dim for layer in shared] == [16, 32, 16, 32]
    latent = read_layout(AutoModelForCausalLM.from_config(make_config("deepseek_v3")))
    assert all(layer.latent and layer.values_per_token == 40 for layer in latent)
    mask_only = read_layout(AutoModelForCausalLM.from_config(make_config("qwen2_moe")))
    assert [layer.window.kind for layer in mask_only] == ["sliding", "full", "sliding"]
    assert FAMILIES["qwen2_moe"].config["sliding_window"] == mask_only[0].window.tokens


def test_a_long_prompt_stays_within_the_scratch_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """M13, KTransformers#1676: scratch is bounded by the budget, not by the prompt."""
    total, chunk, scratch = 8192, 512, 1 << 20
    config = make_config("olmoe")
    config.max_position_embeddings = total
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fill_weights(model, 0)
    ids = torch.randint(5, 300, (total,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids[None], logits_to_keep=1).logits[0, -1]
    used = []
    real = paged_attention.attend

    def measuring(query: torch.Tensor, key: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if mask is not None:
            masked = query.shape[2] * key.shape[2] * 4
            used.append(key.numel() * 4 + value.numel() * 4 + masked)
        return real(query, key, value, mask, *rest)

    monkeypatch.setattr(paged_attention, "attend", measuring)
    runner = PagedRunner(model, total // 16, 16, chunk, scratch)
    for start in range(0, total, chunk):
        part = SequencePart(
            sequence_id=0,
            start=start,
            token_ids=tuple(ids[start : start + chunk].tolist()),
            block_ids=tuple(range((start + chunk) // 16)),
            is_decode=False,
            wants_logits=start + chunk == total,
        )
        logits = runner.run(StepPlan(parts=(part,)))
    assert max(used) <= scratch
    assert len(used) > 50
    spread = float(expected.max() - expected.min())
    assert float((logits[0] - expected).abs().max()) < 1e-4 * spread
