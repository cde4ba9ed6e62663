"""The recordings that define parity are in the repository, and a test without its recording
fails."""

import re

from tests.conftest import RECORDINGS, load_recording


def test_the_readme_lists_all_recordings() -> None:
    listed = re.findall(
        r"^\| `([\w.]+)` \|", (RECORDINGS / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    files = {path.name for path in RECORDINGS.iterdir()} - {"README.md", "manifest.json"}
    assert sorted(listed) == sorted(files)


def test_each_recording_can_be_read() -> None:
    for path in RECORDINGS.glob("*.gz"):
        assert load_recording(path.name)
