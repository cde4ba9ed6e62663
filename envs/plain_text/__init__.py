"""Text to token ids: only the chat template writes control tokens, and each piece of text is encoded once."""

from envs.plain_text.encoding import LONG_CHARS, MAX_CACHED_CHARS, PlainText, TemplateText

__all__ = ["LONG_CHARS", "MAX_CACHED_CHARS", "PlainText", "TemplateText"]
