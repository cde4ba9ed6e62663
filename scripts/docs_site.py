"""MkDocs hook: pages link to the code that they name, and CONTRIBUTING.md and CHANGELOG.md become pages.

A page writes `advantage/hook.py::compute_advantages`. In the site this is a link to the line of that function in a page
with the file's source. The line is looked up when the site is built.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "rollout|advantage|envs|embedded|inspection|scripts|custom_configs|benchmarks|tests|docs/examples"
NAMED = re.compile(rf"`((?:(?:{FOLDERS})/[\w./-]+|slime_verlog)\.(?:py|sh|yaml|j2))(?:::(\w+))?`")
RENDERED = re.compile(NAMED.pattern.replace("`(", "<code>(", 1).removesuffix("`") + "</code>")
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".j2": "jinja"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from files outside docs/, and a page for each source file that a page names."""
    for name, file in PAGES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text.replace("](docs/", "](")))
    named: set[str] = set()
    for page in files.documentation_pages():
        named |= {path for path, _ in NAMED.findall(page.content_string)}
    for path in sorted(path for path in named if (ROOT / path).is_file()):
        files.append(File.generated(config, f"source/{path}.md", content=_source_page(path)))
    return files


def _source_page(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    head = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n"
    return f"{head}# {path}\n\n`````{LANGUAGES[Path(path).suffix]} linenums=\"1\"\n{text}\n`````\n"


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Turn each name of a file, or of a function in a file, into a link to its source."""
    if page.file.src_uri.startswith("source/"):
        return html

    def link(match: re.Match[str]) -> str:
        path, name = match.groups()
        source = files.get_file_from_path(f"source/{path}.md")
        if source is None:  # a file of another repository, such as slime's scripts/models
            return match[0]
        anchor = f"#__codelineno-0-{_line_of(path, name)}" if name else ""
        return f'<a href="{get_relative_url(source.url, page.url)}{anchor}">{match[0]}</a>'

    return RENDERED.sub(link, html)


def _line_of(path: str, name: str) -> int:
    """The first line of a function or class."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if getattr(node, "name", None) == name:
            return node.lineno
    raise PluginError(f"{path} has no {name}")
