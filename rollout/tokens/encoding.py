"""Messages to token ids: each message becomes tokens once, and the model's own tokens are never encoded again.

Promises: a window prompt equals the one-shot encoding of its conversation with earlier reasoning kept; an appended
prompt keeps every earlier token as it came. Only the template writes control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from envs.plain_text import Frame, PlainText
from rollout.errors import EncodingError
from rollout.tokens.chat_template import GENERATION, START, USER, ChatTemplate, Message
from rollout.tokens.composition import Composer, Part, expanded, unexpanded, without_first
from rollout.tokens.images import LARGEST_PIXELS, EncodedImage, ImageEncoder
from rollout.tokens.one_shot import OneShot
from rollout.tokens.processor import load_processor
from rollout.tokens.sanity import SanityCheck, compare
from rollout.tokens.token_prefix import TokenPrefix
from rollout.turn import Generation, ImageChain, Prompt


class DeltaEncoder:
    """Encodes conversations for one tokenizer, template and set of tools; safe to use from several threads.

    Raises:
        EncodingError: at construction, when the template cannot be encoded message by message.
    """

    def __init__(
        self,
        tokenizer: Any,
        processor: Any = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sanity_check: SanityCheck = "strict",
        use_inference_chat_template: bool = False,
        history: Literal["window", "full"] | None = None,
        max_image_pixels: int = LARGEST_PIXELS,
    ) -> None:
        source = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
        if not source:
            raise EncodingError("the tokenizer has no chat template; use an instruct checkpoint or set chat_template")
        self.tokenizer = tokenizer
        self.text = PlainText(tokenizer, source)
        self.template = ChatTemplate(tokenizer, source, tools, chat_template_kwargs or {}, self.text.pattern)
        self.images = _image_encoder(processor, self.text, self.template, max_image_pixels)
        self.one_shot = OneShot(self.template, self.text, self.images, keep_reasoning=not use_inference_chat_template)
        self._composer = Composer(self.template, self.text, self.one_shot)
        self.sanity_check = sanity_check
        self.use_inference_chat_template = use_inference_chat_template
        self.end_of_turn_ids = self._end_of_turn_ids()
        self.placeholder_ids = self.images.placeholder_ids if self.images is not None else ()
        self._forbidden = frozenset(self.placeholder_ids)
        self._harmless = self.text.encode("?")[-1]
        if history == "full":
            self._continuation([USER], seen_tool=False)
        if tools:
            self.template.check_tools(appended=history == "full")

    def _end_of_turn_ids(self) -> tuple[int, ...]:
        """The token that ends an answer in the template, then the tokenizer's own end of sequence."""
        frame = self._composer.frame("assistant", "user")
        if frame is None or frame.ids is None:
            raise EncodingError(
                "no control token of the tokenizer ends an answer in this chat template, so messages cannot be told "
                "apart; use a checkpoint whose tokenizer has the template's markers as special tokens"
            )
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return tuple(dict.fromkeys(i for i in (frame.ids[0], eos) if i is not None))

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The prompt of a conversation that starts here and asks for an answer.

        Raises:
            EncodingError: the template refuses the conversation, or a picture cannot be used.
        """
        messages = self._accepted(messages)
        rendered = lambda: self.one_shot.parts(messages)
        parts = rendered() if self.use_inference_chat_template else self._composer.compose(START, messages, rendered)
        images = [part for part in parts if isinstance(part, EncodedImage)]
        return Prompt(
            token_ids=self.text.join(expanded(parts)),
            image_data=[image.data for image in images],
            train_inputs=ImageChain([image.inputs for image in images]) if images else None,
            engine_ids=self.text.join(unexpanded(parts)) if images else None,
            seen_tool=any(message["role"] == "tool" for message in messages),
        )

    def append(
        self, prompt: Prompt, response_ids: Sequence[int], messages: Sequence[Message]
    ) -> tuple[Prompt, list[int]]:
        """Continue a conversation after the model's own tokens; second value: the tokens after them, all masked.

        Where the answer lacks its end-of-turn token (it ran into its length limit), the token is supplied, masked.

        Raises:
            EncodingError: the template refuses the messages, the mode cannot be appended to, or the answer
                holds a picture's placeholder.
        """
        for token in self.placeholder_ids:
            if token in response_ids:
                raise EncodingError(
                    f"the answer holds the placeholder {self.decode([token])} (token {token}) without a picture; "
                    "forbid it with a logit_bias of -100, or pass the answer through without_placeholders first"
                )
        messages = self._accepted(messages)
        parts = self._continuation(messages, prompt.seen_tool)
        if response_ids and response_ids[-1] == self.end_of_turn_ids[0]:
            parts = without_first(response_ids[-1], parts)
        between = self.text.join(expanded(parts))
        ids = _prefix(prompt.token_ids).extended(response_ids, between)
        seen_tool = prompt.seen_tool or any(m["role"] == "tool" for m in messages)
        images = [part for part in parts if isinstance(part, EncodedImage)]
        if not images and not prompt.image_data:
            return Prompt(token_ids=ids, seen_tool=seen_tool), between
        known = ImageChain([]) if prompt.train_inputs is None else prompt.train_inputs
        for_engine = self.text.join(unexpanded(parts))
        before = prompt.token_ids if prompt.engine_ids is None else prompt.engine_ids
        extended = Prompt(
            token_ids=ids,
            image_data=[*prompt.image_data, *(image.data for image in images)],
            train_inputs=known + ImageChain([image.inputs for image in images]),
            engine_ids=_prefix(before).extended(response_ids, for_engine),
            seen_tool=seen_tool,
        )
        return extended, between

    def _accepted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them.

        With pictures SGLang turns the tokens it is sent into text and back, where a control string in a message
        would become a control token after all; so a VLM's messages get a space into each.
        """
        accepted = self._given(messages)
        if self.images is None:
            return accepted
        return [{k: v if k == "role" else self.text.broken(v) for k, v in m.items()} for m in accepted]

    def _given(self, messages: Sequence[Message]) -> list[Message]:
        return self.template.accepted(messages, as_text=not self.use_inference_chat_template)

    def _continuation(self, messages: Sequence[Message], seen_tool: bool) -> Sequence[Part]:
        """Parts from the end of an answer's text to the start of the next answer."""
        if self.use_inference_chat_template and self.template.drops_reasoning:
            raise EncodingError(
                "the chat template drops earlier reasoning, so with use_inference_chat_template nothing can be "
                "appended to what the model saw; use history: window with it, or leave it false"
            )
        rendered = lambda: self.one_shot.continuation(messages, seen_tool)
        return self._composer.compose("assistant", messages, rendered, seen_tool)

    def check(self, messages: Sequence[Message], token_ids: Sequence[int]) -> None:
        """Compare a conversation's tokens with its one-shot encoding, as `sanity_check` asks.

        `messages` may end with an answer or with what asks for the next one. The model's own way of splitting its
        text into tokens is no difference; anything else is.

        Raises:
            EncodingError: names the first differing token in its context.
        """
        if self.sanity_check == "disable":
            return
        ids = list(token_ids)
        if messages[-1]["role"] == "assistant" and ids[-1:] != [self.end_of_turn_ids[0]]:
            ids.append(self.end_of_turn_ids[0])
        accepted = self._accepted(messages)
        references = self.one_shot.references(accepted)
        if self.images is not None:  # an appended answer keeps the control tokens that the model itself wrote
            given = self._given(messages)
            kept = [g if g["role"] == "assistant" else a for g, a in zip(given, accepted, strict=True)]
            references += self.one_shot.references(kept) if kept != accepted else []
        compare(ids, references, self.text, self._headers(), self.sanity_check)

    def _headers(self) -> list[Frame]:
        frames = (self._composer.frame(left, GENERATION) for left in ("user", "tool", "system"))
        return [frame for frame in frames if frame is not None and frame.ids]

    def without_placeholders(self, generation: Generation) -> Generation:
        """The answer, with a question mark in place of each picture placeholder that the model wrote.

        A placeholder without a picture makes the model's forward pass fail. An altered answer is not trained on, and
        keeps no record of which tokens top-p left in.
        """
        if not self._forbidden.intersection(generation.token_ids):
            return generation
        token_ids = [self._harmless if token in self._forbidden else token for token in generation.token_ids]
        kept = {key: value for key, value in generation.meta_info.items() if "top_p" not in key}
        return replace(
            generation, token_ids=token_ids, text=self.decode(token_ids), meta_info=kept, trained=False
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        return self.text.decode(ids)

    def answer_text(self, response_ids: Sequence[int]) -> str:
        """The answer's text without its end-of-turn token."""
        ids = list(response_ids)
        while ids and ids[-1] in self.end_of_turn_ids:
            ids.pop()
        return self.decode(ids)

    def token_span(self, response_ids: Sequence[int], span: tuple[int, int] | None) -> tuple[int, int] | None:
        """The tokens [start, end) that hold the characters [start, end) of the answer's text."""
        if span is None:
            return None
        first, last = span
        start = self._tokens_within(response_ids, first)
        end = self._tokens_within(response_ids, last)
        covers = len(self.decode(response_ids[:end])) < last and end < len(response_ids)
        return start, max(start, end + covers)

    def _tokens_within(self, ids: Sequence[int], chars: int) -> int:
        """Most leading tokens whose text has at most `chars` characters."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(self.decode(ids[:middle])) <= chars else (low, middle - 1)
        return low


def fits(prompt: Prompt, limit: int) -> bool:
    """Whether the whole prompt has at most `limit` tokens; prompts are never cut, so no picture is ever split."""
    return len(prompt.token_ids) <= limit


def _prefix(ids: Sequence[int]) -> TokenPrefix:
    return ids if isinstance(ids, TokenPrefix) else TokenPrefix(ids)


def _image_encoder(
    processor: Any, text: PlainText, template: ChatTemplate, max_pixels: int
) -> ImageEncoder | None:
    """None without a processor, or where the chat template has no place for pictures."""
    if getattr(processor, "image_processor", None) is None:
        return None
    placeholder = template.image_text()
    return None if placeholder is None else ImageEncoder(processor, text, placeholder, max_pixels)


__all__ = ["DeltaEncoder", "fits", "load_processor"]
