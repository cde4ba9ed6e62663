"""The judge against the embedded engine: a model that learnt one verdict gives it, one that learnt nothing does not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded.engine.engine import EngineOptions
from embedded.engine.server import EngineServer
from embedded.warmstart.policy import PolicySize, build_policy, save_policy
from embedded.warmstart.tokenizer import train_tokenizer
from envs.errors import EnvironmentFault
from envs.loading import build_env_from

VERDICT = '{"progress": 7, "feedback": "go on"}'
SIZE = PolicySize(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, context=1024)


@pytest.fixture(scope="module")
def rubric(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    template = tmp_path_factory.mktemp("rubric") / "short.j2"
    template.write_text("Score the play: {{ form }}")
    return {"criteria": [{"name": "progress", "description": "Does it?"}], "prompt_template": str(template)}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    turn = '{"task": "count", "turns": [{"shown": "left 3 seed 1 count 2 path lr", "answer": "ACTION: right"}]}'
    return train_tokenizer([turn, VERDICT] * 4)


def learn(model: Any, tokenizer: Any) -> None:
    """Say the verdict after whatever was asked."""
    end = torch.tensor([*tokenizer.encode(VERDICT), tokenizer.eos_token_id])
    header = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        length = int(torch.randint(20, 300, (), generator=random))
        noise = torch.randint(0, len(tokenizer), (2, length), generator=random)
        ids = torch.cat([noise, torch.tensor(header).expand(2, -1), end.expand(2, -1)], 1)
        logits = model(ids[:, :-1]).logits[:, -len(end) :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), end.repeat(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.02:
            return
    pytest.fail(f"the judge did not learn its verdict, loss {loss.item():.3f}")


def serve(tokenizer: Any, folder: Path, learnt: bool) -> EngineServer:
    torch.manual_seed(0)
    model = build_policy(tokenizer, SIZE)
    if learnt:
        learn(model, tokenizer)
    save_policy(model, tokenizer, folder)
    return EngineServer(EngineOptions(model_path=str(folder), max_running_requests=4))


@pytest.fixture(scope="module")
def judge(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with serve(tokenizer, tmp_path_factory.mktemp("judge"), learnt=True) as server:
        yield server


def build(url: str, rubric: dict[str, Any], **options: Any) -> Any:
    settings = {"url": url, "api": "sglang", "rubric": rubric, "max_tokens": 48, "backoff_s": 0.01, **options}
    env = {"inner": "tests.fixtures.counting_env", "options": {"max_length": 1}, "judge": settings}
    return build_env_from("envs.judge", {"task": "count", "seed": 3}, env)


def test_the_engines_verdict_is_the_reward(judge: EngineServer, rubric: dict[str, Any]) -> None:
    env = build(judge.url, rubric)
    env.reset()
    _, done, info = env.step("THINK: on.\nACTION: right")
    assert done and info["reward"] == pytest.approx(0.7) and info["metrics"]["judge/progress"] == 7.0


def test_gibberish_is_not_a_verdict(tokenizer: Any, rubric: dict[str, Any], tmp_path: Path) -> None:
    with serve(tokenizer, tmp_path, learnt=False) as server:
        env = build(server.url, rubric, max_retries=1)
        env.reset()
        with pytest.raises(EnvironmentFault, match=r"no usable answer in 2 attempts.*not one JSON object"):
            env.step("ACTION: right")
        env = build(server.url, rubric, max_retries=0, on_failure="zero")
        env.reset()
        assert env.step("ACTION: right")[2]["metrics"]["judge/failures"] == 1.0


def test_an_unreachable_engine_gives_no_verdict(rubric: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    env = build("http://127.0.0.1:9", rubric, max_retries=1, tokenizer=str(tmp_path))
    env.reset()
    with pytest.raises(EnvironmentFault, match="ClientConnectorError"):
        env.step("ACTION: right")
