"""The search tool: a local index, built once, that finds passages by their words."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from envs.loading import build_env_from
from envs.tools.search import CorpusIndex
from tests.envs.tools.test_tool_env import call

PASSAGES = [
    {
        "title": "Geyser",
        "text": "A geyser throws hot water into the air. Strokkur erupts every ten minutes.",
    },
    {
        "title": "Volcano",
        "text": "A volcano is a rupture in the crust; lava, ash and gases escape.",
    },
    {"title": "Glacier", "text": "A glacier is a body of ice that moves under its own weight."},
    {"title": "Ice cream", "text": "Ice cream is a frozen dessert."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in PASSAGES))
    return path


def titles(corpus: Path, query: str, count: int = 3) -> list[str]:
    index = CorpusIndex(corpus)
    index.ensure()
    return [passage["title"] for passage in index.find(query, count)]


def test_passages_are_ranked_by_how_well_their_words_fit(corpus: Path) -> None:
    assert titles(corpus, "Which geyser erupts?")[0] == "Geyser"
    assert titles(corpus, "moving ice of a glacier")[0] == "Glacier"
    assert set(titles(corpus, "ice")) == {"Glacier", "Ice cream"}
    assert titles(corpus, "ice", 1) == ["Ice cream"]
    assert titles(corpus, "erupting") == ["Geyser"], "words are found by their stem"


def test_workers_that_start_together_build_one_index(corpus: Path) -> None:
    index = CorpusIndex(corpus)
    threads = [threading.Thread(target=index.ensure) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p["title"] for p in index.find("geyser", 3)] == ["Geyser"]
    files = ["corpus.jsonl", "corpus.jsonl.fts5", "corpus.jsonl.fts5.lock"]
    assert sorted(p.name for p in corpus.parent.iterdir()) == files


def write(path: Path, title: str, edited_ns: int) -> Path:
    path.write_text(json.dumps({"title": title, "text": "A canyon is deep."}))
    os.utime(path, ns=(edited_ns, edited_ns))
    return path


def test_a_corpus_that_is_older_or_of_another_size_makes_the_index_stale(tmp_path: Path) -> None:
    now = time.time_ns()
    corpus = write(tmp_path / "w.jsonl", "New", now)
    assert titles(corpus, "canyon") == ["New"]
    write(corpus, "Old", now - 10**12)
    assert titles(corpus, "canyon") == ["Old"], (
        "an older file that was moved there is another corpus"
    )
    write(corpus, "Longer", now - 10**12)
    assert titles(corpus, "canyon") == ["Longer"]
    before = (tmp_path / "w.jsonl.fts5").stat()
    assert titles(corpus, "canyon") == ["Longer"] and (tmp_path / "w.jsonl.fts5").stat() == before


def damaged(data: bytes, how: str) -> bytes:
    if how == "text":
        return b"this is no index at all"
    # The first page, with the list of tables and the record of the corpus, stays as it is.
    return data[:4096] + bytes(255 - byte for byte in data[4096:])


@pytest.mark.parametrize("how", ["text", "pages"])
def test_a_damaged_index_is_rebuilt(corpus: Path, how: str) -> None:
    index = CorpusIndex(corpus)
    index.ensure()
    whole = index.path.read_bytes()
    index.path.write_bytes(damaged(whole, how))
    assert [p["title"] for p in index.find("geyser", 3)] == ["Geyser"]
    assert index.path.read_bytes() == whole


def test_the_model_searches_and_reads(corpus: Path) -> None:
    tools = [
        {
            "path": "envs.tools.search:Search",
            "config": {"corpus": str(corpus), "top_k": 1, "passage_chars": 20},
        }
    ]
    data = [{"question": "Which geyser erupts often?", "answer": "Strokkur"}]
    env = build_env_from(
        "envs.tools", {"task": "q", "seed": 0}, {"tools": tools, "data": data, "grader": "exact"}
    )
    env.reset()
    assert env.tools[0]["function"]["name"] == "search"
    observation, _, info = env.step(call("search", query="geyser"))
    assert observation["obs_str"] == "search: [1] Geyser\nA geyser throws hot "
    observation, _, info = env.step(call("search", query="zebra"))
    assert "Nothing was found" in observation["obs_str"] and info["metrics"]["search/empty"] == 1.0
    assert env.step("Answer: Strokkur")[2]["reward"] == 1.0


def test_corpora_that_share_an_index_file_do_not_mix(tmp_path: Path) -> None:
    corpora = [
        write(tmp_path / "v.jsonl", "First", 10**18),
        write(tmp_path / "w.jsonl", "Other", 10**18),
    ]
    first, second = (CorpusIndex(corpus, tmp_path / "shared") for corpus in corpora)
    first.ensure()
    second.ensure()
    for _ in range(2):
        assert [p["title"] for p in first.find("canyon", 3)] == ["First"]
        assert [p["title"] for p in second.find("canyon", 3)] == ["Other"]
