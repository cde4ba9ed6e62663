"""What depends on a checkpoint's family: a frozen record, learnt once by probing its chat template
and its configs.

Every part reads the record; nothing else knows a family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envs.call_form import CallForm
from envs.calls import set_policy_form
from envs.plain_text import PlainText
from rollout.errors import EncodingError
from rollout.tokens.call_form import PART_OF_TAG, learn_call_form
from rollout.tokens.chat_template import (
    ASSISTANT,
    END,
    GENERATION,
    RECENT,
    START,
    SYSTEM,
    THOUGHT_END,
    THOUGHT_START,
    TOOL,
    USER,
    ChatTemplate,
    common_start,
)
from rollout.tokens.reading import CHANNEL

REASON = "because"
CONTENT = "therefore"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
SAMPLE = "turn left and go on"


@dataclass(frozen=True)
class Profile:
    """How one checkpoint ends turns, thinks and takes messages."""

    stop_ids: tuple[int, ...]
    """Tokens that end a response, the template's own first."""
    end_of_turn: int
    """The token that the template writes after an earlier response."""
    ends_by_role: bool
    """`end_of_turn` opens the next role (GLM's `<|user|>`), so another role begins with another
    token."""
    answer_start: str
    """The end of every header of a response, from its last control token on."""
    lead: str
    """What the generation header adds to `answer_start`: an opened thought, an empty one, or
    nothing."""
    earlier_leads: tuple[str, ...]
    """What the template writes there before earlier responses, the longest first."""
    channels: bool
    """Responses are messages on channels, between control tokens (gpt-oss)."""
    thought_close: str
    """What the template writes between a thought and the text after it."""
    drops_thoughts: bool
    """The template drops the thoughts of earlier responses."""
    refuses_system: bool
    alternates: bool
    """User messages must not follow each other."""
    takes_systems: bool
    """The template shows several system messages, and later ones where they are."""
    call_form: CallForm | None
    """How the template writes calls; None if they are JSON objects with a name, or if it shows
    none."""
    reads_calls: bool
    """Calls that the template writes are read back."""
    calls_are_control: bool
    """The fixed texts around calls are control tokens, so only the template may write them."""
    needs_calls: bool
    """The template refuses results of tools unless the calls are given apart from the response's
    text."""
    names_in_ids: bool
    """The template shows the ids of calls in place of their names."""

    @property
    def opens_thought(self) -> bool:
        """Whether the generation header begins a thought and leaves it open."""
        return self.lead.rfind(THOUGHT_START) > self.lead.rfind(THOUGHT_END)

    @property
    def leads_think(self) -> bool:
        """Whether the template puts a thought, mostly an empty one, before earlier responses."""
        return any(THOUGHT_END in lead for lead in self.earlier_leads)

    def without_lead(self, header: str) -> str:
        """Return a header that ends before a response without what the template adds to
        `answer_start`."""
        for lead in self.earlier_leads:
            if lead and header.endswith(self.answer_start + lead):
                return header.removesuffix(lead)
        return header


def learn_profile(
    tokenizer: Any, template: ChatTemplate, text: PlainText, generation_config: Mapping[str, Any]
) -> Profile:
    """Probe the template; raises EncodingError if its conversations cannot be encoded message by
    message."""
    _check_tokenizer(tokenizer, text)
    after_answer = template.between("assistant", "user")
    found = None if after_answer is None else text.template_text(after_answer).ids
    if not found:
        raise EncodingError(
            "no control token of the tokenizer ends an answer in this chat template, so messages "
            "cannot be separated; use a checkpoint whose tokenizer has the template's markers as "
            "special tokens"
        )
    opener = text.template_text(template.between(START, "user") or "").ids
    start, leads = _headers(template, text)
    stop_ids = _stop_ids(tokenizer, template, text, found[0], generation_config)
    call_form, reads_calls = learn_call_form(
        template, start, [text.decode([token]) for token in stop_ids]
    )
    set_policy_form(call_form)
    channels = any(CHANNEL in lead for lead in leads)
    return Profile(
        stop_ids=stop_ids,
        end_of_turn=found[0],
        ends_by_role=bool(opener) and opener[-1] == found[0],
        answer_start=start,
        lead=leads[0],
        earlier_leads=tuple(sorted(set(leads[1:]), key=len, reverse=True)),
        channels=channels,
        thought_close=_thought_close(template),
        drops_thoughts=_drops_thoughts(template),
        refuses_system=not template.shows([SYSTEM, USER]),
        alternates=not template.shows([USER, USER]),
        takes_systems=template.shows(
            [SYSTEM, SYSTEM, USER, ASSISTANT, SYSTEM, USER], in_order=True
        ),
        call_form=call_form,
        reads_calls=reads_calls,
        calls_are_control=channels
        or (call_form is not None and text.pattern.search(call_form.shape) is not None),
        needs_calls=not template.shows([USER, ASSISTANT, TOOL]),
        names_in_ids=reads_calls and _hides_names(template),
    )


def _check_tokenizer(tokenizer: Any, text: PlainText) -> None:
    decoded = text.decode(text.encode(SAMPLE))
    if decoded.split() == [decoded] or "".join(decoded.split()) != "".join(SAMPLE.split()):
        raise EncodingError(
            f"the tokenizer does not keep text: {SAMPLE!r} becomes {decoded!r} when it is encoded "
            "and decoded again; copy the checkpoint's whole folder (tokenizer.json may be "
            "missing), or use another version of transformers"
        )


def _stop_ids(
    tokenizer: Any,
    template: ChatTemplate,
    text: PlainText,
    end_of_turn: int,
    generation_config: Mapping[str, Any],
) -> tuple[int, ...]:
    """The ends that the template writes after a last response, then those of tokenizer and
    generation config."""
    last = text.template_text(template.between("assistant", END) or "").ids
    found: list[int | None] = [last[0] if last else end_of_turn]
    after_tool = text.template_text(template.between("assistant", "tool") or "").ids
    found += after_tool[:1] if not last and after_tool else ()
    called = template.with_call([USER], calls=[("lookup", {})]) or ""
    if ends := text.pattern.findall(called[called.rfind("lookup") :]):
        found += [text.control[ends[-1]]] if called.rstrip().endswith(ends[-1]) else ()
    found.append(getattr(tokenizer, "eos_token_id", None))
    given = generation_config.get("eos_token_id")
    named = given if isinstance(given, list) else [given]
    for token in named:
        if token is not None and not (isinstance(token, int) and 0 <= token < len(tokenizer)):
            raise EncodingError(
                f"generation_config.json names the stop id {token!r}, which the tokenizer does not "
                f"have (it has {len(tokenizer)} tokens); copy both from the same checkpoint, or "
                "correct eos_token_id"
            )
    return tuple(dict.fromkeys(token for token in [*found, *named] if token is not None))


def _headers(template: ChatTemplate, text: PlainText) -> tuple[str, tuple[str, str, str]]:
    """What every header of a response ends with, and what the next, earlier and recent ones add to
    it."""
    earlier = template.between("user", "assistant") or ""
    coming = template.between("user", GENERATION) or ""
    recent = template.between("user", RECENT)
    headers = [coming, earlier, earlier if recent is None else recent]
    common = PART_OF_TAG.sub("", common_start(headers))
    if (tag := common.find(THOUGHT_START)) >= 0 or (tag := common.find(THOUGHT_END)) >= 0:
        common = common[:tag]
    leads = (coming[len(common) :], earlier[len(common) :], headers[2][len(common) :])
    last = max((found.start() for found in text.pattern.finditer(common)), default=0)
    return common[last:], leads


def _thought_close(template: ChatTemplate) -> str:
    """What ends a thought, from a response whose thought is given apart from its text."""
    for key in REASONING_KEYS:
        answer = {**ASSISTANT, key: REASON, "content": CONTENT}
        for following in ([], [TOOL]):
            text = template.attempt([USER, answer, *following]) or ""
            _, found, rest = text.partition(REASON)
            if found and CONTENT in rest and THOUGHT_END in (close := rest.partition(CONTENT)[0]):
                return close
    return f"\n{THOUGHT_END}\n\n"


def _hides_names(template: ChatTemplate) -> bool:
    function = {"name": CONTENT, "arguments": {}}
    call = {"type": "function", "id": REASON, "function": function}
    text = template.attempt([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    return text is not None and REASON in text and CONTENT not in text


def _drops_thoughts(template: ChatTemplate) -> bool:
    thought = f"{THOUGHT_START}\n{REASON}\n{THOUGHT_END}\n\n{CONTENT}"
    text = template.attempt([USER, {**ASSISTANT, "content": thought}, USER])
    return text is not None and REASON not in text
