"""Seeded documents of domains that use different experts, and seeded arrivals."""

import numpy as np

from app.load.arrivals import Arrival
from benchmarks.routed_requests import Document

LAYERS, EXPERTS, TOP_K = 2, 32, 4


def synthetic_documents(domains=4, documents=12, rows=48, strength=2.0, seed=0):
    """`documents` of each domain; `strength` is how much a domain decides, against chance."""
    draw = np.random.default_rng(seed)
    found = []
    for domain in range(domains):
        taste = strength * draw.standard_normal((LAYERS, EXPERTS))
        for number in range(documents):
            noise = draw.gumbel(size=(rows, LAYERS, EXPERTS))
            ids = np.sort(np.argsort(-(taste + noise), axis=2)[:, :, :TOP_K], axis=2)
            name = f"domain-{domain}"
            found.append(Document(f"{name}-{number}", name, ids))
    return found


def synthetic_arrivals(number, seed=0):
    """Bursts and pauses, answers of 16 to 48 rows."""
    draw = np.random.default_rng(seed)
    gaps = draw.exponential(1.0, number) * draw.choice([0.5, 2.0], number)
    times = np.cumsum(gaps) - gaps[0]
    lengths = draw.integers(16, 49, number)
    return [
        Arrival(float(at_s), 8, int(length)) for at_s, length in zip(times, lengths, strict=True)
    ]
