"""Files that a `.dockerignore` hides are not seen by COPY; the patterns are docker's."""

from pathlib import Path

import pytest

from envs.harbor.dockerfile import UnsupportedLine
from envs.harbor.images.ignored import seen_context

FILES = ("a.pyc", "app/a.pyc", "app/b.py", "app/deep/logs/c.log", "app/out/d", "app/out/keep", "d[1]", "d1", "Docker")


@pytest.mark.parametrize(
    ("lines", "hidden"),
    [
        ("", ""),
        ("# *.pyc\n\n  \n.\n", ""),
        ("*.pyc\n", "a.pyc"),
        ("**/*.pyc\nDocker", "a.pyc app/a.pyc Docker"),
        ("app\n", "app/a.pyc app/b.py app/deep/logs/c.log app/out/d app/out/keep"),
        ("/app/deep/\r\n", "app/deep/logs/c.log"),
        ("**/logs/", "app/deep/logs/c.log"),
        ("app/**/c.log", "app/deep/logs/c.log"),
        ("app/out/*\n!app/out/keep\n", "app/out/d"),
        ("**\n!app/out\n", "a.pyc app/a.pyc app/b.py app/deep/logs/c.log d[1] d1 Docker"),
        ("!app/out/keep\napp/out\n", "app/out/d app/out/keep"),
        (" app/?.py \n./other/../d1", "app/b.py d1"),
        ("d[0-9]\n", "d1"),
        ("d\\[1\\]\n", "d[1]"),
        ("\ufeffd1\nb.py\nAPP\n", "d1"),
    ],
)
def test_patterns_hide_what_they_hide_in_docker(tmp_path: Path, lines: str, hidden: str) -> None:
    context = tmp_path / "environment"
    for name in FILES:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(name)
    (context / ".dockerignore").write_bytes(lines.encode())
    (tmp_path / "work").mkdir()
    seen = seen_context(context, tmp_path / "work")
    found = {str(path.relative_to(seen)) for path in seen.rglob("*") if path.is_file()} - {".dockerignore"}
    assert set(FILES) - found == set(hidden.split())
    assert seen.name == "environment" and all((seen / name).read_text() == name for name in found)


def test_folders_without_a_visible_file_and_links_are_kept_unless_they_are_hidden(tmp_path: Path) -> None:
    context = tmp_path / "environment"
    (context / "hidden" / "inner").mkdir(parents=True)
    (context / "empty").mkdir(mode=0o700)
    (context / "link").symlink_to("hidden")
    (context / "Dockerfile.dockerignore").write_text("hidden\n")
    (context / ".dockerignore").write_text("empty\nlink\n")  # docker reads only the other one
    (tmp_path / "work").mkdir()
    seen = seen_context(context, tmp_path / "work")
    assert {path.name for path in seen.iterdir()} == {".dockerignore", "Dockerfile.dockerignore", "empty", "link"}
    assert (seen / "empty").stat().st_mode & 0o777 == 0o700 and (seen / "link").readlink() == Path("hidden")


@pytest.mark.parametrize("line", ["!", "a[", "[b-a]"])
def test_a_line_that_is_no_pattern_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / ".dockerignore").write_text(f"a\n{line}\n")
    with pytest.raises(UnsupportedLine, match="line 2 of environment/.dockerignore .* is not a pattern"):
        seen_context(tmp_path, tmp_path)


def test_patterns_are_never_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").symlink_to("/etc/hostname")
    with pytest.raises(UnsupportedLine, match="environment/.dockerignore is a link"):
        seen_context(tmp_path, tmp_path)
