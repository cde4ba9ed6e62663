"""Reads task folders in Harbor's format (https://www.harborframework.com/docs/tasks), without
Harbor.

A task that cannot be played here is refused, with the line or key that asks for what is missing.
"""

import fnmatch
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict

from envs.errors import ConfigError
from envs.harbor.dockerfile import Image, UnsupportedLine, read_image
from envs.harbor.places import find_dockerignore, find_places, home_of
from envs.harbor.settings import BUILD, HarborSettings, Recipe, find_image
from slime_verlog import Field, Settings, read_settings, read_yaml_mapping

EXCLUDE = "exclude the task (env.exclude)"

_KEYS: Mapping[str, Mapping[str, str | Mapping[str, str] | None]] = read_yaml_mapping(
    str(Path(__file__).with_name("task_keys.yaml")), "keys of tasks"
)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


Seconds = Annotated[float, Field(gt=0)]
Megabytes = Annotated[int, Field(gt=0)]
Size = Annotated[str, Field(pattern=r"^\s*\d+(\.\d+)?\s*[GMKgmk][Bb]?\s*$")]
"""A size such as `2G`, as older tasks write it."""


def _megabytes(size: str | None) -> int | None:
    number, unit = re.findall(r"[\d.]+|[GMK]", size.upper())[:2] if size else (0, "M")
    return max(1, int(float(number) * {"G": 1024, "M": 1, "K": 1 / 1024}[unit])) if size else None


class Table(Settings):
    """One table of a `task.toml`: the keys that are read. `check_keys` has refused the others."""

    model_config = ConfigDict(extra="ignore")
    env: dict[str, str] = {}
    timeout_sec: Seconds | None = None
    user: str | int | None = None
    docker_image: str | None = None
    workdir: str | None = None
    memory_mb: Megabytes | None = None
    memory: Size | None = None
    storage_mb: Megabytes | None = None
    storage: Size | None = None


class TaskFile(Settings):
    """A task's `task.toml`."""

    model_config = ConfigDict(extra="ignore")
    agent: Table = Table()
    environment: Table = Table()
    verifier: Table = Table()
    solution: Table = Table()


def _refusal(task: str, place: str, value: Any, why: str, do: str = EXCLUDE) -> ConfigError:
    """The error about a key that cannot be honoured."""
    shown = "..." if isinstance(value, dict | list) else str(value)[:60]
    return ConfigError(f"{task}: {place} = {shown} in task.toml {why}; {do}")


def check_keys(task: str, whole: Mapping[str, Any]) -> None:
    """Raise ConfigError about the first key that is unknown or asks for something unsupported."""
    for name, keys in _KEYS.items():
        table = whole.get(name, {}) if name else whole
        for key, value in table.items() if isinstance(table, dict) else ():
            found = keys.get(key, "is not a known key")
            why = found.get(str(value).lower()) if isinstance(found, Mapping) else found
            if why and value and not (isinstance(value, dict) and value.get("enabled") is False):
                raise _refusal(task, f"[{name}] {key}" if name else key, value, why)


def _filled(
    task: str, name: str, env: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """The table `env` of a table, with `${NAME}` and `${NAME:-default}` filled in from `given`."""
    for key, value in env.items():
        for match in _VARIABLE.finditer(value):
            if match[1] not in given and match[2] is None:
                why = f"needs the variable {match[1]}"
                raise _refusal(
                    task, f"[{name}.env] {key}", value, why, "set it below env.variables"
                )
    fill = lambda match: given.get(match[1], match[2] or "")
    return {key: _VARIABLE.sub(fill, value) for key, value in env.items()}


_MAX_BYTES = 4 << 20
_DEFAULT_VERIFIER_S = 600.0
"""Harbor's own default."""
_NETWORK = re.compile(
    r"\b(apt|apt-get|apk|dnf|yum)\b.{0,99}\b(add|install|update|upgrade)\b|\bpip3? install\b|\buvx\b"
    r"|\buv (pip|run|sync|tool)\b|\b(npm|pnpm|yarn) (ci|install)\b|\bgit clone\b"
    r"|\b(curl|wget)\b.{0,99}https?://(?!localhost|127\.)"
)
"""Commands in a test script that cannot work without a network."""
_LOADS_FROM_FOLDER = re.compile(
    r"\bPYTHONPATH=|\bpython[\d.]*\s+(?:-(?!\w*[IP])\w+\s+)*-(?!\w*[IP])\w*[mc]\b"
)
"""Commands that let Python load modules from the agent's folders, in place of installed ones."""


@dataclass(frozen=True)
class HarborTask:
    """One task that can be played here."""

    name: str
    folder: Path
    instruction: str
    image: Image
    root: Path | None
    """Folder with the image; None where this machine's programs are used."""
    python: Path
    """Interpreter that is found first where there is no `root`."""
    places: tuple[str, ...]
    """Folders that the agent may change."""
    agent_s: float | None
    """Seconds that the agent's commands may take in the whole episode; None for no limit."""
    verifier_s: float
    memory_mb: int
    tree_mb: int
    verifier_variables: Mapping[str, str]
    solution_variables: Mapping[str, str]
    is_judged_in_place: bool
    """Whether the tests run with the agent's home and variables (`env.verifier`)."""
    uses_pytest: bool
    """Whether the test script starts pytest."""

    @property
    def home(self) -> str:
        return home_of(self.image.user, self.root)

    @property
    def has_solution(self) -> bool:
        return (self.folder / "solution" / "solve.sh").is_file()


def find_tasks(settings: HarborSettings) -> Mapping[str, Path]:
    """Find all task folders by name; the first of `env.folders` counts. Raises ConfigError for one
    without tasks."""
    found: dict[str, Path] = {}
    for folder in settings.task_folders():
        tasks = [path.parent for path in sorted(folder.glob("*/task.toml"))]
        if not tasks:
            hint = (
                "name its parent folder"
                if (folder / "task.toml").is_file()
                else "each task is a folder in it"
            )
            raise ConfigError(f"env.folders: {folder} holds no folder with a task.toml; {hint}")
        for path in tasks:
            found.setdefault(path.name, path)
    return dict(sorted(found.items()))


def read_task(folder: Path, settings: HarborSettings) -> HarborTask:
    """Read one task; raises ConfigError, with the line or key, for one that cannot be played
    here."""
    try:
        return _read_task(folder, settings)
    except UnsupportedLine as error:
        raise ConfigError(f"{folder.name}: {error}; {BUILD}") from error


def _read_task(folder: Path, settings: HarborSettings) -> HarborTask:
    name = folder.name
    whole = _whole(folder)
    agent = whole.agent
    environment = whole.environment
    verifier = whole.verifier
    root, image = _read_image(folder, environment, settings)
    own = _filled(name, "environment", environment.env, settings.variables)
    image = replace(
        image,
        folder=environment.workdir or image.folder,
        user=_user(name, whole, image.user),
        variables={**image.variables, **own, **settings.variables},
        folders=settings.writable,
    )
    _check_tests(folder, settings)
    instruction = read_text(folder, "instruction.md")
    if not instruction.strip():
        raise ConfigError(f"{name}: instruction.md is empty; say there what the agent has to do")
    places = find_places(image, root)
    memory_mb = environment.memory_mb or _megabytes(environment.memory) or settings.memory_mb
    storage_mb = environment.storage_mb or _megabytes(environment.storage) or settings.tree_mb
    if memory_mb > settings.memory_mb:
        why = f"is more than env.memory_mb ({settings.memory_mb})"
        raise _refusal(name, "[environment] memory_mb", memory_mb, why, "raise it")
    verifier_s = verifier.timeout_sec or min(_DEFAULT_VERIFIER_S, settings.verifier_timeout_s)
    if verifier_s > settings.verifier_timeout_s:
        why = f"is more than env.verifier_timeout_s ({settings.verifier_timeout_s:g})"
        raise _refusal(
            name,
            "[verifier] timeout_sec",
            verifier_s,
            why,
            "raise it, and env_step_timeout_s with it",
        )
    return HarborTask(
        name=name,
        folder=folder,
        instruction=instruction,
        image=image,
        root=root,
        python=settings.interpreter(),
        places=places,
        agent_s=agent.timeout_sec,
        verifier_s=verifier_s,
        memory_mb=memory_mb,
        tree_mb=min(settings.tree_mb, storage_mb),
        verifier_variables=_filled(name, "verifier", verifier.env, settings.variables),
        solution_variables=_filled(name, "solution", whole.solution.env, settings.variables),
        uses_pytest=any(
            re.search(r"\bpytest\b", line) for line in test_lines(folder, settings).values()
        ),
        is_judged_in_place=any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.verifier),
    )


def _whole(folder: Path) -> TaskFile:
    """Read the task's `task.toml`."""
    try:
        values = tomllib.loads(read_text(folder, "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{folder.name}: task.toml is not valid TOML: {error}") from error
    check_keys(folder.name, values)
    return read_settings(TaskFile, values, f"{folder.name}: task.toml: ")


def read_text(folder: Path, path: str) -> str:
    """Read a text file of a task folder; raises ConfigError for a missing or long one, or a link
    out of it."""
    file = folder / path
    name = folder.name
    try:
        if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)):
            raise ConfigError(
                f"{name}: {path} is a link that leads out of the task's folder; {EXCLUDE}"
            )
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{name}: {path} is longer than {_MAX_BYTES >> 20} MiB; {EXCLUDE}")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: {path} is not UTF-8 text; {EXCLUDE}") from error


def recipe_of(folder: Path) -> Recipe:
    """Say what a task's image is built from; raises ConfigError if the folder names no single
    image."""
    return _recipe(folder, _whole(folder).environment)


def _recipe(folder: Path, environment: Table) -> Recipe:
    name = folder.name
    inside = folder / "environment"
    if (inside / "docker-compose.yaml").exists():  # Harbor does not read docker-compose.yml
        raise ConfigError(
            f"{name}: environment/docker-compose.yaml starts several containers; {EXCLUDE}"
        )
    if (inside / "Dockerfile").is_file():
        return Recipe(name, read_text(folder, "environment/Dockerfile"), inside)
    built = environment.docker_image
    if built is None:
        raise ConfigError(
            f"{name}: there is neither environment/Dockerfile nor [environment] docker_image"
        )
    return Recipe(name, f"FROM {built}\n", inside)


def _read_image(
    folder: Path, environment: Table, settings: HarborSettings
) -> tuple[Path | None, Image]:
    """The image's own files, if any, and the Dockerfile's settings."""
    recipe = _recipe(folder, environment)
    if settings.images is not None:
        return find_image(recipe, settings)
    if not (folder / "environment" / "Dockerfile").is_file():
        place = "[environment] docker_image"
        why = "names an image that must be pulled"
        raise _refusal(folder.name, place, environment.docker_image, why, BUILD)
    image = read_image(recipe.text)
    if image.copied and (hiding := find_dockerignore(recipe.context)) is not None:
        raise UnsupportedLine(
            f"the COPY in environment/Dockerfile obeys {hiding.name}, which needs an image build"
        )
    return None, image


def _user(task: str, whole: TaskFile, user: str) -> str:
    """The user that both agent and tests run as; the sandbox has one, without rights, whatever its
    name."""
    agent_user, verifier_user = (
        user if table.user in (None, "") else str(table.user)
        for table in (whole.agent, whole.verifier)
    )
    if agent_user != verifier_user:
        why = f"differs from the agent's user {agent_user}, and there is one"
        raise _refusal(task, "[verifier] user", verifier_user, why)
    if not re.fullmatch(r"[\w.-]+", agent_user):
        raise _refusal(task, "[agent] user", agent_user, "is not a user's name")
    return agent_user


def test_lines(folder: Path, settings: HarborSettings) -> Mapping[str, str]:
    """The commands that judge a task, without comments, by what errors call them."""
    if settings.test_command is not None:
        return {"env.test_command": settings.test_command}
    lines = read_text(folder, "tests/test.sh").splitlines()
    return {f"line {n} of tests/test.sh": line.partition("#")[0] for n, line in enumerate(lines, 1)}


def why_forgeable(task: HarborTask, settings: HarborSettings) -> str:
    """Why an agent could forge the reward of this task, as far as settings and test script show it;
    empty if not."""
    if task.is_judged_in_place:
        return "env.verifier says same, so its reward can be forged"
    for place, line in test_lines(task.folder, settings).items():
        if _LOADS_FROM_FOLDER.search(line):
            return f"{place} lets Python load the agent's modules in place of installed ones (python -P does not)"
    return ""


def _check_tests(folder: Path, settings: HarborSettings) -> None:
    """Make sure that the test script can run without a network."""
    for place, line in (
        test_lines(folder, settings).items() if settings.test_command is None else ()
    ):
        if _NETWORK.search(line):
            raise ConfigError(
                f"{folder.name}: {place} ({line.strip()[:60]}) needs the network, and the "
                "sandbox has none; set env.test_command to a command that judges without it"
            )
