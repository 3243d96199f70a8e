"""What the check before the start says to a reader: the models and their memory."""

from __future__ import annotations

from collections.abc import Sequence

from app.preflight import Preflight, by_device, gpu_ranks
from core.config_model import format_bytes


def describe(plans: Sequence[Preflight]) -> str:
    """Each model and its memory in four lines; of several also what they need together."""
    if len(plans) == 1:
        return _described(plans[0])
    parts = [f"{plan.title}:\n{_described(plan)}" for plan in plans]
    for device, here in by_device(plans):
        if not here[0].is_on_cpu:
            continue
        replicas = sum(plan.replicas for plan in here)
        need = sum(plan.all_need_bytes for plan in here)
        parts.append(
            f"all together: {format_bytes(need)} on {device} for {replicas} replicas, "
            f"{format_bytes(here[0].available_bytes)} available"
        )
    if gpus := gpu_ranks(plans):
        parts.append(f"GPUs: {gpus}, one for each replica")
    return "\n".join(parts)


def _described(plan: Preflight) -> str:
    shape = plan.shape
    layers = shape.moe_layers
    experts = sum(layer.num_experts for layer in layers)
    kinds = dict.fromkeys((layer.num_experts, layer.top_k) for layer in layers)
    each = ", ".join(f"{count} (top {top_k})" for count, top_k in kinds)
    return (
        f"{shape.model_type}: {shape.total_params / 1e6:,.1f} M parameters, a token uses "
        f"{shape.token_activation_ratio:.1%} "
        f"({shape.token_expert_activation_ratio:.1%} of the experts')\n"
        f"experts: {len(layers)} layers of {each}, {format_bytes(shape.all_experts_bytes)}; "
        f"slots for {sum(plan.slots_by_layer)} of {experts}\n"
        f"memory of a replica: {format_bytes(plan.need_bytes)} on {plan.device} "
        f"(slots {format_bytes(plan.slots_bytes)}, other weights "
        f"{format_bytes(shape.backbone_bytes)}, KV {format_bytes(plan.kv_bytes)}, scratch "
        f"{format_bytes(plan.scratch_bytes)}), {format_bytes(plan.available_bytes)} available\n"
        f"host tier: {_host_tier(plan)}"
    )


def _host_tier(plan: Preflight) -> str:
    if plan.slots_bytes >= plan.shape.all_experts_bytes:
        return "not needed; every expert has a slot"
    if not plan.host_bytes:
        return "none; experts that are not in slots are read from disk"
    kind = "page cache" if plan.is_on_cpu else "memory shared by the replicas, kept after them"
    share = plan.host_bytes / plan.shape.all_experts_bytes
    return f"{format_bytes(plan.host_bytes)} of {kind}, {share:.0%} of the experts"
