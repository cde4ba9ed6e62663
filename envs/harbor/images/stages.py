"""Reads a Dockerfile as stages, and refuses lines that cannot be executed before anything is pulled."""

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envs.errors import did_you_mean
from envs.harbor.dockerfile import WITHOUT_EFFECT, Instruction, UnsupportedLine, read_instructions

IGNORED = (*WITHOUT_EFFECT, "ENTRYPOINT", "HEALTHCHECK", "VOLUME")
"""Instructions without a meaning here: no process outlives a command, and no port or volume leads outside."""
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "ADD": ("chmod", "chown", "link"),
    "COPY": ("chmod", "chown", "from", "link"),
    "FROM": ("platform",),
    "RUN": ("mount",),
    **dict.fromkeys(("ARG", "ENV", "SHELL", "USER", "WORKDIR"), ()),
}
"""The instructions that are executed, and their flags."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Stage:
    """One `FROM` and what follows it; `name` is empty if it has none."""

    name: str
    base: str
    steps: list[Instruction] = field(default_factory=list)


def read_dockerfile(text: str, build_args: Mapping[str, str]) -> tuple[list[Stage], Mapping[str, str]]:
    """Read stages and the values of `ARG` before the first `FROM`; raises UnsupportedLine, with the line."""
    machine = _MACHINES.get(platform.machine(), platform.machine())
    known = {"OS": "linux", "ARCH": machine, "PLATFORM": f"linux/{machine}"}
    arguments = {f"{side}{name}": value for side in ("BUILD", "TARGET") for name, value in known.items()}
    stages = list[Stage]()
    for step in read_instructions(text):
        _check(step)
        if step.name == "FROM":
            words = step.words(arguments)
            if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS") or not words[0]:
                raise UnsupportedLine(f"{step.line} is not FROM IMAGE or FROM IMAGE AS NAME")
            stages.append(Stage(words[2].lower() if len(words) == 3 else "", words[0]))
        elif stages:
            stages[-1].steps.append(step)
        elif step.name == "ARG":
            arguments |= read_arguments(step, arguments, {}, build_args)
        else:
            raise UnsupportedLine(f"{step.line} stands before the first FROM")
    if not stages:
        raise UnsupportedLine("environment/Dockerfile has no FROM")
    return stages, arguments


def read_arguments(
    step: Instruction, variables: Mapping[str, str], outer: Mapping[str, str], build_args: Mapping[str, str]
) -> dict[str, str]:
    """The build arguments that an ARG declares: from `build_args`, its own default, or the value before FROM."""
    found = dict[str, str]()
    for word in step.words(variables):
        name, has_default, default = word.partition("=")
        if name in build_args:
            found[name] = build_args[name]
        elif has_default or name in outer:
            found[name] = default if has_default else outer[name]
    return found


def run_command(step: Instruction, shell: Sequence[str]) -> list[str]:
    """The command line of a RUN."""
    listed = step.listed()
    if listed is not None:
        return listed
    if len(step.heredocs) == 1 and re.fullmatch(r"<<-?['\"]?\w+['\"]?", step.arguments):
        return [*shell, step.heredocs[0].text]
    return [*shell, "\n".join([step.arguments, *(f"{doc.text}{doc.mark}" for doc in step.heredocs)])]


def _check(step: Instruction) -> None:
    if step.name in IGNORED:
        return
    known = (*_FLAGS, *IGNORED, "ONBUILD")
    if step.name not in known:
        hint = did_you_mean(step.name, known, n=1)
        raise UnsupportedLine(f"{step.line} is not a Dockerfile instruction{f'; {hint}' * bool(hint)}")
    if step.name not in _FLAGS:
        raise UnsupportedLine(f"{step.line} is not supported")
    for flag, value in step.flags:
        is_cache = flag == "mount" and re.search(r"\btype=cache\b", value)  # without its cache, it only takes longer
        if flag not in _FLAGS[step.name] or (flag == "mount" and not is_cache):
            raise UnsupportedLine(f"{step.line} uses --{flag}{f'={value}' * bool(value)}, which is not supported")
    if step.name == "ADD" and re.search(r"(^|\s|\")(https?://|git@)", step.arguments):
        raise UnsupportedLine(f"{step.line} downloads a file; use RUN with curl or git in its place")
    if step.name == "SHELL" and not step.listed():
        raise UnsupportedLine(f"{step.line} needs a JSON list")
    if step.name == "RUN" and any(document.text.startswith("#!") for document in step.heredocs):
        raise UnsupportedLine(f"{step.line} has a heredoc for another interpreter, which is not supported")
