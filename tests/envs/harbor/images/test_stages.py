"""Dockerfiles are read as docker reads them, and buildah gets them with the base images that were
fetched."""

import pytest

from envs.harbor.dockerfile import Instruction, UnsupportedLine, read_instructions, with_base_images
from envs.harbor.images.bases import full_name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a  'b X' \"c $X\" d\\ e", ["a", "b X", "c 1", "d e"]),
        ("$X${X}z ${Y:-x} ${X:+set} ${Y:+set}.", ["11z", "x", "set", "."]),
        ("--from=x a b", ["a", "b"]),
    ],
)
def test_words_are_those_of_docker(text: str, words: list[str]) -> None:
    assert Instruction(1, "COPY", text).words({"X": "1"}) == words


def test_continued_lines_and_comments_are_read_and_a_heredoc_is_refused() -> None:
    run, quoted, last = read_instructions(
        'RUN one \\\n  # not this\n\n  two\nRUN echo "<<C" 1<<2\nCMD x'
    )
    assert (run.rest, run.number) == ("one   two", 1)
    assert quoted.rest == 'echo "<<C" 1<<2' and (last.number, last.name) == (6, "CMD")
    for line in ("RUN <<A && cat <<-'B'", "COPY <<EOF /x", "RUN cat 0<<E", "RUN cat << EOF > x"):
        with pytest.raises(
            UnsupportedLine, match=r"line 2 of environment/Dockerfile \(.* has a heredoc; put"
        ):
            list(read_instructions(f"FROM a\n{line}\nRUN rm -rf /\n"))


def test_names_of_images_are_replaced_and_those_of_stages_and_scratch_are_kept() -> None:
    text = (
        "# a comment\nARG V=1\nARG W=$V.2\nFROM --platform=linux/amd64 a:$W AS One\nFROM ONE\nARG "
        "V=3\nFROM scratch\nCOPY --chown=1 --from=one /x /y\nCOPY --from=0 /x /y\nCOPY "
        "--from=b/c:1 --chmod=700 /x /y\nRUN end \\\n"
    )
    assert with_base_images(
        text, {"V": "7"}, lambda name: f"<{name}>", "ARG X=1\n"
    ).splitlines() == [
        "ARG V=1",
        "ARG W=$V.2",
        "FROM <a:7.2> AS One",
        "ARG X=1",
        "FROM ONE",
        "ARG X=1",
        "ARG V=3",
        "FROM scratch",
        "ARG X=1",
        "COPY --chown=1 --from=one /x /y",
        "COPY --from=0 /x /y",
        "COPY --from=<b/c:1> --chmod=700 /x /y",
        "RUN end",
    ]


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest"),
        ("acme/x:1", "docker.io/acme/x:1"),
        ("localhost:5000/x", "localhost:5000/x:latest"),
        ("ghcr.io/a/b@sha256:12", "ghcr.io/a/b@sha256:12"),
        ("ubuntu:22.04@sha256:12", "docker.io/library/ubuntu@sha256:12"),
    ],
)
def test_names_of_images_are_completed_as_docker_completes_them(name: str, full: str) -> None:
    assert full_name(name) == full
