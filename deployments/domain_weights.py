"""The file of a domain classifier: safetensors, its metadata saying how texts become numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from core.errors import CoterieError
from core.whole_file import write_whole
from deployments.domain_settings import LABEL_PATTERN, UNKNOWN
from deployments.ngram_features import NgramFeatures

FORMAT = "coterie domain classifier"
VERSION = 1
BUNDLED = Path(__file__).parent / "domains" / "nine.safetensors"
LABEL = re.compile(LABEL_PATTERN)

_MAX_FILE_BYTES = 256 * 1024**2
_MAX_LABELS = 256
_SHOWN_CHARS = 200
_AGAIN = "Make it again with `coterie domains train`, or set domains.classifier to another file."


class DomainWeightsError(CoterieError):
    """A file of weights is missing, of another version, or damaged; the message says which."""


@dataclass(frozen=True, slots=True, eq=False)
class DomainWeights:
    """A trained classifier, as it lies in its file."""

    labels: tuple[str, ...]
    """Sorted; the last row of `weights` and `bias` belongs to none of them."""
    features: NgramFeatures
    weights: NDArray[np.float16]
    """[labels + 1, buckets]"""
    bias: NDArray[np.float32]
    """[labels + 1]"""
    temperature: float
    """What scores are divided by, so that a probability of 0.9 is right nine times of ten."""
    threshold: float
    """A probability below this is no guess."""
    facts: str = ""
    """What it was trained on and how well it did, for people."""

    def write(self, path: Path) -> None:
        """The file, whole or not at all. Raises OSError."""
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "labels": json.dumps(self.labels),
            "hash_seed": str(self.features.seed),
            "buckets": str(self.features.buckets),
            "char_orders": json.dumps(self.features.char_orders),
            "word_orders": json.dumps(self.features.word_orders),
            "head_chars": str(self.features.head_chars),
            "tail_chars": str(self.features.tail_chars),
            "temperature": repr(self.temperature),
            "threshold": repr(self.threshold),
            "facts": self.facts,
        }
        # The library writes memory as it lies, whatever the strides say.
        tensors = {"weights": self.weights, "bias": self.bias}
        data = save({name: np.ascontiguousarray(x) for name, x in tensors.items()}, metadata)
        data = _sorted_header(data)
        write_whole(path, lambda stream: stream.write(data), mode=0o644)

    @classmethod
    def read(cls, path: Path) -> DomainWeights:
        """Raises DomainWeightsError."""
        try:
            found = path.stat()
            if not S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
                what = f"{found.st_size} bytes" if S_ISREG(found.st_mode) else "something else"
                raise DomainWeightsError(
                    f"{path}: expected a file of at most {_MAX_FILE_BYTES} bytes, found {what}. "
                    f"{_AGAIN}"
                )
            data = path.read_bytes()
        # A path that no file can have is a ValueError.
        except (OSError, ValueError) as error:
            raise DomainWeightsError(
                f"{path}: expected the weights of a domain classifier, found "
                f"{getattr(error, 'strerror', None) or error}. {_AGAIN}"
            ) from error
        try:
            return _parse(data)
        except KeyError as error:
            raise DomainWeightsError(f"{path}: expected {error}, found none. {_AGAIN}") from error
        # Brackets in brackets without end are a RecursionError.
        except (ValueError, RecursionError, SafetensorError) as error:
            raise DomainWeightsError(f"{path}: {error}. {_AGAIN}") from error


def _parse(data: bytes) -> DomainWeights:
    """Raises ValueError, KeyError, RecursionError and SafetensorError."""
    metadata = _metadata(data)
    if metadata.get("format") != FORMAT or metadata.get("version") != str(VERSION):
        raise ValueError(
            f'expected "{FORMAT}" of version {VERSION}, found {metadata.get("format")!r} of '
            f"version {metadata.get('version')!r}"
        )
    labels = json.loads(metadata["labels"])
    is_list = isinstance(labels, list) and 2 <= len(labels) <= _MAX_LABELS
    if not is_list or not all(isinstance(x, str) and LABEL.fullmatch(x) for x in labels):
        shown = str(labels)[:_SHOWN_CHARS]
        raise ValueError(f"expected 2 to {_MAX_LABELS} labels of a-z, 0-9, _ and -, found {shown}")
    if labels != sorted(set(labels)) or UNKNOWN in labels:
        shown = str(labels)[:_SHOWN_CHARS]
        raise ValueError(f'expected different labels, sorted, none "{UNKNOWN}", found {shown}')
    features = NgramFeatures(
        seed=int(metadata["hash_seed"]),
        buckets=int(metadata["buckets"]),
        char_orders=_orders(metadata, "char_orders"),
        word_orders=_orders(metadata, "word_orders"),
        head_chars=int(metadata["head_chars"]),
        tail_chars=int(metadata["tail_chars"]),
    )
    temperature, threshold = float(metadata["temperature"]), float(metadata["threshold"])
    if not (0.01 <= temperature <= 100.0 and 0.0 <= threshold < 1.0):
        raise ValueError(
            "expected a temperature from 0.01 to 100 and a threshold from 0 to 1, found "
            f"{temperature} and {threshold}"
        )
    tensors = load(data)
    for name, dtype, shape in (
        ("weights", np.float16, (len(labels) + 1, features.buckets)),
        ("bias", np.float32, (len(labels) + 1,)),
    ):
        found = tensors[name]
        if found.dtype != dtype or found.shape != shape:
            raise ValueError(
                f"expected {name} of {np.dtype(dtype)} {shape}, found {found.dtype} {found.shape}"
            )
        if not np.isfinite(found).all():
            raise ValueError(f"expected finite {name}, found NaN or infinity")
    return DomainWeights(
        labels=tuple(labels),
        features=features,
        weights=tensors["weights"],
        bias=tensors["bias"],
        temperature=temperature,
        threshold=threshold,
        facts=metadata.get("facts", ""),
    )


def _orders(metadata: Mapping[str, str], name: str) -> tuple[int, ...]:
    orders = json.loads(metadata[name])
    if not isinstance(orders, list) or not all(type(order) is int for order in orders):
        raise ValueError(f"expected whole numbers as {name}, found {metadata[name][:_SHOWN_CHARS]}")
    return tuple(orders)


def _sorted_header(data: bytes) -> bytes:
    """The same file with its header in one order: the library shuffles it at every writing."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _metadata(data: bytes) -> Mapping[str, str]:
    """The texts in the header; the library gives them only of files that it maps."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("expected a safetensors file, found something else or a part of one")
    header: Any = json.loads(data[8 : 8 + size])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise ValueError("expected a safetensors file with metadata, found none")
    return metadata
