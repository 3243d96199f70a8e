"""The small files of a model folder that serving reads: tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from core.errors import CheckpointError
from core.json_file import read_json_object
from engine.token_pieces import TokenizerPieces

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def open_tokenizer(model_dir: Path) -> Tokenizer:
    """The folder's tokenizer.json, without truncation or padding. Raises CheckpointError."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"expected a tokenizer.json in {model_dir}, found none; save the tokenizer with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) to make one"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any fault in the file
        raise CheckpointError(f"{path} is not readable as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def open_pieces(model_dir: Path) -> TokenizerPieces:
    """The bytes of each token of the folder's tokenizer. Raises CheckpointError."""
    return TokenizerPieces.open(model_dir / "tokenizer.json", open_tokenizer(model_dir))


def chat_template(model_dir: Path) -> str | None:
    """The default chat template's source, None where the model has none. Raises CheckpointError."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"Cannot read {path}: {error}.") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json_object(model_dir / name).get("chat_template")
        if isinstance(template, str):
            return template
        if isinstance(template, list):  # older files name several
            for entry in template:
                if isinstance(entry, dict) and entry.get("name") == "default":
                    return str(entry.get("template", ""))
    return None


def special_tokens(model_dir: Path) -> dict[str, str]:
    """bos_token and the like, which templates may print."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_json_object(model_dir / name)
        for key in _SPECIAL_NAMES:
            value = config.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found
