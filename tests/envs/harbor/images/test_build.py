"""Images are built from Dockerfiles in bubblewrap, and tasks are played in them. The base holds a few programs."""

import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from envs.errors import ConfigError
from envs.harbor.dockerfile import UnsupportedLine
from envs.harbor.images.bases import fetch_base
from envs.harbor.images.build import build_image
from envs.harbor.settings import HarborSettings, context_digest, find_image, record_of
from envs.harbor.task import recipe_of
from inspection.command import main
from tests.envs.harbor.task_folders import make_image, make_task, play
from tests.envs.swe.tiny_repository import needs_sandbox

unpacks = pytest.mark.skipif(not hasattr(tarfile, "tar_filter"), reason="archives need Python 3.11.4 or later")
PROGRAMS = ("bash", "cat", "chmod", "chown", "dd", "id", "ls", "mkdir", "rm", "sleep", "touch")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_sandbox()
    root = make_image(tmp_path_factory.mktemp("base") / "root", *PROGRAMS)
    (root / "bin" / "sh").symlink_to("bash")
    return root


@pytest.fixture
def build(base: Path, tmp_path: Path) -> Iterator[Any]:
    """A function that builds a Dockerfile: the tree, the image's settings, and what was said."""
    tmp_path.chmod(0o755)

    def run(dockerfile: str, files: dict[str, str] | None = None, **options: Any) -> tuple[Path, Any, list[str]]:
        inside = {f"environment/{path}": text for path, text in (files or {}).items()}
        task = make_task(tmp_path / "tasks", dockerfile=dockerfile, files=inside)
        context_digest.cache_clear()
        (tmp_path / "empty").mkdir(exist_ok=True)
        sources = {"tiny": str(base), "empty": f"{tmp_path}/empty", "*": f"{tmp_path}/nothing"}
        settings = HarborSettings(images=str(tmp_path / "images"), base_sources=sources, **options)
        said: list[str] = []
        build_image(recipe_of(task), settings, said.append)
        return *find_image(recipe_of(task), settings), said

    yield run
    subprocess.run(["chmod", "-R", "u+rwX", tmp_path / "images"], check=False)


def write_config(folder: Path, task: str, **env: Any) -> str:
    """A YAML for the tasks in the folder, with its path."""
    env = {"folders": [str(folder / "tasks")], "images": str(folder / "images"), **env}
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump({"rollout_interaction_env_path": "envs.harbor", "env": env, "tasks": [task]}))
    return str(path)


def test_every_kind_of_step_changes_the_image(build: Any) -> None:
    tree, image, said = build(
        "ARG BASE=tiny\nFROM $BASE AS first\nARG WHO=world\nENV GREETING=\"hello $WHO\" LONG='a b'\n"
        'RUN echo "$GREETING" > /app/hello && chown 5:5 /app/hello && id > /app/id && touch /usr/lib/new\n'
        "FROM tiny\nLABEL a=b\nEXPOSE 80\nWORKDIR /app/work\nCOPY --from=first /app/hello /app/id /opt/x/\n"
        "COPY data ./data/\nCOPY --chmod=700 data/a.txt renamed\n"
        "COPY <<EOF <<'RAW' /texts/\nhome $HOME_DIR\nEOF\nas $it\nRAW\n"
        'SHELL ["/bin/bash", "-e", "-c"]\nRUN <<EOF\n'
        "rm -r /app/work/data/old /etc/passwd\ncat /opt/x/hello > seen\nEOF\n"
        'USER someone:group\nENTRYPOINT ["x"]\nCMD ["bash"]\n',
        {"data/a.txt": "1\n", "data/old/b.txt": "2\n"},
    )
    assert (tree / "app/work/seen").read_text() == "hello world\n"
    assert (tree / "opt/x/id").read_text().startswith("uid=0") and not (tree / "usr/lib/new").exists()
    assert [path.name for path in sorted((tree / "app/work").iterdir())] == ["data", "renamed", "seen"]
    assert os.listdir(tree / "app/work/data") == ["a.txt"] and not (tree / "etc/passwd").exists()
    assert (tree / "app/work/renamed").stat().st_mode & 0o777 == 0o700
    assert (tree / "texts/EOF").read_text() == "home \n" and (tree / "texts/RAW").read_text() == "as $it\n"
    assert (image.folder, image.user) == ("/app/work", "someone") and "GREETING" not in image.variables
    assert len(said) == 2 and said[0].startswith("answer: line 5 of environment/Dockerfile (RUN echo")


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, size, 0o755
    info.devmajor = info.devminor = 1
    return info


HOSTILE = {
    "a hard link to a file of this machine": [_member("x", tarfile.LNKTYPE, "{secret}")],
    "a file behind a link that leads out": [_member("out", tarfile.SYMTYPE, "{folder}"), _member("out/secret", size=9)],
    "a file above the folder": [_member("../../../../../../../../{secret}", size=9)],
    "an absolute path": [_member("{secret}", size=9)],
    "a device": [_member("memory", tarfile.CHRTYPE)],
    "a disk": [_member("disk", tarfile.BLKTYPE)],
    "more than may be written": [_member("zeros", size=100 << 20)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_reaches_nothing_of_this_machine(build: Any, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "outside" / "secret"
    secret.parent.mkdir()
    secret.write_text("private")
    secret.chmod(0o600)
    context = tmp_path / "tasks" / "answer" / "environment"
    context.mkdir(parents=True)
    with tarfile.open(context / "made.tar", "w") as archive:
        for member in HOSTILE[name]:
            places = {"secret": str(secret), "folder": str(secret.parent)}
            member = member.replace(name=member.name.format(**places), linkname=member.linkname.format(**places))
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    try:
        tree, _, _ = build("FROM tiny\nADD --chmod=666 made.tar /opt/\n", build_mb=16)
    except UnsupportedLine as error:
        assert "has an archive that cannot be unpacked" in str(error)
    else:
        kinds = {stat.S_IFMT(path.lstat().st_mode) for path in (tree / "opt").rglob("*")}
        assert kinds <= {stat.S_IFREG, stat.S_IFDIR}
        assert not any(path.is_file() and path.read_text() == "private" for path in (tree / "opt").rglob("*"))
    assert (secret.read_text(), os.listdir(secret.parent)) == ("private", ["secret"])
    assert (secret.stat().st_mode & 0o777, secret.stat().st_uid) == (0o600, os.geteuid())


def test_a_mode_is_no_option_of_chmod(build: Any) -> None:
    with pytest.raises(UnsupportedLine, match="has a mode that is not a number"):
        build("FROM tiny\nCOPY --chmod=--reference=/etc/passwd data /opt/\n", {"data": ""})


def test_the_base_and_earlier_layers_are_never_changed(build: Any, base: Path) -> None:
    one, _, _ = build("FROM tiny\nRUN echo one > /app/file && mkdir /app/folder\n")
    two, _, _ = build("FROM tiny\nRUN echo one > /app/file && mkdir /app/folder\nRUN echo two >> /app/file\n")
    assert (one / "app/file").read_text() == "one\n" and (two / "app/file").read_text() == "one\ntwo\n"
    assert not (base / "app/file").exists()
    shared = "usr/bin/cat"
    assert (one / shared).stat().st_ino == (two / shared).stat().st_ino, "an unchanged file takes its space once"


def test_only_steps_behind_a_change_are_executed_again(build: Any) -> None:
    dockerfile = "FROM tiny\nRUN touch /app/first\nCOPY data /app/data\nRUN touch /app/second\n"
    assert len(build(dockerfile, {"data": "1"})[2]) == 2
    assert len(build(dockerfile, {"data": "1"})[2]) == 0
    tree, _, said = build(dockerfile, {"data": "2"})
    assert len(said) == 1 and (tree / "app/data").read_text() == "2" and (tree / "app/first").exists()
    tree, _, said = build(dockerfile, {"data": "2"}, build_command="touch /app/third")
    assert said[0].startswith("answer: env.build_command (RUN touch /app/third) took") and (tree / "app/third").exists()


def test_build_arguments_replace_defaults_and_a_changed_one_is_another_image(build: Any) -> None:
    dockerfile = 'FROM tiny\nARG A=1\nENV B=$A\nRUN echo "$A $B" > /app/a\n'
    assert (build(dockerfile)[0] / "app/a").read_text() == "1 1\n"
    tree, image, _ = build(dockerfile, build_args={"A": "2"})
    assert (tree / "app/a").read_text() == "2 2\n" and image.variables["B"] == "2"


@unpacks
def test_add_unpacks_archives_and_links_of_an_image_stay_inside(build: Any, tmp_path: Path) -> None:
    context = tmp_path / "tasks" / "answer" / "environment"
    context.mkdir(parents=True)
    with tarfile.open(context / "made.tar.gz", "w:gz") as archive:
        archive.addfile(_member("inner/file", size=2), io.BytesIO(b"x\n"))
    dockerfile = (
        f'FROM tiny\nRUN ["bash", "-c", "exec 3>/x; rm /x"]\nADD made.tar.gz /opt/\nCOPY made.tar.gz {tmp_path}/\n'
    )
    tree, _, _ = build(dockerfile)
    assert (tree / "opt/inner/file").read_text() == "x\n"
    assert (tree / str(tmp_path).lstrip("/") / "made.tar.gz").is_file() and not (tmp_path / "made.tar.gz").exists()


@pytest.mark.parametrize("line", ["COPY --chmod=777 link /x", "COPY --chmod=777 lin* /x/", "ADD link /x/"])
def test_links_out_of_the_context_reach_nothing_of_this_machine(build: Any, tmp_path: Path, line: str) -> None:
    with tarfile.open(tmp_path / "private.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("secret"), io.BytesIO())
    (tmp_path / "private.tar").chmod(0o600)
    context = tmp_path / "tasks" / "answer" / "environment"
    context.mkdir(parents=True)
    (context / "link").symlink_to(tmp_path / "private.tar")
    with pytest.raises(UnsupportedLine, match="names no file of the folder environment"):
        build(f"FROM tiny\n{line}\n")
    assert (tmp_path / "private.tar").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("lines", ["", "RUN echo 1 > /etc/new\n"])
def test_commands_in_an_image_find_localhost(base: Path, tmp_path: Path, lines: str) -> None:
    tmp_path.chmod(0o755)
    test = "[[ $(cat /etc/hosts /app/seen) == 127.0.0.1*localhost*127.0.0.1* ]] && echo 1 > /logs/verifier/reward.txt\n"
    task = make_task(tmp_path / "tasks", dockerfile=f"FROM tiny\nWORKDIR /app\n{lines}", test=test)
    options: Any = {"images": str(tmp_path / "images"), "base_sources": {"tiny": str(base)}}
    context_digest.cache_clear()
    build_image(recipe_of(task), HarborSettings(**options), lambda line: None)
    env, info, _ = play(task.parent, "cat /etc/hosts > /app/seen; echo 1 > /etc/hosts", **options)
    assert info["reward"] == 1 and env.task.root is not None
    assert (env.task.root / "etc" / "hosts").read_text() == ""


def test_copy_sees_no_file_that_dockerignore_hides(build: Any) -> None:
    files = {".dockerignore": "**/*.pyc\nold\n", "a/x.pyc": "", "a/y": "1", "old/z": ""}
    tree, _, _ = build("FROM tiny\nCOPY . /app/\nCOPY a/* /all/\n", files)
    assert (tree / "app/a/y").read_text() == "1" and os.listdir(tree / "app/a") == os.listdir(tree / "all") == ["y"]
    assert not (tree / "app/old").exists()
    with pytest.raises(UnsupportedLine, match="names no file of the folder environment that environment/.dock"):
        build("FROM tiny\nCOPY old/z /app/\n", files)


def test_links_are_copied_as_what_they_lead_to_under_their_own_names(build: Any, tmp_path: Path) -> None:
    context = tmp_path / "tasks" / "answer" / "environment"
    context.mkdir(parents=True)
    (context / "short").symlink_to("data.txt")
    tree, _, _ = build("FROM tiny\nCOPY --from=tiny /bin/sh /opt/\nCOPY short /opt/\n", {"data.txt": "1"})
    assert sorted(os.listdir(tree / "opt")) == ["sh", "short"] and not (tree / "opt/sh").is_symlink()
    assert (tree / "opt/short").read_text() == "1" and not (tree / "opt/short").is_symlink()


@pytest.mark.parametrize(
    ("line", "options", "sentence"),
    [
        ("RUN echo no; exit 3", {}, r"line 2 of .* \(RUN echo no; exit 3\) ended with status 3; it printed: no"),
        ("RUN sleep 60", {"build_timeout_s": 1.0}, "was stopped by its time limit"),
        (
            "RUN for i in 1 2 3 4 5; do dd if=/dev/zero of=/big$i bs=1M count=4; done; sleep 60",
            {"build_mb": 8},
            "was stopped by its disk limit",
        ),
        ("RUN dd if=/dev/zero of=/dev/null bs=300M count=9", {"memory_mb": 64}, "was stopped by its memory limit"),
    ],
)
def test_commands_that_fail_or_break_a_limit_are_named(
    build: Any, tmp_path: Path, line: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build(f"FROM tiny\n{line}\n", **options)
    assert not list((tmp_path / "images").glob("building-*")) and not list((tmp_path / "images").glob("tasks/*"))


@pytest.mark.parametrize(
    ("lines", "error", "sentence"),
    [
        ("FROM other\n", ConfigError, r"env.base_sources: /\S+/nothing: the folder /\S+/nothing does not exist"),
        ("FROM empty\nWORKDIR /app\n", ConfigError, "the image has no /bin/bash, which commands are run with"),
        ("FROM tiny\nCOPY ../../secret /x\n", UnsupportedLine, r"\(COPY ../../secret /x\) leaves the folder env"),
        (
            "FROM tiny\nCOPY --from=tiny /y /x\n",
            UnsupportedLine,
            "no earlier stage is called 'tiny', .* names no file of the image",
        ),
        ("FROM tiny\nCOPY Dockerfile /bin/cat/x\n", UnsupportedLine, "is a file, and a folder is needed there"),
    ],
)
def test_what_cannot_be_built_is_named(build: Any, lines: str, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        build(lines)


def test_a_task_is_played_in_its_built_image_and_an_edited_one_must_be_built_again(base: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    dockerfile = "FROM tiny\nRUN echo 42 > /usr/lib/secret\nWORKDIR /app\n"
    task = make_task(tmp_path / "tasks", dockerfile=dockerfile)
    options = {"images": str(tmp_path / "images"), "base_sources": {"tiny": str(base)}}
    with pytest.raises(ConfigError, match="has no image of the task as it is now; run: slime-verlog build-images"):
        play(tmp_path / "tasks", **options)
    config = write_config(tmp_path, "answer", **options)
    with pytest.raises(SystemExit) as ended:
        main(["build-images", config])
    assert ended.value.code == 0
    assert play(tmp_path / "tasks", "cat /usr/lib/secret > answer.txt", **options)[1]["reward"] == 1.0
    (layers := tmp_path / "images" / "layers").rename(tmp_path / "aside")
    with pytest.raises(ConfigError, match="run: slime-verlog build-images"):
        play(tmp_path / "tasks", **options)
    (tmp_path / "aside").rename(layers)
    (task / "environment" / "Dockerfile").write_text(f"{dockerfile}RUN false\n")
    context_digest.cache_clear()
    with pytest.raises(ConfigError, match="run: slime-verlog build-images"):
        play(tmp_path / "tasks", **options)
    with pytest.raises(SystemExit) as ended:
        main(["build-images", config])
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("docker-archive:/x/a.tar", "env.base_sources: docker-archive:/x/a.tar: the file /x/a.tar does not exist"),
        ("ubuntu:24.04", "env.base_sources: ubuntu:24.04 names no image; write docker://NAME, oci:FOLDER:TAG"),
    ],
)
def test_a_source_that_is_not_there_is_named(tmp_path: Path, source: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        fetch_base("a", HarborSettings(base_sources={"*": source}), tmp_path)


def test_check_says_once_that_an_image_cannot_be_built_and_other_commands_name_the_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_task(tmp_path / "tasks")
    config = write_config(tmp_path, "answer")
    with pytest.raises(SystemExit) as ended:
        main(["check", config])
    printed = capsys.readouterr()
    assert ended.value.code == 1 and "not built: answer" in printed.out
    assert "answer: not built: env.base_sources does not say" in printed.err and "build-images" not in printed.err
    with pytest.raises(SystemExit, match=f"run: slime-verlog build-images {config}$"):
        main(["evaluate", config, "--player", "random", "--out", str(tmp_path / "out")])


def test_the_order_of_base_sources_belongs_to_the_image_because_the_first_that_fits_counts(tmp_path: Path) -> None:
    recipe = recipe_of(make_task(tmp_path))
    one, two = {"a": "oci:/a", "*": "oci:/b"}, {"*": "oci:/b", "a": "oci:/a"}
    keys = [record_of(recipe, HarborSettings(images="x", base_sources=sources)) for sources in (one, two, dict(one))]
    assert keys[0] == keys[2] != keys[1]


@unpacks
def test_images_that_cannot_be_built_are_named_and_the_others_are_built(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    for name, path in (("a-leaves", "../x"), ("b-fits", "x")):
        make_task(tmp_path / "tasks", name, dockerfile="FROM tiny\nADD made.tar /opt/\n")
        with tarfile.open(tmp_path / "tasks" / name / "environment" / "made.tar", "w") as archive:
            archive.addfile(tarfile.TarInfo(path), io.BytesIO())
    config = write_config(tmp_path, "*", base_sources={"tiny": str(base)})
    with pytest.raises(SystemExit) as ended:
        main(["build-images", config])
    printed = capsys.readouterr().out
    assert ended.value.code == 1 and "a-leaves: not built: line 2 of" in printed and "b-fits: ready after" in printed


def test_an_oci_layout_is_unpacked_with_its_settings(build: Any, base: Path, tmp_path: Path) -> None:
    for tool in ("skopeo", "umoci"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed; apt-get install -y {tool}")
    layout = f"{tmp_path}/layout:v1"
    with tarfile.open(tmp_path / "base.tar", "w") as archive:
        archive.add(base, arcname=".")
    for words in (
        ["init", "--layout", f"{tmp_path}/layout"],
        ["new", "--image", layout],
        ["raw", "add-layer", "--image", layout, f"{tmp_path}/base.tar"],
        ["config", "--image", layout, "--config.env", "COLOR=red", "--config.workingdir", "/app"],
    ):
        subprocess.run(["umoci", *words], check=True, capture_output=True)
    options = {"images": str(tmp_path / "images"), "base_sources": {"acme/tiny:*": f"oci:{layout}"}}
    make_task(tmp_path / "oci", dockerfile="FROM acme/tiny:1\nRUN echo $COLOR > color\n")
    settings = HarborSettings(**options)
    recipe = recipe_of(tmp_path / "oci" / "answer")
    build_image(recipe, settings)
    tree, image = find_image(recipe, settings)
    assert (tree / "app/color").read_text() == "red\n" and image.folder == "/app"
    told = json.loads(next((tmp_path / "images" / "bases").glob("*/config.json")).read_text())
    assert told["digest"].startswith("sha256:") and told["source"] == f"oci:{layout}"


@pytest.mark.slow
def test_packages_of_debian_are_installed_by_a_user_without_rights(base: Path, tmp_path: Path) -> None:
    assert base
    tmp_path.chmod(0o755)
    image = Path(os.environ.get("HARBOR_TEST_IMAGE") or tmp_path / "debian")
    if not image.exists():
        if shutil.which("debootstrap") is None or os.geteuid() != 0:
            pytest.skip("debootstrap is not installed or not run as root; apt-get install -y debootstrap")
        argv = ["debootstrap", "--variant=minbase", "bookworm", str(image)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    dockerfile = (
        "FROM debian:12\nRUN apt-get update && apt-get install -y --no-install-recommends jq redis-server\n"
        "RUN useradd -m someone && su someone -c 'echo 42 > ~/answer' && chown someone: /home/someone/answer\n"
        "WORKDIR /app\n"
    )
    make_task(tmp_path / "tasks", dockerfile=dockerfile)
    options = {"images": str(tmp_path / "images"), "base_sources": {"debian:*": str(image)}}
    build_image(recipe_of(tmp_path / "tasks" / "answer"), HarborSettings(**options))
    command = "echo '{\"a\": 42}' | jq .a > answer.txt; redis-server --version; cat /home/someone/answer"
    assert play(tmp_path / "tasks", command, **options)[1]["reward"] == 1.0
