"""Episodes of families that differ from Qwen, on an engine that ends responses as theirs do."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.families import cheap_copy, family
from tests.fixtures.playing import one_slot, playing
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.rollout.test_tool_rollout import ENV

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
GLM_CALL = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value>"
    "<arg_key>b</arg_key><arg_value>3</arg_value></tool_call>"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 2, "b": 3}<|tool_call_end|><|tool_calls_section_end|>'
)
HARMONY_CALL = (
    "<|channel|>analysis<|message|>I add. ACTION: "
    "no<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 2, "b": 3}'
)
ANSWERS: dict[str, list[Any]] = {
    "glm-4.7": [
        (f"maybe {CALL}", "length"),
        (f"so</think>{GLM_CALL}", "<|observation|>"),
        ("so</think>5", "<|user|>"),
    ],
    "glm-4.5": [
        (f"\n<think>maybe {CALL}", "length"),
        (f"\n<think>so</think>\n{GLM_CALL}", "<|observation|>"),
        ("\n<think>so</think>\n5", "<|endoftext|>"),
    ],
    "kimi-k2": [
        (f"<think>maybe {KIMI_CALL}", "length"),
        (KIMI_CALL, "<|im_end|>"),
        ("5", "<|im_end|>"),
    ],
    "gpt-oss": [
        (f"<|channel|>analysis<|message|>maybe {CALL}", "length"),
        (HARMONY_CALL, "<|call|>"),
        (
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>5",
            "<|return|>",
        ),
    ],
}
"""A thought that is cut with a call in it, a call in the family's own form, and the answer; each
with its end."""


def settings_of(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    family(name).save_pretrained(folder / "model")
    lengths = {"rollout_max_response_len": 256, "rollout_max_context_len": 16384}
    env = {"rollout_interaction_env_path": "envs.tools", "tasks": ["sums"], "env": ENV}
    return {**lengths, **env, **more}


@pytest.mark.parametrize(
    ("name", "history"),
    [
        ("glm-4.7", "full"),
        ("kimi-k2", "full"),
        ("glm-4.7", "window"),
        pytest.param("glm-4.5", "full", marks=pytest.mark.slow),
        pytest.param("gpt-oss", "window", marks=pytest.mark.slow),
    ],
)
async def test_a_cut_thought_runs_nothing_a_call_runs_and_the_answer_is_right(
    tmp_path: Path, name: str, history: str
) -> None:
    tokenizer = family(name)
    engine = ScriptedEngine(tokenizer, lambda body, number: ANSWERS[name][min(number, 2)])
    async with playing(tmp_path, engine, **settings_of(tmp_path, name, history=history)) as run:
        result = await run.episode()
        counters = dict((await run.runtime()).counters)
    prompts = [tokenizer.decode(body["input_ids"]) for body in engine.requests]
    samples = result if isinstance(result, list) else [result]
    assert len(prompts) == 3 and counters == {}
    assert samples[-1].reward == pytest.approx(0.9), "the cut thought is fined"
    assert "neither a call nor an answer" in prompts[1]
    result_shown = (
        prompts[2][len(prompts[1]) :] if history == "full" else prompts[2].partition("add: ")[2]
    )
    assert "5" in result_shown
    stops = engine.requests[0]["sampling_params"]["stop_token_ids"]
    assert {
        tokenizer.convert_tokens_to_ids(end) for _, end in ANSWERS[name] if end != "length"
    } <= set(stops)
    if history == "full":
        assert all(
            doubled not in prompts[2]
            for doubled in ("<|observation|><|observation|>", "<|im_end|><|im_end|>")
        )
        assert "maybe" in prompts[1] and "</think>" in prompts[1].partition("maybe")[2]


async def test_an_engine_that_cut_the_prompt_is_counted(tmp_path: Path) -> None:
    def script(body: dict[str, Any], number: int) -> Any:
        answer = engine.answer("5", body)
        answer["meta_info"]["prompt_tokens"] -= number
        return answer

    engine = ScriptedEngine(family("qwen3"), script)
    given = settings_of(tmp_path, "qwen3", **one_slot(8))
    async with playing(tmp_path, engine, **given) as run:
        output = await run.batch()
    assert output.metrics["rollout/faults/prompt_tokens_differ"] == 7


async def test_a_base_checkpoint_stops_at_the_end_of_turn_that_its_template_writes(
    tmp_path: Path,
) -> None:
    tokenizer = cheap_copy(family("qwen2.5"))
    tokenizer.eos_token = "<|endoftext|>"
    run_on = "5<|im_end|>\n<|im_start|>user\nWhat is 7 + 1?<|im_end|>\n<|im_start|>assistant\n8"
    given = settings_of(tmp_path, "qwen2.5", history="full")
    tokenizer.save_pretrained(tmp_path / "model")
    async with playing(
        tmp_path, ScriptedEngine(tokenizer, lambda body, number: run_on), **given
    ) as run:
        result = await run.episode()
    assert result.reward == 1.0 and tokenizer.decode(result.tokens).endswith("5<|im_end|>")
