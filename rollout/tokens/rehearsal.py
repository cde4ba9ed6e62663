"""Plays a few turns with a checkpoint's encoder before a run starts, and tells what would go
wrong."""

from collections.abc import Callable, Iterator

from envs.calls import find_calls
from rollout.errors import EncodingError
from rollout.tokens.chat_template import THOUGHT_END, THOUGHT_START, Message
from rollout.tokens.encoding import DeltaEncoder

TRIED = frozenset(
    {
        ("<|im_start|>assistant\n", "<|im_end|>"),
        ("<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|assistant|>", "<|user|>"),
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        ("<|im_middle|>", "<|im_end|>"),
        ("]~b]ai\n", "[e~["),
        ("<|start|>assistant", "<|end|>"),
        ("[/INST]", "</s>"),
        ("<start_of_turn>model\n", "<end_of_turn>"),
    }
)
"""What opens a response and ends a turn in the families of docs/tokens.md."""
ASK: Message = {"role": "user", "content": "first question"}
NEXT: Message = {"role": "user", "content": "second question"}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def rehearse(encoder: DeltaEncoder, history: str) -> list[str]:
    """Return one sentence for each thing that this checkpoint cannot do as the run needs it."""
    scenes: list[Callable[[DeltaEncoder], Iterator[str]]] = [_family, _systems, _cut_thought]
    if history == "full":
        scenes.append(_stops)
    found: list[str] = []
    for scene in scenes:
        try:
            found += scene(encoder)
        except EncodingError as error:
            found.append(str(error))
    return found


def _family(encoder: DeltaEncoder) -> Iterator[str]:
    profile = encoder.profile
    if (profile.answer_start, encoder.decode([profile.end_of_turn])) not in TRIED:
        yield (
            "the chat template is of no family that docs/tokens.md lists: what it writes was "
            "probed, but never tried with a model, so read the output of slime-verlog check "
            "--model"
        )
    if not profile.reads_calls:
        yield "calls cannot be read in the template's own form, so environments with tools need tools_in: prompt"


def _stops(encoder: DeltaEncoder) -> Iterator[str]:
    """A response with each token that may end it is read without it, and gets no second end."""
    prompt = encoder.prompt([ASK])
    for stop in encoder.end_of_turn_ids:
        response = [*encoder.text.encode("fine"), stop]
        longer = encoder.append(prompt, response, [NEXT])
        following = longer.token_ids[len(prompt.token_ids) + len(response) :]
        doubled = (
            following[:1] == [encoder.profile.end_of_turn] and not encoder.profile.ends_by_role
        )
        if doubled or encoder.answer_text(response) != "fine":
            yield f"a response that ends with {encoder.decode([stop])} gets a second end of turn; use history: window"


def _cut_thought(encoder: DeltaEncoder) -> Iterator[str]:
    """A call inside a thought without an end is not made."""
    opening = "" if encoder.profile.opens_thought else THOUGHT_START
    cut = encoder.text.encode(f"{opening}maybe {CALL}")
    reading = encoder.read(cut)
    if encoder.profile.channels or THOUGHT_END in reading.text:
        return
    if find_calls(reading.text, form=encoder.profile.call_form).calls:
        yield "a call inside a thought that was cut would be made; set another chat template"


def _systems(encoder: DeltaEncoder) -> Iterator[str]:
    """A second system message and a later one are shown."""
    answer = {"role": "assistant", "content": "fine"}
    systems = [
        {"role": "system", "content": f"rule {number}"} for number in ("one", "two", "three")
    ]
    text = encoder.decode(encoder.prompt([*systems[:2], ASK, answer, systems[2], NEXT]).token_ids)
    missing = [m["content"] for m in systems if m["content"] not in text]
    if missing:
        yield f"the chat template drops system messages after the first one ({', '.join(missing)} is not shown)"


def describe(encoder: DeltaEncoder) -> list[str]:
    """Return the profile as lines of text."""
    profile = encoder.profile
    form = profile.call_form
    own_form = "JSON objects with a name and arguments" if form is None else form.shape
    systems = (
        "anywhere"
        if profile.takes_systems
        else "one at the start; others are joined with it or become the user's"
    )
    if profile.refuses_system:
        systems = "none; it opens the first user message"
    thoughts = (
        "the header opens them" if profile.opens_thought else "the model opens them, if it thinks"
    )
    if profile.channels:
        thoughts = "on the channel analysis, between control tokens"
    dropped = profile.drops_thoughts or profile.channels
    return [
        "stop tokens       "
        f"{', '.join(map(repr, map(encoder.decode, ([i] for i in profile.stop_ids))))}",
        f"end of a turn     {encoder.decode([profile.end_of_turn])!r}"
        + (" (it opens the next role)" if profile.ends_by_role else ""),
        f"response begins   {profile.answer_start + profile.lead!r}",
        "earlier responses "
        f"{' or '.join(repr(profile.answer_start + lead) for lead in profile.earlier_leads)}",
        f"thoughts          {thoughts}; of earlier responses the template "
        f"{'drops' if dropped else 'keeps'} them",
        "calls             "
        f"{own_form if profile.reads_calls else 'not read back: use tools_in: prompt'}",
        f"system messages   {systems}",
        "user messages     "
        f"{'must alternate, so neighbours are joined' if profile.alternates else 'in any number'}",
    ]
