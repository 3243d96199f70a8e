"""What belongs to one model of the service: its small files, and its groups of replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from deployments.openai_logprobs import Json
from deployments.output_formats import OutputFormats
from deployments.replica_group import ReplicaGroup
from deployments.settings import ServingSettings
from deployments.text_threads import TextThreads
from deployments.tokenizer_worker import TokenizerWorker
from engine.sampling_defaults import sampling_defaults


class ServedModel:
    """A model under the name that clients use, in one gateway process."""

    def __init__(
        self,
        name: str,
        model_dir: Path,
        serving: ServingSettings,
        groups: Sequence[ReplicaGroup],
        threads: TextThreads,
    ) -> None:
        """Raises SettingsError and CheckpointError."""
        self.name = name
        self.groups = {group.name: group for group in groups}
        self.tokenizer = TokenizerWorker.open(model_dir, threads)
        self.formats = OutputFormats.open(model_dir, serving)
        self.defaults = sampling_defaults(model_dir)
        """What the model's authors say of sampling, for fields that a request leaves out."""

    @property
    def any_group(self) -> ReplicaGroup:
        """For what all of them answer alike."""
        return self.group_for(tuple(self.groups))

    def group_for(self, names: Sequence[str]) -> ReplicaGroup:
        """Of these groups the least loaded one, which is none that failed just now if possible."""
        return min((self.groups[name] for name in names), key=lambda group: group.load.reluctance)

    async def ready(self) -> Json:
        """{ready, replicas, ready_replicas} of all groups; each group's own where it has a name."""
        parts = await asyncio.gather(*(group.ready() for group in self.groups.values()))
        by_group = dict(zip(self.groups, parts, strict=True))
        if by_group.keys() == {""}:
            return by_group[""]
        return {**summed(list(by_group.values())), "groups": by_group}


def summed(parts: list[Json]) -> Json:
    """The readiness of several: of all only where each is."""
    return {
        "ready": all(part["ready"] for part in parts),
        "replicas": sum(part.get("replicas", 0) for part in parts),
        "ready_replicas": sum(part.get("ready_replicas", 0) for part in parts),
    }
