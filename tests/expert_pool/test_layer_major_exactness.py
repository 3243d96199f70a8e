"""Exactness level R where prompts pass layer by layer: the plan says so, nothing else matters."""

import functools
import logging
import shutil
import tempfile
from pathlib import Path

import pytest

from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.host_tier import HostTier
from tests.expert_pool.native_layers import kernels_or_skip
from tests.expert_pool.plan_log import PlanLog, record, replay
from tests.models.families import make_checkpoint

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"
MODELS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "demo")


@pytest.fixture(autouse=True)
def quiet_readers(caplog):
    """Many reads fail here, on purpose."""
    caplog.set_level(logging.ERROR, logger="expert_pool.store")


@pytest.fixture(scope="module")
def logs():
    with tempfile.TemporaryDirectory(prefix="coterie-replay-") as folder:

        @functools.cache
        def log_of(model: str, dtype: str, kernel: str = "torch") -> PlanLog:
            source = DEMO_MODEL
            if model != "demo":
                source = make_checkpoint(model, Path(folder) / "made", dtype)
            path = Path(folder) / f"{model}-{dtype}-{kernel}"
            shutil.copytree(source, path, ignore=shutil.ignore_patterns(".coterie"))
            least = CheckpointIndex.open(path, dtype).shape.min_slots_bytes
            return record(path, dtype, expert_memory=least, kernel=kernel)

        yield log_of


@pytest.mark.parametrize(
    ("model", "dtype", "kernel"),
    [
        *((model, dtype, "torch") for dtype in ("float32", "bfloat16") for model in MODELS),
        *((model, "bfloat16", "native") for model in ("qwen3_moe", "gpt_oss", "llama4_text")),
    ],
)
def test_logits_of_a_pass_are_bitwise_equal_wherever_experts_lie(
    logs, tmp_path, model, dtype, kernel
):
    if kernel == "native":
        kernels_or_skip()
    log = logs(model, dtype, kernel)
    passes = [plan for plan in log.plans if plan.layer_major]
    assert passes and len(passes) < len(log.plans)
    assert max(plan.num_tokens for plan in passes) > 14
    # Seeds draw few slots, some, or a slot for every expert.
    assert replay(log, seed=0, fuzz=False).hashes == log.hashes
    for seed in range(2):
        assert replay(log, seed).hashes == log.hashes, f"seed {seed}"
    # Half of the experts in a host tier, and a second arena as the device.
    half = log.index.shape.all_experts_bytes // 2
    for seed in range(2, 4):
        tier = HostTier(log.index, dtype, half, tmp_path)
        disturbed = replay(log, seed, host_tier=tier)
        assert disturbed.hashes == log.hashes, f"seed {seed}"
        assert sum(stats.host_records for stats in disturbed.stats) > 0
