"""Every family's routers are found beside the experts, and rank them as the model does."""

import pytest
import torch

from engine.backbone import Backbone
from engine.stock_runner import StockRunner
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.next_gate import MOST_ROWS, NextGate, as_scores
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from tests.engine.forced_steps import Forced, plans, token_ids
from tests.models.families import FAMILIES, cached_checkpoint

NO_GUESS = {"nemotron_h": "its experts get a latent of another width than its router"}
INEXACT = {
    "gemma4_text": "its router norms and scales the residual in another way",
    "deepseek_v2": "limited to groups of experts",
    "deepseek_v3": "limited to groups of experts",
    "glm4_moe": "limited to groups of experts",
    "exaone_moe": "limited to groups of experts",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gate_ranks_its_own_hidden_states_as_its_router_does(family):
    index = CheckpointIndex.open(cached_checkpoint(family, "float32"))
    pool = ExpertPool(index, PoolSettings(verify_checksums=False))
    calls = []
    try:
        backbone = Backbone.open(index, pool)
        gates = NextGate(
            backbone.model,
            [layer.module_name for layer in index.layers],
            [layer.num_experts for layer in index.layers],
            [layer.top_k for layer in index.layers],
        )
        for layer in index.layers:
            backbone.model.get_submodule(layer.module_name).register_forward_pre_hook(
                lambda _, args, at=layer.ordinal: calls.append((at, args[0].clone(), args[1]))
            )
        runner = StockRunner(backbone)
        for plan in plans([Forced(token_ids(3, 24), (24,))]):
            pool.begin_step()
            runner.run(plan)
            pool.end_step()
    finally:
        pool.close()
    assert all(gates.knows(layer.ordinal) for layer in index.layers)
    found = wanted = 0
    for at, hidden, chosen in calls:
        width = index.layers[at].num_experts
        for row, experts in zip(hidden, chosen.tolist(), strict=True):
            scores = gates.begin(at, row[None])
            if family in NO_GUESS:
                assert scores is None
                continue
            # Llama 4's experts are called once for each of its top_k choices.
            best = as_scores(scores, width).argsort()[::-1][: index.layers[at].top_k]
            found += len(set(best.tolist()) & set(experts))
            wanted += len(experts)
    if family not in NO_GUESS:
        assert found / wanted > (0.6 if family in INEXACT else 0.999)


def test_many_rows_are_one_guess():
    torch.manual_seed(0)
    block = torch.nn.Module()
    block.gate = torch.nn.Linear(8, 6, bias=False)
    block.experts = torch.nn.Module()
    gates = NextGate(block_in_a_model(block), ["layer.experts"], [6], [2])
    hidden = torch.randn(3, 8)
    chosen = {e for row in block.gate(hidden).topk(2).indices.tolist() for e in row}
    scores = as_scores(gates.begin(0, hidden).detach(), 7)
    assert set(scores.argsort()[::-1][: len(chosen)].tolist()) == chosen
    assert scores[6] == -float("inf"), "an expert that the layer has not"
    assert gates.begin(0, torch.randn(5 * MOST_ROWS + 3, 8)).shape == (6,)
    assert gates.begin(0, torch.randn(3, 9)) is None
    assert as_scores(torch.tensor([0.0, float("nan")]), 2) is None


def block_in_a_model(block):
    model = torch.nn.Module()
    model.layer = block
    return model


def test_a_model_without_a_router_has_no_gate():
    block = torch.nn.Module()
    block.experts = torch.nn.Module()
    gates = NextGate(block_in_a_model(block), ["layer.experts"], [6], [2])
    assert not gates.knows(0)
    assert gates.begin(0, torch.randn(1, 8)) is None
