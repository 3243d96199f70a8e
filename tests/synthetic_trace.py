"""A seeded routing trace with the habits of real ones; small enough for a test.

A hidden state of a few dimensions moves through all layers: where a document lies (its topic), a
part that wanders from token to token, and the token's kind, which often repeats that of an earlier
one. Routers project it on experts, so layers and tokens predict each other; experts differ in
popularity for ever; the rest is noise. The router takes the top k.
"""

import numpy as np

from expert_pool.routing_trace import RoutingTrace


def synthetic_trace(
    tokens=900,
    layers=4,
    experts=64,
    top_k=6,
    seed=0,
    document_tokens=90,
    dimensions=12,
    kinds=40,
    topic=0.6,
    memory=0.7,
    noise=0.3,
):
    """A RoutingTrace; the same for the same arguments.

    `topic` is the part of the hidden state that a document fixes; `memory` is how much of the
    wandering part, and how likely the recent kinds, carry over to the next token.
    """
    draw = np.random.default_rng(seed)
    popularity = 0.5 * draw.standard_normal((layers, experts))
    routers = draw.standard_normal((layers, experts, dimensions)) / np.sqrt(dimensions)
    state_of_kind = draw.standard_normal((kinds, dimensions))
    common = draw.zipf(1.5, size=kinds).clip(max=50).astype(float)
    offsets = np.arange(0, tokens, document_tokens)
    ids = np.empty((tokens, layers, top_k), dtype=np.int64)
    recent: list[int] = []
    wandering = np.zeros(dimensions)
    for token in range(tokens):
        if token % document_tokens == 0:
            place = draw.standard_normal(dimensions)
            likely = common * np.exp(state_of_kind @ place / np.sqrt(dimensions))
            likely /= likely.sum()
            recent = []
        if recent and draw.random() < memory / 2:
            kind = recent[-1 - draw.integers(min(len(recent), 8))]
        else:
            kind = draw.choice(kinds, p=likely)
        recent.append(kind)
        fresh = np.sqrt(1 - memory**2) * draw.standard_normal(dimensions)
        wandering = memory * wandering + fresh
        state = topic * place + 0.6 * wandering + 0.8 * state_of_kind[kind]
        logits = popularity + 2.0 * (routers @ state)
        logits = logits + noise * draw.gumbel(size=logits.shape)
        ids[token] = np.argsort(-logits, axis=1)[:, :top_k]
    return RoutingTrace.of(f"synthetic-{seed}", ids, experts, offsets)
