"""Llama 4 text: the family whose experts lie outside transformers' experts interface.

Stock runs every expert over every token and multiplies the *input* of an expert by the sigmoid of
its router logit (Llama4TextMoe). The shim runs only the chosen experts: it calls the experts
function once for each of the top_k choices, with inputs scaled by that choice's score and weights
of one. A call keeps one row for each token, so that rows mean tokens to whoever serves it.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe


class Llama4PooledExperts(Llama4TextExperts):
    """The stock experts' parameters behind the attributes and call of the experts interface."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.config = config
        self.has_gate = True
        self.has_bias = False
        self.has_post_expert_norm = False
        self.is_transposed = True
        self.is_concatenated = True
        self._is_expert_parallel = False

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Dispatches to the registered experts function: [T,H], [T,K], [T,K] -> [T,H]."""
        function = ALL_EXPERTS_FUNCTIONS[self.config._experts_implementation]
        return function(self, hidden, top_k_index, top_k_weights)


class Llama4PooledMoe(Llama4TextMoe):
    """Llama4TextMoe that runs only the experts that a token's router chose."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., H] -> ([T, H], router logits [T, E]), as stock."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(hidden_states, self.router.weight)
        top_logits, top_index = torch.topk(logits, self.router.top_k, dim=1)
        scores = torch.sigmoid(top_logits.float()).to(logits.dtype)
        ones = torch.ones_like(scores[:, :1])
        routed = [
            self.experts(hidden_states * scores[:, k : k + 1], top_index[:, k : k + 1], ones)
            for k in range(self.router.top_k)
        ]
        out = self.shared_expert(hidden_states)
        out.add_(torch.stack(routed).sum(dim=0))
        return out, logits


def install(model: PreTrainedModel) -> None:
    """Puts the shim into every Llama4TextMoe of `model`, in place; others are left alone."""
    for module in model.modules():
        if type(module) is not Llama4TextMoe:
            continue
        stock = module.experts
        weight = stock.gate_up_proj
        with torch.device(weight.device):
            pooled = Llama4PooledExperts(model.config.get_text_config())
        for name, parameter in stock.named_parameters(recurse=False):
            setattr(pooled, name, parameter)
        module.experts = pooled
        module.__class__ = Llama4PooledMoe
