"""Text to token ids: only the chat template writes control tokens, and each piece of text is encoded once."""

from envs.plain_text.encoding import LONG_CHARS, LONGEST_KEPT, PlainText, TemplateText

__all__ = ["LONGEST_KEPT", "LONG_CHARS", "PlainText", "TemplateText"]
