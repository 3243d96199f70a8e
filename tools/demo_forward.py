"""A lean training forward pass for Qwen3-MoE on one CPU thread.

It reads the parameters of a ``Qwen3MoeForCausalLM`` and computes the same function as the
library's own forward. The three costly parts have hand-written gradients: the experts (tokens
sorted by expert, one pass each way, no padding), RMS norm, and the output layer with its
cross entropy (in slices that stay in cache; the full logits never exist).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

SLICE = 256
"""Tokens whose logits are held at a time in the loss."""


class Experts(torch.autograd.Function):
    """Sum over each token's chosen experts of weight times SwiGLU output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """x: tokens x hidden; weight, chosen: tokens x k; gate_up: experts x 2i x hidden."""
        tokens, k = chosen.shape
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=gate_up.shape[0]).tolist()
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        rows = x.index_select(0, order // k)
        scale = weight.reshape(-1).index_select(0, order)[:, None]
        inner = x.new_empty(order.numel(), gate_up.shape[1])
        half = gate_up.shape[1] // 2
        out = x.new_empty(order.numel(), x.shape[1])
        begin = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            piece = slice(begin, begin + count)
            torch.mm(rows[piece], gate_up[expert].t(), out=inner[piece])
            act = F.silu(inner[piece, :half]).mul_(inner[piece, half:]).mul_(scale[piece])
            torch.mm(act, down[expert].t(), out=out[piece])
            begin += count
        ctx.save_for_backward(rows, inner, scale, order, inverse, gate_up, down)
        ctx.counts = counts
        return out.index_select(0, inverse).view(tokens, k, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight, gate_up and down."""
        rows, inner, scale, order, inverse, gate_up, down = ctx.saved_tensors
        k = order.numel() // grad.shape[0]
        half = gate_up.shape[1] // 2
        grad_out = grad.index_select(0, order // k)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        grad_rows = torch.empty_like(rows)
        grad_scale = torch.empty_like(scale)
        begin = 0
        for expert, count in enumerate(ctx.counts):
            if not count:
                continue
            piece = slice(begin, begin + count)
            gate, up = inner[piece, :half], inner[piece, half:]
            sigmoid = gate.sigmoid()
            silu = gate * sigmoid
            act = silu * up
            grad_act = grad_out[piece] @ down[expert]
            torch.sum(grad_act * act, 1, keepdim=True, out=grad_scale[piece])
            torch.mm(grad_out[piece].t(), act.mul_(scale[piece]), out=grad_down[expert])
            grad_act.mul_(scale[piece])
            grad_inner = torch.empty_like(inner[piece])
            torch.mul(grad_act, silu, out=grad_inner[:, half:])
            slope = sigmoid.add_(silu).sub_(silu * (sigmoid - silu))
            torch.mul(grad_act.mul_(up), slope, out=grad_inner[:, :half])
            torch.mm(grad_inner.t(), rows[piece], out=grad_gate_up[expert])
            torch.mm(grad_inner, gate_up[expert], out=grad_rows[piece])
            begin += count
        grad_x = grad_rows.index_select(0, inverse).view(grad.shape[0], k, -1).sum(1)
        grad_weight = grad_scale.index_select(0, inverse).view(-1, k)
        return grad_x, grad_weight, None, grad_gate_up, grad_down


class Norm(torch.autograd.Function):
    """RMS norm over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise x and scale it by weight."""
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse.div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and weight."""
        unit, inverse, weight = ctx.saved_tensors
        product = grad * unit
        grad_weight = product.reshape(-1, product.shape[-1]).sum(0)
        mean = (product @ weight)[..., None].div_(unit.shape[-1])
        grad_x = (grad * weight).addcmul_(unit, mean, value=-1).mul_(inverse)
        return grad_x, grad_weight, None


class OutputLoss(torch.autograd.Function):
    """Mean cross entropy (nats a token) of the output layer, gradients made on the way."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
        """hidden: tokens x width; head: vocabulary x width; target: token ids."""
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        total = 0.0
        count = hidden.shape[0]
        for begin in range(0, count, SLICE):
            piece = slice(begin, min(begin + SLICE, count))
            logs = torch.log_softmax(hidden[piece] @ head.t(), 1)
            wanted = target[piece, None]
            total -= float(logs.gather(1, wanted).sum())
            probs = logs.exp_()
            probs.scatter_add_(1, wanted, probs.new_full(wanted.shape, -1.0))
            torch.mm(probs, head, out=grad_hidden[piece])
            grad_head.addmm_(probs.t(), hidden[piece])
        ctx.save_for_backward(grad_hidden.div_(count), grad_head.div_(count))
        return hidden.new_tensor(total / count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and head, already known."""
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None


@dataclass
class Losses:
    """The parts of one batch's loss; the first is in nats a token."""

    token: Tensor
    balance: Tensor
    domain: Tensor
    load: Tensor
    """Layers x experts: share of the batch's expert choices."""


def rotary(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each length x head_dim, in the library's half-split layout."""
    speeds = theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length).float(), speeds)
    return torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin()


def _call(function: Any, *values: Any) -> Tensor:
    out: Tensor = function.apply(*values)
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _attention(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    attn = layer.self_attn
    rows, length, _ = x.shape
    q = attn.q_proj(x).view(rows, length, -1, attn.head_dim)
    k = attn.k_proj(x).view(rows, length, -1, attn.head_dim)
    v = attn.v_proj(x).view(rows, length, -1, attn.head_dim)
    q = _turn(_call(Norm, q, attn.q_norm.weight, eps), cos, sin)
    k = _turn(_call(Norm, k, attn.k_norm.weight, eps), cos, sin)
    groups = attn.num_key_value_groups
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    out: Tensor = attn.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
    return out


def losses(model: Qwen3MoeForCausalLM, ids: Tensor, target: Tensor, domain: Tensor) -> Losses:
    """Losses of a batch. ids, target: rows x length; domain: one small number a row.

    ``balance`` is experts x sum of (share of choices x mean probability), 1 at best.
    ``domain`` is minus the mutual information (nats) of expert and domain over the batch.
    """
    config = model.config
    eps = config.rms_norm_eps
    experts = config.num_experts
    cos, sin = rotary(ids.shape[1], config.head_dim, config.rope_parameters["rope_theta"])
    cos, sin = cos[:, None], sin[:, None]
    x = F.embedding(ids, model.model.embed_tokens.weight)
    kinds, rows_of = torch.unique(domain, return_inverse=True)
    share = torch.bincount(rows_of).float() / len(domain)
    member = F.one_hot(rows_of, len(kinds)).float()
    member = member / member.sum(0)
    balance, mutual, load = x.new_zeros(()), x.new_zeros(()), []
    for layer in model.model.layers:
        normed = _call(Norm, x, layer.input_layernorm.weight, eps)
        x = x + _attention(layer, normed, cos, sin, eps)
        flat = _call(Norm, x, layer.post_attention_layernorm.weight, eps).view(-1, x.shape[-1])
        probs = (flat @ layer.mlp.gate.weight.t()).softmax(-1)
        weight, chosen = probs.topk(config.num_experts_per_tok, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        mlp = layer.mlp.experts
        out = _call(Experts, flat, weight, chosen, mlp.gate_up_proj, mlp.down_proj)
        x = x + out.view_as(x)
        used = torch.bincount(chosen.reshape(-1), minlength=experts).float() / chosen.numel()
        per_row = probs.view(*ids.shape, experts).mean(1)
        mean = per_row.mean(0)
        balance = balance + experts * (used * mean).sum()
        by_domain = member.t() @ per_row
        gain = (by_domain * (by_domain / mean).log()).sum(1)
        mutual = mutual + (gain * share).sum()
        load.append(used)
    hidden = _call(Norm, x, model.model.norm.weight, eps).view(-1, x.shape[-1])
    token = _call(OutputLoss, hidden, model.lm_head.weight, target.reshape(-1))
    layers = len(load)
    return Losses(token, balance / layers, -mutual / layers, torch.stack(load))
