"""An agent that sends its conversation back is trained on one sample with the model's own
tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from envs.agent.continued import Continued
from rollout.bridge.sample import row_of
from tests.fixtures.families import family
from tests.fixtures.messages import answer, user
from tests.fixtures.playing import playing
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.rollout.test_agent_rollout import agent

CALLS = {
    "qwen3.5": (
        "Add.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm-4.7": "Add.</think><tool_call>add<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>",
}


@pytest.mark.parametrize(
    ("name", "number", "shown"),
    [
        ("qwen3.5", "{}", "sum"),
        pytest.param("glm-4.7", "{}", "sum", marks=pytest.mark.slow),
        pytest.param("qwen3.5", "{}e0", "1e0", marks=pytest.mark.slow),
    ],
    ids=["qwen3.5", "glm-4.7", "a number that the template spells differently"],
)
async def test_responses_keep_their_tokens_though_the_agent_fills_in_a_default(
    tmp_path: Path, name: str, number: str, shown: str
) -> None:
    """Or though the template spells a value differently, as `false`, for which Qwen3.5's writes
    `False`."""
    tokenizer = family(name)
    tokenizer.save_pretrained(tmp_path / "model")

    def script(body: dict[str, Any], turn: int) -> Any:
        text = CALLS[name].format(number.format(turn))
        return (text, "<|observation|>") if name == "glm-4.7" else text

    engine = ScriptedEngine(tokenizer, script)
    async with playing(tmp_path, engine, **agent("goes_on 4")) as run:
        (sample,) = await run.episode()
        assert not (await run.runtime()).counters
    spans = row_of(sample).turns
    start = len(sample.tokens) - sample.response_length
    for request, span in zip(engine.requests, spans, strict=True):
        assert request["input_ids"] == list(sample.tokens[: start + span.start])
    assert sum(sample.loss_mask) == sum(span.end - span.start for span in spans)
    assert tokenizer.decode(engine.requests[-1]["input_ids"]).count(shown) == (
        3 if shown == "sum" else 1
    )


def call(**arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}


ASKED, MORE = [user("go")], user("more")
TOOLS = [{"type": "function", "function": {"name": "add"}}]
RESPONSE = answer("I add.", reasoning_content="so", tool_calls=[call(a=1)])


def shown_after(
    response: dict[str, Any], *messages: dict[str, Any], tools: Sequence[Any] = TOOLS
) -> Any:
    """What a request with these messages shows and continues once the first was answered so."""
    requests = Continued()
    assert requests.show(ASKED, TOOLS, list) == (ASKED, None)
    requests.answered(response)
    return requests.show(list(messages), tools, list)


@pytest.mark.parametrize(
    ("sent", "continues"),
    [
        (RESPONSE, True),
        ({**RESPONSE, "tool_calls": [call(a=1, b=0)]}, True),
        ({**RESPONSE, "content": "I add"}, False),
        ({**RESPONSE, "reasoning_content": ""}, False),
        ({**RESPONSE, "tool_calls": [call(a=2)]}, False),
        ({**RESPONSE, "tool_calls": [call(b=1)]}, False),
        ({**RESPONSE, "tool_calls": []}, False),
        (user("I add."), False),
    ],
)
def test_a_request_continues_a_turn_whose_response_it_sends_back_unchanged(
    sent: Any, continues: bool
) -> None:
    shown, found = shown_after(RESPONSE, *ASKED, sent, MORE)
    assert found == ((0, 2) if continues else None)
    assert shown == [*ASKED, RESPONSE if continues else sent, MORE]


def test_a_request_with_other_tools_continues_no_turn() -> None:
    """Its prompt must show them."""
    assert shown_after(RESPONSE, *ASKED, RESPONSE, MORE, tools=[])[1] is None


@pytest.mark.parametrize(
    ("sent", "is_same"),
    [
        ("make test", True),
        ("cd /w && make test", True),
        ("make", False),
        ("test", False),
        ("cd /w && make", False),
    ],
)
def test_a_program_may_leave_out_a_change_to_the_folder_it_is_in(sent: str, is_same: bool) -> None:
    """Claude Code does."""
    response, back = (
        {**RESPONSE, "tool_calls": [call(command=command)]}
        for command in ("cd /w && make test", sent)
    )
    shown, found = shown_after(response, *ASKED, back, MORE)
    assert (found is not None) == is_same
    assert shown[1] == (response if is_same else back)


def test_threads_that_interleave_continue_their_own_turns() -> None:
    requests = Continued()
    threads = {name: [user(name)] for name in "ab"}
    for turn in range(4):
        name = "ab"[turn % 2]
        shown, continues = requests.show(threads[name], TOOLS, list)
        assert shown == threads[name] and continues == (None if turn < 2 else (turn - 2, 2))
        requests.answered(answer(f"answer {turn}"))
        threads[name] += [answer(f"answer {turn}"), MORE]


def test_a_request_that_edits_an_earlier_message_continues_nothing() -> None:
    assert shown_after(RESPONSE, user("Go"), RESPONSE, MORE)[1] is None
    assert shown_after(RESPONSE, *ASKED, RESPONSE)[1] is None, "nothing new was said"
