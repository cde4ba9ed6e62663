"""Messages to token ids: each message is encoded once, and the model's own tokens are never
re-encoded.

Only the template writes control tokens.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from envs.plain_text import PlainText, TemplateText
from rollout.errors import EncodingError
from rollout.tokens.accepted import AcceptedMessages
from rollout.tokens.chat_template import (
    GENERATION,
    THOUGHT_END,
    THOUGHT_START,
    ChatTemplate,
    Message,
)
from rollout.tokens.image_files import MAX_PIXELS
from rollout.tokens.images import EncodedImage, ImageEncoder, expanded, unexpanded
from rollout.tokens.one_shot import SanityCheck, compare, references
from rollout.tokens.profile import Profile, learn_profile
from rollout.tokens.reading import Reading, channel_reading, plain_reading
from rollout.tokens.rendering import Renderer
from rollout.tokens.token_prefix import TokenPrefix, token_prefix
from rollout.turn import Generation, ImageChain, Prompt


def choose_template(tokenizer: Any, processor: Any, tools: bool) -> str:
    """Return the checkpoint's chat template, of several the one for tools; raises EncodingError
    without one."""
    source = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        named = source.get("tool_use" if tools else "default") or source.get("default")
        if named is None:
            raise EncodingError(
                f"the checkpoint has chat templates named {', '.join(map(str, source))} but none "
                "named default; set chat_template in its tokenizer_config.json to one of them"
            )
        return named
    if not source:
        raise EncodingError(
            "the tokenizer has no chat template; use an instruct checkpoint or set chat_template"
        )
    return source


class DeltaEncoder:
    """Encodes conversations for one tokenizer, template and set of tools; thread-safe.

    Raises EncodingError at construction if this template's conversations cannot be encoded message
    by message.
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
        max_image_pixels: int = MAX_PIXELS,
        small_images: bool = False,
        generation_config: Mapping[str, Any] | None = None,
        profile: Profile | None = None,
    ) -> None:
        """`profile` is the checkpoint's, if it is known already; otherwise it is learnt."""
        source = choose_template(tokenizer, processor, bool(tools))
        self.tokenizer = tokenizer
        self.text = PlainText(tokenizer, source)
        kwargs = chat_template_kwargs or {}
        self.template = ChatTemplate(tokenizer, source, tools, kwargs, self.text.pattern)
        self.profile = profile or learn_profile(
            tokenizer, self.template, self.text, generation_config or {}
        )
        self.template.names_in_ids = self.profile.names_in_ids
        self._accepts = AcceptedMessages(self.template, self.profile)
        takes_images = getattr(processor, "image_processor", None) is not None
        placeholder = self.template.image_text() if takes_images else None
        self.images = (
            ImageEncoder(processor, self.text, placeholder, max_image_pixels, small_images)
            if placeholder
            else None
        )
        keeps = not use_inference_chat_template
        self._renderer = Renderer(
            self.template, self.profile, self.text, self.images, keep_thoughts=keeps
        )
        self.sanity_check: SanityCheck = sanity_check
        self.use_inference_chat_template = use_inference_chat_template
        self.end_of_turn_ids = self.profile.stop_ids
        """The tokens that end a response, the template's own first."""
        self.placeholder_ids = self.images.placeholder_ids if self.images is not None else ()
        if tools:
            self.template.check_tools(appended=history == "full")
            if not self.profile.reads_calls:
                raise EncodingError(
                    "the chat template shows tools, but a call that it writes cannot be read "
                    "back, so no call of the model could be run; describe the tools in the prompt "
                    "(tools_in: prompt), or set another chat template"
                )

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Encode a new conversation; raises EncodingError if the template rejects it or an image is
        unusable."""
        messages = self._accepted(messages)
        parts = (
            self._renderer.whole if self.use_inference_chat_template else self._renderer.parts
        )(messages)
        images = [part for part in parts if isinstance(part, EncodedImage)]
        return Prompt(
            token_ids=TokenPrefix(self.text.join(expanded(parts))),
            image_data=[image.data for image in images],
            train_inputs=ImageChain([image.inputs for image in images]) if images else None,
            engine_ids=self.text.join(unexpanded(parts)) if images else None,
            seen_tool=any(message["role"] == "tool" for message in messages),
        )

    def append(
        self,
        prompt: Prompt,
        response_ids: Sequence[int],
        messages: Sequence[Message],
        stop_id: int | None = None,
    ) -> Prompt:
        """Continue a conversation after the model's own tokens, with the end-of-turn token if the
        response lacks it.

        Args:
            stop_id: the token that ended the response, if it is known and the profile may not know
                it.

        Raises EncodingError if the template does not allow it.
        """
        messages = self._accepted(messages, appended=True)
        parts = self._renderer.parts(messages, tools=False, seen_tool=prompt.seen_tool)
        ended = self.end_of(response_ids, stop_id)
        if ended is None and (close := self._close_of(self.decode(response_ids))):
            parts = [close, *parts]
        between = self._joined(expanded(parts), ended)
        ids = token_prefix(prompt.token_ids).extended(response_ids, between)
        seen_tool = prompt.seen_tool or any(m["role"] == "tool" for m in messages)
        images = [part for part in parts if isinstance(part, EncodedImage)]
        if not images and not prompt.image_data:
            return Prompt(token_ids=ids, seen_tool=seen_tool)
        known = ImageChain([]) if prompt.train_inputs is None else prompt.train_inputs
        for_engine = self._joined(unexpanded(parts), ended)
        before = prompt.token_ids if prompt.engine_ids is None else prompt.engine_ids
        return Prompt(
            token_ids=ids,
            image_data=[*prompt.image_data, *(image.data for image in images)],
            train_inputs=known + ImageChain([image.inputs for image in images]),
            engine_ids=token_prefix(before).extended(response_ids, for_engine),
            seen_tool=seen_tool,
        )

    def end_of(self, response_ids: Sequence[int], stop_id: int | None) -> int | None:
        """The token that ended the response, of the profile's or the control token `stop_id`; None
        if it was cut."""
        last = response_ids[-1] if response_ids else None
        named = last is not None and last == stop_id and last in self.text.control_ids
        return last if named or last in self.end_of_turn_ids else None

    def _joined(self, parts: Sequence[TemplateText | str], ended: int | None) -> list[int]:
        """The ids of the parts, without the end of the turn if the response has one already."""
        ids = self.text.join(parts)
        if ended is None:
            return ids
        at = next((i for i, token in enumerate(ids) if token in self.text.control_ids), None)
        if at is None:
            return ids
        profile = self.profile
        is_end = ids[at] == ended or (ids[at] == profile.end_of_turn and not profile.ends_by_role)
        return ids[at + 1 :] if is_end else ids

    def _accepted(self, messages: Sequence[Message], *, appended: bool = False) -> list[Message]:
        """Return the messages in the form that the template accepts."""
        accepted = self._accepts(
            messages, as_text=not self.use_inference_chat_template, appended=appended
        )
        if self.images is None:
            if any(isinstance(message["content"], list) for message in accepted):
                no_processor = "a message has a picture, but the checkpoint has no image processor"
                raise EncodingError(f"{no_processor}; use a vision-language model")
            return accepted
        # SGLang encodes the text of prompts with images again, so control strings get a space.
        return [
            {k: v if k == "role" else self.text.defused(v) for k, v in m.items()} for m in accepted
        ]

    def check(
        self, messages: Sequence[Message], token_ids: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        """Compare a conversation's tokens with its one-shot encoding, as strictly as `sanity_check`
        says.

        The model may split its own text into other tokens, and end it with any of the profile's or
        these `stop_ids`. Raises EncodingError with the first differing token.
        """
        if self.sanity_check == "disable":
            return
        ids = list(token_ids)
        if messages[-1]["role"] == "assistant" and ids[-1:] != [self.profile.end_of_turn]:
            ids.append(self.profile.end_of_turn)
        headers = [self.template.between(left, GENERATION) for left in ("user", "tool", "system")]
        shown = [self.text.template_text(header) for header in headers if header is not None]
        ends = frozenset((*self.end_of_turn_ids, *stop_ids))
        found = (self._with_one_end(reference, ends) for reference in self._references(messages))
        compare(self._with_one_end(ids, ends), found, self.text, shown, self.sanity_check)

    def _with_one_end(self, ids: Sequence[int], ends: Collection[int]) -> list[int]:
        """The ids with the template's end of each turn, whichever tokens ended it."""
        out = list[int]()
        for token in ids:
            if out and token in ends and out[-1] in ends:
                out[-1] = token
            else:
                out.append(token)
        if self.profile.ends_by_role:
            return out
        return [self.profile.end_of_turn if token in ends else token for token in out]

    def _references(self, messages: Sequence[Message]) -> Iterator[list[int]]:
        accepted = self._accepted(messages)
        yield from references(self._renderer, self.text, accepted)
        if self.images is not None:
            # An appended response keeps the control tokens that the model wrote.
            shaped = self._accepts(messages, as_text=not self.use_inference_chat_template)
            kept = [
                s if s["role"] == "assistant" else a for s, a in zip(shaped, accepted, strict=True)
            ]
            if kept != accepted:
                yield from references(self._renderer, self.text, kept)

    def without_placeholders(self, generation: Generation) -> Generation:
        """Replace each image placeholder that the model wrote by a question mark; if spelled, its
        first token.

        The forward pass cannot take the token, and SGLang, which reads a prompt with images as
        text, takes both for an image. An altered response is not trained on, and its record of
        which tokens top-p kept is dropped.
        """
        names = "|".join(re.escape(self.decode([token])) for token in self.placeholder_ids)
        found = re.finditer(names, self.decode(generation.token_ids)) if names else ()
        places = [
            place
            for match in found
            if (place := self.token_span(generation.token_ids, match.span()))
        ]
        if not places:
            return generation
        token_ids = list(generation.token_ids)
        for start, _ in places:
            token_ids[start] = self.text.encode("?")[-1]
        kept = {key: value for key, value in generation.meta_info.items() if "top_p" not in key}
        text = self.decode(token_ids)
        return replace(
            generation, token_ids=TokenPrefix(token_ids), text=text, meta_info=kept, trained=False
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, including control tokens."""
        return self.text.decode(ids)

    def answer_text(self, response_ids: Sequence[int], stop_id: int | None = None) -> str:
        """The response's text without the tokens that ended it."""
        ids = list(response_ids)
        while self.end_of(ids, stop_id) is not None:
            ids.pop()
        return self.decode(ids)

    def open_reasoning(self, text: str) -> str:
        """Return the `<think>` with which the generation header began a response that does not
        repeat it, or ""."""
        return (
            THOUGHT_START
            if self.profile.opens_thought and not text.lstrip().startswith(THOUGHT_START)
            else ""
        )

    def read(self, response_ids: Sequence[int], stop_id: int | None = None) -> Reading:
        """The response as environments read it, with thoughts between `<think>` tags."""
        text = self.answer_text(response_ids, stop_id)
        return (
            channel_reading(text)
            if self.profile.channels
            else plain_reading(text, self.open_reasoning(text))
        )

    def past_answer(self, text: str, cut: bool) -> str:
        """A response as later prompts show it: with the thought that its header began, and the end
        of a cut one."""
        lead = self.profile.lead if self.open_reasoning(text) else ""
        return lead + text + (self._close_of(text) if cut else "")

    def _close_of(self, text: str) -> str:
        """What ends the thought of a response that was cut inside it."""
        thought = self.open_reasoning(text) + text.lstrip()
        is_open = thought.startswith(THOUGHT_START) and THOUGHT_END not in thought
        return self.profile.thought_close if is_open else ""

    def token_span(
        self, response_ids: Sequence[int], span: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        """Return the tokens [start, end) that hold the characters [start, end) of the response's
        text, if any do."""
        if span is None or span[0] >= span[1]:
            return None
        chars = self.text.chars_within(response_ids)
        counts = range(len(response_ids) + 1)
        start, end = (bisect_right(counts, limit, key=chars) - 1 for limit in span)
        end += chars(end) < span[1] and end < len(response_ids)
        return (start, end) if start < end else None
