"""A second implementation, `renderers`, agrees with ours on first prompts and on what is appended
to them."""

from typing import Any

import pytest

from rollout.tokens.encoding import DeltaEncoder
from tests.fixtures.families import family

pytest.importorskip("renderers")

CONFIGS = {
    "qwen3": "Qwen3RendererConfig",
    "qwen3.5": "Qwen35RendererConfig",
    "glm-4.7": "GLM5RendererConfig",
    "llama-3.2": "Llama3RendererConfig",
    "deepseek-v3": "DeepSeekV3RendererConfig",
}
"""Not compared: GLM-4.6, whose renderer refuses to go on after an answer without a thought, and
families whose renderer adds texts of its own (GLM-5.2, Kimi K2, gpt-oss)."""
QUESTION = {"role": "user", "content": "What do you see?"}


def renderer_of(name: str, **options: Any) -> Any:
    import renderers

    config = getattr(renderers, CONFIGS[name])
    if "thinking_retention" in config.model_fields:
        options["thinking_retention"] = "all"
    return renderers.create_renderer(family(name), config(**options))


@pytest.mark.parametrize("name", CONFIGS)
def test_it_appends_the_same_tokens(name: str) -> None:
    encoder, renderer = DeltaEncoder(family(name), history="full"), renderer_of(name)
    prompt = encoder.prompt([QUESTION])
    assert (
        list(prompt.token_ids) == renderer.render([QUESTION], add_generation_prompt=True).token_ids
    )
    thought = "so</think>" if encoder.profile.opens_thought else ""
    for turn in range(6):
        response = [*encoder.text.encode(f"{thought}answer {turn}"), encoder.end_of_turn_ids[0]]
        news = [{"role": "user", "content": f"Observation {turn}:\n\n- a wall"}]
        appended = renderer.bridge_to_next_turn(list(prompt.token_ids), response, news)
        prompt = encoder.append(prompt, response, news)
        assert list(prompt.token_ids) == appended.token_ids


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.7"])
def test_it_opens_a_response_alike_with_and_without_thinking(name: str, thinking: bool) -> None:
    encoder = DeltaEncoder(family(name), chat_template_kwargs={"enable_thinking": thinking})
    system = {"role": "system", "content": "Be brief."}
    theirs = renderer_of(name, enable_thinking=thinking).render(
        [system, QUESTION], add_generation_prompt=True
    )
    assert list(encoder.prompt([system, QUESTION]).token_ids) == theirs.token_ids
