"""Writes a new environment to start from: a module, its YAML, and a test that passes.

    slime-verlog init lights
    slime-verlog init lights --goal "switch on all lights" --actions "press red" "press blue"

Writes NAME.py, NAME.yaml and test_NAME.py in the current folder, and replaces no file. The module
has an expert, its explanations and a drawing.
"""

import argparse
import functools
import json
import keyword
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path

FILES = {"env.py": "{}.py", "env.yaml": "{}.yaml", "test.py": "test_{}.py"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("name", metavar="NAME", help="name of the environment, such as lights")
    parser.add_argument(
        "--goal", default="reach the goal", help="in a few words; default: %(default)s"
    )
    actions = ["left", "right", "forward"]
    parser.add_argument(
        "--actions", nargs="+", metavar="ACTION", default=actions, help="at least two named actions"
    )
    parser.add_argument(
        "--max-steps", type=int, metavar="N", default=20, help="of an episode; default: %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Write the three files."""
    import jinja2

    from embedded.run.ending import PROGRAM
    from slime_verlog import ConfigError

    _check_name(options.name)
    goal = options.goal.strip().rstrip(".")
    actions = [" ".join(action.split()) for action in options.actions]
    different = {action.lower() for action in actions if action}
    if len(actions) < 2 or len(different) < len(actions):
        raise ConfigError(
            "an environment needs at least two actions that differ in more than case, got "
            f"{actions}"
        )
    if marked := [
        action for action in actions if re.search(r"action:|</?[a-z]", action, re.IGNORECASE)
    ]:
        raise ConfigError(
            f"responses are read by `ACTION:` and by tags, so {marked[0]!r} cannot name an action"
        )
    if not goal or not all(text.isprintable() for text in (goal, *actions)):
        raise ConfigError("goal and actions must be printable text on one line")
    if options.max_steps < 2:
        raise ConfigError(f"--max-steps must be at least 2, got {options.max_steps}")
    # Random play needs `length` x `actions` steps on average, more than there are.
    length = max(2, min(options.max_steps, math.ceil(1.4 * options.max_steps / len(actions))))
    folder = Path(__file__).parent
    files = {}
    for template, form in FILES.items():
        path = Path(form.format(options.name))
        if path.exists():
            raise ConfigError(
                f"{path} exists; give another name, or run the command in another folder"
            )
        jinja = jinja2.Environment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
        )
        # A JSON string is also a Python literal.
        jinja.filters["quoted"] = functools.partial(json.dumps, ensure_ascii=False)
        text = (folder / f"{template}.j2").read_text(encoding="utf-8")
        files[path] = jinja.from_string(text).render(
            name=options.name,
            title=options.name.title().replace("_", ""),
            goal=goal,
            actions=actions,
            max_steps=options.max_steps,
            length=length,
        )
    write_files(files)
    yaml = f"{options.name}.yaml"
    me = PROGRAM
    print(f"\nnext:\n  {me} check {yaml}\n  {me} play {yaml}\n  {me} train {yaml} --updates 20")
    print(f"  pip install pytest && python -m pytest test_{options.name}.py")
    return 0


def write_files(files: Mapping[Path, str]) -> None:
    """Write all files or none; raises OSError if one cannot be written."""
    from embedded.run.folder import write_text

    try:
        for path, text in files.items():
            write_text(path, text)
    except OSError:
        for path in files:
            path.unlink(missing_ok=True)
        raise
    print(*files, sep="\n")


def _check_name(name: str) -> None:
    """Refuse names that Python cannot import, or that would hide another module."""
    import importlib.util

    from slime_verlog import ConfigError

    if (
        not name.isidentifier()
        or keyword.iskeyword(name)
        or name != name.lower()
        or name.startswith("_")
    ):
        rule = "use lower-case letters, digits and underscores, no keyword"
        raise ConfigError(f"{name!r} cannot name an environment: {rule}")
    if name in sys.stdlib_module_names:
        raise ConfigError(f"{name}.py would hide a module of Python's; choose another name")
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is not None and Path(found.origin).parent != Path.cwd():
        raise ConfigError(f"{name}.py would hide an installed module; choose another name")
