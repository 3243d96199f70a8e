"""From what a user calls a model to the folder it lies in. Downloads only when asked."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from core.errors import CheckpointError

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.*"]
_UNWANTED = ["*/*", "consolidated*"]
"""Copies of the weights in other layouts, which some repositories hold beside the usual one."""


def locate(model: str, download: bool = False) -> Path:
    """The folder of `model`: a folder, or a Hugging Face Hub id such as "Qwen/Qwen3-30B-A3B".

    A hub id is looked up in the local cache; with `download` it is fetched or completed there
    first (safetensors, configuration and tokenizer files only; HF_ENDPOINT is honoured). Raises
    CheckpointError saying what to do.
    """
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder
    if model and folder.exists():
        raise CheckpointError(f"{folder} is a file; expected the folder that holds the model.")
    if not _is_hub_id(model):
        raise CheckpointError(f"Expected a model folder at {model!r}, found none.")
    try:
        return Path(
            snapshot_download(
                model,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=not download,
            )
        )
    except IncompleteSnapshotError as error:
        raise CheckpointError(
            f"{model} is only partly in the Hugging Face cache ({error}). Run again with "
            "--download to complete it."
        ) from error
    except LocalEntryNotFoundError as error:
        if download:
            raise CheckpointError(f"{model} could not be fetched: {error}") from error
        raise CheckpointError(
            f"There is no folder {model!r}, and no such model in the Hugging Face cache. Give the "
            "path of a model folder, or fetch it from the hub: coterie serve, chat and verify take "
            "--download."
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{model} is gated: accept its terms on the hub and log in with `hf auth login`. "
            f"({error})"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"The hub knows no model {model!r}, or it is private and you are not logged in. "
            f"({error})"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"{model} could not be fetched: {error}") from error


def _is_hub_id(model: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model) is not None
