"""The search tool: a local index, built once, that finds passages by their words."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from envs.errors import ConfigError, EnvironmentFault
from envs.loading import build_env_from
from envs.tools.search import ensure_index, find
from tests.envs.test_tool_env import call

PASSAGES = [
    {"title": "Geyser", "text": "A geyser throws hot water into the air. Strokkur erupts every ten minutes."},
    {"title": "Volcano", "text": "A volcano is a rupture in the crust; lava, ash and gases escape."},
    {"title": "Glacier", "text": "A glacier is a body of ice that moves under its own weight."},
    {"title": "Ice cream", "text": "Ice cream is a frozen dessert."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in PASSAGES))
    return path


def titles(corpus: Path, query: str, count: int = 3) -> list[str]:
    index = corpus.with_suffix(".fts5")
    ensure_index(corpus, index)
    return [passage["title"] for passage in find(index, query, count)]


def test_passages_are_ranked_by_how_well_their_words_fit(corpus: Path) -> None:
    assert titles(corpus, "Which geyser erupts?")[0] == "Geyser"
    assert titles(corpus, "moving ice of a glacier")[0] == "Glacier"
    assert set(titles(corpus, "ice")) == {"Glacier", "Ice cream"}
    assert titles(corpus, "ice", 1) == ["Ice cream"]
    assert titles(corpus, "erupting") == ["Geyser"], "words are found by their stem"


@pytest.mark.parametrize("query", ["", "  ", '"', "*", "NEAR(", 'title:"x" OR', "'; DROP TABLE x", "zebra", "🦓"])
def test_no_query_is_an_error(corpus: Path, query: str) -> None:
    assert titles(corpus, query) == []
    assert titles(corpus, "geyser") == ["Geyser"]


def test_the_index_is_built_again_when_the_corpus_changes(corpus: Path) -> None:
    assert titles(corpus, "canyon") == []
    with corpus.open("a") as file:
        file.write(json.dumps({"title": "Canyon", "text": "A canyon is deep."}) + "\n")
    assert titles(corpus, "canyon") == ["Canyon"]


def test_workers_that_start_together_build_one_whole_index(corpus: Path) -> None:
    index = corpus.with_suffix(".fts5")
    threads = [threading.Thread(target=ensure_index, args=(corpus, index)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p["title"] for p in find(index, "geyser", 3)] == ["Geyser"]
    assert sorted(p.name for p in corpus.parent.iterdir()) == ["corpus.fts5", "corpus.fts5.lock", "corpus.jsonl"]


def test_the_model_searches_and_reads(corpus: Path) -> None:
    tools = [{"path": "envs.tools.search:Search", "config": {"corpus": str(corpus), "top_k": 1, "passage_chars": 20}}]
    data = [{"question": "Which geyser erupts often?", "answer": "Strokkur"}]
    env = build_env_from("envs.tools", {"task": "q", "seed": 0}, {"tools": tools, "data": data, "grader": "exact"})
    env.reset()
    assert env.tools[0]["function"]["name"] == "search"
    observation, _, info = env.step(call("search", query="geyser"))
    assert observation["obs_str"] == "search: [1] Geyser\nA geyser throws hot "
    observation, _, info = env.step(call("search", query="zebra"))
    assert "Nothing was found" in observation["obs_str"] and info["metrics"]["search/empty"] == 1.0
    assert env.step("Answer: Strokkur")[2]["reward"] == 1.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "config.corpus is missing"),
        ({"corpus": "/nowhere/corpus.jsonl"}, "cannot be read"),
        ({"corpus": "CORPUS", "topk": 3}, "did you mean 'config.top_k'"),
        ({"corpus": "CORPUS", "top_k": 0}, "at least 1"),
        ({"corpus": "CORPUS", "index": "/nowhere/index"}, "config.index"),
        ({"corpus": "BROKEN"}, 'line 1: expected {"title", "text"}'),
    ],
)
def test_a_wrong_configuration_is_named(corpus: Path, config: dict[str, str], words: str) -> None:
    broken = corpus.with_name("broken.jsonl")
    broken.write_text('{"title": "x"}\n')
    paths = {"CORPUS": str(corpus), "BROKEN": str(broken)}
    config = {key: paths.get(value, value) for key, value in config.items()}
    env = build_env_from(
        "envs.tools",
        {"task": "q", "seed": 0},
        {"tools": [{"path": "envs.tools.search:Search", "config": config}], "data": [{"question": "q"}]},
    )
    with pytest.raises((ConfigError, EnvironmentFault), match=words):
        env.reset()
