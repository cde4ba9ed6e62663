"""MkDocs hook: links from pages to the code that they name, and pages that are made from other
files.

CONTRIBUTING.md and CHANGELOG.md become pages, and examples/run_crafter.md shows what
`bash scripts/run_crafter.sh --flat` prints.

A page writes `advantage/hook.py::compute_advantages`. In the site this is a link to the line of
that function in a page with the file's source. The line is looked up when the site is built.
"""

import ast
import os
import re
import subprocess
import sys
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


def on_config(config: Any) -> None:
    """Let this checkout's packages be imported; while a hook itself is loaded, MkDocs undoes
    changes of the path."""
    sys.path[:0] = [str(ROOT)]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from files outside docs/, and a page for each source file that a
    page names."""
    for file in sorted((ROOT / "studies").glob("*/*")):
        name = file.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(file)))
    for name, file in PAGES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text.replace("](docs/", "](")))
    files.append(
        File.generated(config, "examples/run_crafter.md", content=_flat_run("run_crafter.sh"))
    )
    named = {
        path
        for page in files.documentation_pages()
        for path, _ in NAMED.findall(page.content_string)
    }
    for path in sorted(path for path in named if (ROOT / path).is_file()):
        text = (ROOT / path).read_text(encoding="utf-8").rstrip()
        code = f'`````{LANGUAGES[Path(path).suffix]} linenums="1"\n{text}\n`````\n'
        head = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n"
        files.append(
            File.generated(config, f"source/{path}.md", content=f"{head}# {path}\n\n{code}")
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links to `studies/`, which lies beside docs/, lead to its copy in the site."""
    return re.sub(r"\]\(((?:\.\./)*)\.\./studies/", r"](\1studies/", markdown)


def _flat_run(script: str) -> str:
    """A page with a training run as one script."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "scripts" / script), "--flat"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path})
    return f"# One run as a single script\n\n`bash scripts/{script} --flat` prints:\n\n```bash\n{done.stdout}```\n"


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
        shown = re.sub(
            r"(/|_|(?=::))(?=[\w:])",
            r"\1<wbr>",
            match[0].removeprefix("<code>").removesuffix("</code>"),
        )
        return (
            f'<a href="{get_relative_url(source.url, page.url)}{anchor}"><code>{shown}</code></a>'
        )

    return RENDERED.sub(link, html)


def _line_of(path: str, name: str) -> int:
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if getattr(node, "name", None) == name:
            return node.lineno
    raise PluginError(f"{path} has no {name}")
