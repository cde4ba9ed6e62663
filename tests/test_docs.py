"""Documents name files and tests that exist, link to pages that exist, and the README's environment
works."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from embedded.warmstart.demonstrations import demonstrate
from envs.harbor.settings import HarborSettings
from rollout.bridge.settings import check_keys, load_settings
from rollout.play.parts import FAULTS
from rollout.tasks import read_tasks
from rollout.turn import StopReason
from slime_verlog import read_settings

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
DOCUMENTS = sorted([*(REPOSITORY / "docs").rglob("*.md"), README, REPOSITORY / "CONTRIBUTING.md"])
FILES = re.compile(
    r"`((?:rollout|advantage|envs|embedded|inspection|scripts|custom_configs|docs)/[\w./]+\.\w+)`"
)
LINKS = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)")
CODE = ("rollout", "advantage", "envs", "embedded", "inspection", "scripts")
FUNCTIONS = re.compile(r"`([\w/]+\.py)::(\w+)`")
NAMED = re.compile(r"`(tests/[\w./-]*\w)(?:::(\w+))?`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_and_links_to_exists(document: Path) -> None:
    """Tests, files, functions, pages and headings."""
    text = document.read_text(encoding="utf-8")
    for path, name in [*NAMED.findall(text), *FUNCTIONS.findall(text)]:
        assert (REPOSITORY / path).exists(), path
        assert not name or name in _names(REPOSITORY / path), f"{path}::{name}"
    assert not [path for path in FILES.findall(text) if not (REPOSITORY / path).exists()]
    for path, anchor in LINKS.findall(text):
        target = (document.parent / path) if path else document
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target), f"{path}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def write_readme(folder: Path) -> None:
    """Save the files of the README's own environment as it says."""
    text = README.read_text(encoding="utf-8")
    for name, kind in (("corridor.py", "python"), ("my.yaml", "yaml")):
        (found,) = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
        assert f"`{name}`" in text
        (folder / name).write_text(found, encoding="utf-8")


def test_the_readmes_environment_can_be_trained_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_readme(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = load_settings(SimpleNamespace(custom_config_path="my.yaml"))
    turns = demonstrate(settings, 3, 1.0, 0, needs_expert=False)
    assert turns and all(turn.valid for turn in turns)


@pytest.mark.parametrize("name", ["treasure.py", "treasure.yaml", "run_treasure.sh"])
def test_the_tutorial_shows_the_files_that_are_tested(name: str) -> None:
    text = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\w+[^\n]*\n(.*?)```", text, re.DOTALL)
    assert (REPOSITORY / "docs" / "examples" / name).read_text(encoding="utf-8") in blocks


def test_every_row_of_the_formulas_names_a_function() -> None:
    text = (REPOSITORY / "docs" / "formulas.md").read_text(encoding="utf-8")
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "| function" not in line
    ]
    assert len(rows) > 25
    assert not [row for row in rows if not re.search(r"\| `[\w/]+\.py::\w+` \|", row)]


@pytest.mark.parametrize(
    "heading",
    [
        "One fixed-turn batch",
        "A continuous batch",
        "One environment step",
        "A BabyAI step",
        "One token's advantage",
    ],
)
def test_the_architecture_names_the_files_to_open_and_what_is_in_them(heading: str) -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").split(f"## {heading}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", section, re.MULTILINE)
    assert rows
    for path, what in rows:
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", what):
            assert name in _names(REPOSITORY / path), f"{path} has no {name}"


def _names(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "name")}


def test_every_guarantee_of_reliability_names_its_test() -> None:
    pages = [
        page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs").glob("reliability*.md")
    ]
    guarantees = "\n".join(page.split("## Soak test", 1)[0] for page in pages)
    rows = [
        line
        for line in guarantees.splitlines()
        if line.startswith("| ") and line != "| guarantee | test |"
    ]
    assert len(rows) > 20
    assert all(NAMED.search(row.rsplit("|", 2)[1]) and "::" in row for row in rows)
    assert "…" not in guarantees, "test names must be complete, or they cannot be checked"
    for row in rows:
        for path, name in NAMED.findall(row):
            assert "*slow*" in row or not _is_slow(REPOSITORY / path, name), f"{name} is slow"


def _is_slow(file: Path, name: str) -> bool:
    """Whether the default suite leaves out the whole test, or the whole file."""
    body = ast.parse(file.read_text()).body if file.is_file() else []
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node) == "pytestmark = pytest.mark.slow":
            return True
        if getattr(node, "name", None) == name:
            return "pytest.mark.slow" in map(ast.unparse, node.decorator_list)
    return False


def test_every_stop_reason_and_fault_is_documented() -> None:
    text = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    stops = text.split("## Stop reasons", 1)[1].split("\n## ", 1)[0]
    assert re.findall(r"^\| `(\w+)` ", stops, re.MULTILINE) == list(StopReason)
    assert set(FAULTS) <= set(re.findall(r"`(\w+)`", text.split("## Faults", 1)[1]))


def test_every_message_in_troubleshooting_is_one_that_the_code_prints() -> None:
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    quoted = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell) if " " in span]
    assert len(quoted) > 30
    files = [
        path
        for folder in CODE
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".py", ".sh")
    ]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    code = re.sub(r'"\s*\n\s*f?"|\\\n', "", code)  # joins the lines of one message
    missing = [
        part for message in quoted for part in re.split(r"\s*…\s*", message) if part not in code
    ]
    assert not missing


def test_every_yaml_of_the_page_about_harbor_tasks_can_be_read_as_printed() -> None:
    text = (REPOSITORY / "docs" / "harbor.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        tasks = read_tasks(check_keys(yaml.safe_load(block)))
        assert [task.env_path for task in tasks] == ["envs.harbor"]
        read_settings(HarborSettings, tasks[0].options, "env.")
