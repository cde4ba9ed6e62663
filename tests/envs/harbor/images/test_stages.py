"""Dockerfiles are read as docker reads them; lines that cannot be executed are refused before anything is pulled."""

import pytest

from envs.harbor.dockerfile import (
    Instruction,
    UnsupportedLine,
    fill_in,
    read_arguments,
    read_dockerfile,
    read_instructions,
    run_command,
)
from envs.harbor.images.bases import full_name

SHELL = ("/bin/sh", "-c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a  'b $X' \"c $X\" d\\ e", ["a", "b $X", "c 1", "d e"]),
        ("$X${X}z ${Y:-$X} ${X:+set} ${Y:+set}.", ["11z", "1", "set", "."]),
        ('["a b", "$X"]', ["a b", "1"]),
        ("--from=x a b", ["a", "b"]),
    ],
)
def test_words_are_those_of_docker(text: str, words: list[str]) -> None:
    assert Instruction(1, "COPY", text).words({"X": "1"}) == words


@pytest.mark.parametrize(("text", "why"), [("${X%y}", "a substitution"), ("it's", "a quote without its end")])
def test_words_that_docker_does_not_read_are_refused(text: str, why: str) -> None:
    with pytest.raises(UnsupportedLine, match=why):
        Instruction(1, "COPY", text).words({})


def test_continued_lines_comments_and_heredocs_are_read_apart() -> None:
    text = "RUN one \\\n  # not this\n\n  two\nRUN <<A && cat <<-'B'\n$x\nA\n\ty\n\tB\nRUN echo \"<<C\" 1<<2\nCMD x"
    run, both, quoted, last = read_instructions(text)
    assert (run.rest, run.number) == ("one   two", 1)
    assert [(doc.mark, doc.text, doc.is_quoted) for doc in both.heredocs] == [("A", "$x\n", False), ("B", "y\n", True)]
    assert quoted.heredocs == () and (last.number, last.name) == (11, "CMD")


def test_commands_of_run_are_given_to_the_shell_or_run_as_listed() -> None:
    listed, plain, script, piped = read_instructions(
        'RUN ["ls", "-l"]\nRUN --mount=type=cache,target=/c a b\nRUN <<E\na\nE\nRUN cat <<E >x\na\nE\n'
    )
    assert run_command(listed, SHELL) == ["ls", "-l"]
    assert run_command(plain, SHELL) == [*SHELL, "a b"]
    assert run_command(script, SHELL) == [*SHELL, "a\n"]
    assert run_command(piped, SHELL) == [*SHELL, "cat <<E >x\na\nE"]


def test_arguments_come_from_the_build_their_default_or_before_from() -> None:
    stages, outer = read_dockerfile("ARG V=1\nARG W=$V.2\nFROM a:$W AS one\nFROM ONE\nFROM b\n", {"V": "7"})
    assert [(stage.name, stage.base) for stage in stages] == [("one", "a:7.2"), ("", "ONE"), ("", "b")]
    assert (outer["V"], outer["W"], outer["TARGETOS"]) == ("7", "7.2", "linux")
    step = Instruction(1, "ARG", "A B=2 C D")
    assert read_arguments(step, {}, {"C": "3"}, {"A": "1"}) == {"A": "1", "B": "2", "C": "3"}
    assert fill_in("$A\\$B", {"A": "1"}) == "1$B"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("FROM a\nONBUILD RUN x\n", r"line 2 of environment/Dockerfile \(ONBUILD RUN x\) is not supported"),
        ("FROM a\nRUNN ls\n", r"\(RUNN ls\) is not a Dockerfile instruction; did you mean RUN\?"),
        ("FROM a\nRUN --mount=type=secret,id=x y\n", "uses --mount=type=secret,id=x, which is not supported"),
        ("FROM a\nCOPY <<E /x\ntext\n", r"line 2 of .* \(COPY <<E /x\) has a heredoc without its end, E"),
        ("FROM a\nADD https://example.org/x /x\n", "downloads a file; use RUN with curl"),
        ("FROM a\nRUN <<E\n#!/usr/bin/python3\nE\n", "a heredoc for another interpreter"),
        ("FROM a\nSHELL bash\n", "needs a JSON list"),
        ("RUN x\nFROM a\n", "stands before the first FROM"),
    ],
)
def test_lines_that_cannot_be_executed_are_named(text: str, sentence: str) -> None:
    with pytest.raises(UnsupportedLine, match=sentence):
        read_dockerfile(text, {})


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest"),
        ("localhost:5000/x", "localhost:5000/x:latest"),
        ("ghcr.io/a/b@sha256:12", "ghcr.io/a/b@sha256:12"),
        ("ubuntu:22.04@sha256:12", "docker.io/library/ubuntu@sha256:12"),
    ],
)
def test_names_of_images_are_completed_as_docker_completes_them(name: str, full: str) -> None:
    assert full_name(name) == full
