"""Geometry problems: read from parquet or from slime's samples, checked by value, with retries and
feedback."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from envs import geo3k
from envs.loading import build_env_from
from envs.questions import ParquetRows
from tests.envs.tools.test_tool_env import call

pytest.importorskip(
    "math_verify", reason="math-verify is not installed; pip install 'math-verify[antlr4_13_2]'"
)
pyarrow = pytest.importorskip(
    "pyarrow", reason="pyarrow is not installed; pip install pyarrow enables this test"
)

PROBLEM = "<image>In the triangle, find $x$."
ROOT = r"3 \sqrt { 2 }"


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGBA", (40, 30), colour).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Six rows in the published form, in row groups of two."""
    import pyarrow.parquet

    images = [{"bytes": png("red"), "path": None}]
    rows = [{"images": images, "problem": f"{PROBLEM} {k}", "answer": str(k)} for k in range(6)]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def sample(**fields: Any) -> SimpleNamespace:
    """What slime's data set hands out without --apply-chat-template."""
    picture = Image.open(io.BytesIO(png("blue")))
    content = [
        {"type": "image", "image": "data:..."},
        {"type": "text", "text": "In the triangle, find $x$."},
    ]
    values = {
        "prompt": [{"role": "user", "content": content}],
        "label": ROOT,
        "metadata": {},
        "multimodal_inputs": {"images": [picture], "videos": None},
    }
    return SimpleNamespace(**{**values, **fields})


def build(given: Any = None, **options: Any) -> Any:
    return geo3k.build_env(given or sample(), SimpleNamespace(env=options))


def test_the_parquet_file_is_read_row_by_row_with_its_pictures(parquet: Path) -> None:
    questions = [
        build_env_from("envs.geo3k", {"task": "train", "seed": k}, {"data": str(parquet)}).question
        for k in range(6)
    ]
    assert sorted(q.answer for q in questions) == list("012345")
    assert all(q.text == f"In the triangle, find $x$. {q.answer}" for q in questions)
    assert all(q.images[0].size == (40, 30) and q.images[0].mode == "RGB" for q in questions)
    rows = ParquetRows(parquet)
    assert len(rows) == 6 and [row["answer"] for row in rows] == list("012345")


def test_the_tool_checks_before_the_final_answer() -> None:
    env = build(check="tool")
    env.reset()
    assert [schema["function"]["name"] for schema in env.tools] == ["calc_score"]
    observation, done, _ = env.step(call("calc_score", answer=r"\boxed{4}"))
    assert not done and observation["obs_str"].startswith("calc_score: 4 is wrong")
    observation, done, info = env.step(call("calc_score", answer=r"\sqrt{18}"))
    assert (
        not done
        and "is right" in observation["obs_str"]
        and info["metrics"]["calc_score/right"] == 1.0
    )
    assert info["reward"] == 0.0, "only the final answer pays"
    assert env.step(r"\boxed{3\sqrt{2}}")[2]["reward"] == 1.0
