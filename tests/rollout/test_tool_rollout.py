"""Tools through the rollout: in both histories, the prompt is what the chat template shows of the
same conversation."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rollout.bridge.framework import Sample
from rollout.bridge.sample import row_of
from tests.cases import some
from tests.envs.tools.test_tool_env import call
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.messages import answer, system, user
from tests.fixtures.playing import playing
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.tokenizers import real_tokenizer

ENV = {
    "tools": ["tests.envs.tools.toolbox:add", "tests.envs.tools.toolbox:Counter"],
    "data": [{"question": "What is 2 + 3?", "answer": "5"}],
    "grader": "exact",
    "max_steps": 6,
}
ANSWERS = [
    "I add.\n" + call("add", a=2, b=3),
    call("counter") + "\n" + call("counter", step=4),
    "<tool_call>oops</tool_call>",
    "Answer: 5",
]


def tokenizer_of(family: str | None) -> Any:
    """A real tokenizer if a family is named."""
    return real_tokenizer(family) if family else chatml_tokenizer()


def overrides(folder: Path, family: str | None, **more: Any) -> dict[str, Any]:
    """Rollout arguments for the tool environment, with the family's tokenizer."""
    tokenizer_of(family).save_pretrained(folder / "model")
    return {
        "rollout_interaction_env_path": "envs.tools",
        "tasks": ["sums"],
        "env": ENV,
        "rollout_max_response_len": 256,
        "rollout_max_context_len": 8192,
        **more,
    }


async def play(folder: Path, family: str | None, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A whole episode, and its requests."""
    engine = ScriptedEngine(
        tokenizer_of(family), lambda body, number: ANSWERS[number % len(ANSWERS)]
    )
    async with playing(folder, engine, **overrides(folder, family, **more)) as run:
        return await run.episode(), engine.requests


def schemas() -> list[Any]:
    from envs.tools import load_tools

    return [spec.schema for spec in load_tools(ENV["tools"])]


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


@pytest.mark.parametrize("family", some([None, "qwen2_5", "qwen3"], [None, "qwen3"]))
async def test_a_full_history_of_tool_use_is_one_sample_that_equals_the_templates_rendering(
    tmp_path: Path, family: str | None
) -> None:
    """Its mask covers exactly the model's tokens, each turn after the tokens that it was generated
    from."""
    sample, requests = await play(tmp_path, family, history="full")
    tokenizer = tokenizer_of(family)
    assert (
        len(requests) == 4
        and sample.status == Sample.Status.COMPLETED
        and sample.reward == pytest.approx(1.0 + 0.4)
    )
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    spans, start = row_of(sample).turns, len(sample.tokens) - sample.response_length
    assert sum(sample.loss_mask) == sum(span.end - span.start for span in spans)
    for request, span in zip(requests, spans, strict=True):
        assert all(sample.loss_mask[span.start : span.end])
        assert request["input_ids"] == sample.tokens[: start + span.start]
    first = tokenizer.decode(requests[0]["input_ids"])
    for schema in schemas():
        assert json.dumps(schema) in first or schema["function"]["description"] in first
    env_says = "No tool was run: the call is not JSON: Expecting value at character 0."
    rules = first.split("<|im_start|>system\n")[1].split("<|im_end|>")[0]
    instruction = (
        "Work on the user's question"
        + rules.split("Work on the user's question")[1].split("\n\n# Tools")[0]
    )
    if family is None:
        instruction = instruction.split("\nTools: ")[0]
    results = [[tool("5")], [tool("count 1"), tool("count 5")], [user(env_says)]]
    messages = [system(instruction), user("What is 2 + 3?")]
    for said, shown in zip(ANSWERS, results, strict=False):
        messages += [answer(said), *shown]
    expected = tokenizer.apply_chat_template(
        messages, tools=schemas(), tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(requests[3]["input_ids"]) == expected


@pytest.mark.parametrize(
    "thought", ["So it is \\boxed{5}. But", "I may " + call("add", a=2, b=3) + " or"]
)
async def test_reasoning_that_the_template_began_and_the_response_does_not_end_is_neither_answer_nor_call(
    tmp_path: Path, thought: str
) -> None:
    """The engine's response has no `<think>`, because that is the end of the prompt."""
    tokenizer, settings = chatml_tokenizer(), overrides(tmp_path, None)
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = changed.chat_template.replace(
        "<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n"
    )
    changed.save_pretrained(tmp_path / "model")
    answers = [thought, "I add.</think>" + call("add", a=2, b=3), "It is 5.</think>Answer: 5"]
    engine = ScriptedEngine(tokenizer, lambda body, number: answers[number])
    async with playing(tmp_path, engine, **settings) as run:
        samples = await run.episode()
    assert tokenizer.decode(engine.requests[0]["input_ids"]).endswith("<think>\n")
    (first,), (second,), (third,) = (row_of(part).turns for part in samples)
    assert first.reward < 0 <= second.reward and third.reward == 1.0
    assert first.action_start == -1 < second.action_start
