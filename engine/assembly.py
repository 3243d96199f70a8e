"""What an engine is made of, from its settings: runner, KV pages, batcher and what sizes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.model_shape import ModelShape
from core.objectives import ObjectiveSettings
from engine.backbone import Backbone, has_state_layers
from engine.batch_size import BatchSizer
from engine.batcher import Batcher
from engine.coherent_admission import AdmissionOrder
from engine.expert_demand import ExpertDemand
from engine.kv_pages import KvPages
from engine.limits import Limits, check_memory
from engine.paged_attention import ATTENTION_NAME
from engine.paged_runner import PagedRunner
from engine.prefill_pass import Turns, pass_tokens
from engine.prompt_scores import max_scored_tokens
from engine.settings import EngineSettings
from engine.step_cost import StepCost
from engine.step_forecast import SizeBounds
from engine.stock_runner import StockRunner
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.pool import ExpertPool

_FIRST_TOKENS = 64
"""Of a prompt, by which its experts are foreseen."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """All of it stands around one pool, and is one engine's."""

    eos_ids: tuple[int, ...]
    limits: Limits
    shares_prefixes: bool
    runner: PagedRunner | StockRunner
    pages: KvPages
    sizer: BatchSizer
    batcher: Batcher
    turns: Turns


def assemble(
    index: CheckpointIndex,
    pool: ExpertPool,
    engine: EngineSettings,
    objectives: ObjectiveSettings,
    clock: Callable[[], float],
) -> Assembly:
    """Loads the backbone and reserves pages and scratch.

    Raises CheckpointError, SettingsError or BudgetError.
    """
    shape = index.shape
    backbone = Backbone.open(
        index,
        pool,
        device=engine.device,
        context_tokens=engine.context_tokens,
        attention=None if has_state_layers(index.config) else ATTENTION_NAME,
    )
    size = engine.kv_block_tokens
    blocks = shape.kv_blocks(engine.kv_memory, size, engine.max_sequences, backbone.context_tokens)
    scored = max_scored_tokens(shape.vocab_size, backbone.dtype.itemsize)
    whole_prompts = backbone.whole_prompt_only
    limits = Limits(
        backbone.context_tokens,
        engine.max_sequences,
        blocks,
        size,
        shape.vocab_size,
        scored + 1 if whole_prompts else backbone.context_tokens,
    )
    check_memory(shape, engine, blocks)
    most = pass_tokens(backbone.model, pool, engine.prefill_memory)
    most = min(most, blocks * size)  # no more have keys and values at once
    runner: PagedRunner | StockRunner
    if backbone.state_family:
        runner = StockRunner(backbone)
    else:
        runner = PagedRunner(
            backbone.model, blocks, size, engine.max_step_tokens, engine.scratch_memory, most
        )
    pages = KvPages(blocks, size)
    sizer = make_sizer(shape, engine, objectives, clock)
    batcher = Batcher(
        pages,
        engine.max_sequences,
        engine.max_step_tokens,
        whole_prompts,
        scored,
        pass_tokens=most,
        # A stock cache is one sequence's.
        pass_sequences=1 if backbone.state_family else None,
        sizer=sizer,
        order=make_order(pool, engine, objectives, clock),
    )
    return Assembly(
        eos_ids=backbone.eos_ids,
        limits=limits,
        shares_prefixes=not backbone.state_family,
        runner=runner,
        pages=pages,
        sizer=sizer,
        batcher=batcher,
        turns=Turns(runner, batcher),
    )


def make_sizer(
    shape: ModelShape,
    engine: EngineSettings,
    objectives: ObjectiveSettings,
    clock: Callable[[], float],
) -> BatchSizer:
    """What sizes the batches of a model under these settings."""
    return BatchSizer(
        engine.batching,
        SizeBounds(engine.fewest_sequences, engine.max_sequences, engine.max_step_tokens),
        objectives,
        StepCost(),
        ExpertDemand(
            sum(layer.num_experts for layer in shape.moe_layers),
            sum(layer.top_k for layer in shape.moe_layers),
        ),
        clock,
    )


def make_order(
    pool: ExpertPool,
    engine: EngineSettings,
    objectives: ObjectiveSettings,
    clock: Callable[[], float],
) -> AdmissionOrder | None:
    """Who is admitted next, by what the pool foresees of each request; None: the oldest."""
    if engine.grouping == "off" or engine.max_sequences == 1:
        return None
    return AdmissionOrder(
        lambda request: pool.signature(
            request.domain, request.session, request.prompt_ids[:_FIRST_TOKENS], request.tenant
        ),
        engine.max_overtakes,
        clock,
        engine.grouping,
        objectives.ttft_ms / 1000,
        engine.max_sequences,
    )
