"""Loads a checkpoint's image processor, even if AutoProcessor fails because torchvision is not installed."""

import importlib
import json
from pathlib import Path
from typing import Any

from rollout.errors import EncodingError

QWEN_PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
NAMES_ONLY = frozenset({"image_processor_type", "processor_class", "feature_extractor_type", "auto_map"})


def load_processor(path: str) -> Any | None:
    """Load a checkpoint's processor; None for a text-only checkpoint, EncodingError if it cannot be loaded.

    Without torchvision, which AutoProcessor needs for Qwen's videos, it is built here, for images only.
    """
    whole = json.loads(_read(path, "processor_config.json") or "{}")
    settings = json.loads(_read(path, "preprocessor_config.json") or "null") or whole.get("image_processor")
    if settings is None:
        return None
    from transformers.models.auto.processing_auto import AutoProcessor
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=True)
        if hasattr(processor, "image_processor"):
            return processor
        failure: Exception = TypeError(f"AutoProcessor returned a {type(processor).__name__}")
    except (ImportError, OSError, ValueError, TypeError, AttributeError) as error:
        failure = error
    name = whole.get("processor_class") or settings.get("processor_class")
    if name not in QWEN_PROCESSORS:
        raise EncodingError(f"the image processor of {path} ({name}) cannot be loaded: {failure}") from failure
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    old_template = json.loads(_read(path, "chat_template.json") or "{}").get("chat_template")
    return build_qwen_processor(name, tokenizer, settings, _read(path, "chat_template.jinja") or old_template)


def build_qwen_processor(name: str, tokenizer: Any, settings: dict[str, Any], template: str | None) -> Any:
    """Build a Qwen processor for images only; `settings` are the contents of `preprocessor_config.json`."""
    transformers: Any = importlib.import_module("transformers")

    slow = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    base = getattr(transformers, name)
    images_only = type(name, (base,), {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])})
    image_processor = slow(**{k: v for k, v in settings.items() if k not in NAMES_ONLY})
    return images_only(
        image_processor=image_processor, tokenizer=tokenizer, chat_template=template or tokenizer.chat_template
    )


def _read(path: str, name: str) -> str | None:
    """The text of a file of the checkpoint, a folder or a name on the hub; None if there is none."""
    from transformers.utils.hub import cached_file

    found = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found).read_text(encoding="utf-8")
