"""Images are built by buildah in a sandbox, and tasks are played in them. The base holds a few
programs."""

import io
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from envs.errors import ConfigError
from envs.harbor.images.build import build_image
from envs.harbor.settings import HarborSettings, context_digest, find_image
from envs.harbor.task import recipe_of
from envs.swe.sandbox import groups
from tests.envs.harbor.task_folders import make_image, make_task, needs_buildah, play, write_config
from tests.fixtures.command import slime_verlog

PROGRAMS = ("bash", "cat", "chmod", "chown", "dd", "id", "ls", "mkdir", "rm", "sleep", "touch")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_buildah()
    root = make_image(tmp_path_factory.mktemp("base") / "root", *PROGRAMS)
    (root / "bin" / "sh").symlink_to("bash")
    return root


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that these tests share, so that the base is imported once."""
    return tmp_path_factory.mktemp("store") / "images"


@pytest.fixture
def built_from(base: Path, images: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings that build from the base into the shared store."""
    tmp_path.chmod(0o755)
    context_digest.cache_clear()
    return {"images": str(images), "base_sources": {"tiny": str(base), "*": "/x/nothing"}}


@pytest.fixture
def build(built_from: dict[str, Any], tmp_path: Path) -> Any:
    """A function that builds a Dockerfile: the tree, and the image's settings."""

    def run(dockerfile: str, files: dict[str, str] | None = None, **more: Any) -> tuple[Path, Any]:
        inside = {f"environment/{path}": text for path, text in (files or {}).items()}
        task = make_task(tmp_path / "tasks", dockerfile=dockerfile, files=inside)
        context_digest.cache_clear()
        settings = HarborSettings(**{**built_from, **more})
        build_image(recipe_of(task), settings, lambda line: None)
        return find_image(recipe_of(task), settings)

    return run


def test_every_kind_of_step_changes_the_image(build: Any) -> None:
    tree, image = build(
        'ARG BASE=tiny\nFROM $BASE AS first\nARG WHO=world\nENV GREETING="hello $WHO" LONG=\'a '
        "b'\n"
        'RUN echo "$GREETING" > /app/hello && chown 5:5 /app/hello && id > /app/id && touch /usr/lib/new\n'
        "FROM tiny\nLABEL a=b\nEXPOSE 80\nWORKDIR /app/work\nCOPY --from=first /app/hello /app/id "
        "/opt/x/\nCOPY data ./data/\nCOPY --chmod=700 data/a.txt renamed\nCOPY --from=tiny "
        "/bin/sh /opt/\n"
        'SHELL ["/bin/bash", "-e", "-c"]\nRUN rm -r /app/work/data/old /etc/passwd \\\n'
        "  # the first file\n  && cat /opt/x/hello > seen && cat $APT_CONFIG > apt\n"
        'ENV COLOR=red\nUSER someone:group\nENTRYPOINT ["x"]\nCMD ["bash"]\n',
        {"data/a.txt": "1\n", "data/old/b.txt": "2\n"},
    )
    assert (tree / "app/work/seen").read_text() == "hello world\n"
    assert (tree / "opt/x/id").read_text().startswith("uid=0") and not (
        tree / "usr/lib/new"
    ).exists()
    assert [path.name for path in sorted((tree / "app/work").iterdir())] == [
        "apt",
        "data",
        "renamed",
        "seen",
    ]
    assert os.listdir(tree / "app/work/data") == ["a.txt"] and not (tree / "etc/passwd").exists()
    assert (tree / "app/work/renamed").stat().st_mode & 0o777 == 0o700
    assert (image.folder, image.user, image.variables["COLOR"]) == ("/app/work", "someone", "red")
    assert not {"GREETING", "APT_CONFIG"} & image.variables.keys()
    assert (tree / "app/work/apt").read_text() == 'APT::Sandbox::User "root";\n'


def test_a_run_line_sees_the_image_and_nothing_of_the_build_or_the_network(build: Any) -> None:
    tree, _ = build(
        "FROM tiny\nRUN for it in /proc/[0-9]*; do ls $it/root/layers $it/root/work && touch "
        "/app/seen; done; while read name value; do case $name in CapEff:) echo $value;; esac; "
        "done < /proc/self/status > /app/rights; while read line; do echo $line; done < "
        "/proc/net/route > /app/routes\n"
    )
    assert not (tree / "app/seen").exists()
    assert not int((tree / "app/rights").read_text(), 16) & 1 << 18, (
        "a RUN line may not call chroot"
    )
    assert len((tree / "app/routes").read_text().splitlines()) == 1, "there is only the header"


def _member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, size, 0o755
    info.devmajor = info.devminor = 1
    return info


HOSTILE = {
    "a hard link to a file of this machine": [_member("x", tarfile.LNKTYPE, "{secret}")],
    "a file behind a link that leads out": [
        _member("out", tarfile.SYMTYPE, "{folder}"),
        _member("out/secret", size=9),
    ],
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
            member = member.replace(
                name=member.name.format(**places), linkname=member.linkname.format(**places)
            )
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    try:
        tree, _ = build("FROM tiny\nADD --chmod=666 made.tar /opt/\n", build_mb=16)
    except ConfigError as error:
        assert "environment/Dockerfile cannot be built" in str(error)
    else:
        kinds = {stat.S_IFMT(path.lstat().st_mode) for path in (tree / "opt").rglob("*")}
        assert kinds <= {stat.S_IFREG, stat.S_IFDIR}
        assert not any(
            path.is_file() and path.read_text() == "private" for path in (tree / "opt").rglob("*")
        )
    assert (secret.read_text(), os.listdir(secret.parent)) == ("private", ["secret"])
    assert (secret.stat().st_mode & 0o777, secret.stat().st_uid) == (0o600, os.geteuid())


def test_files_that_two_images_have_take_their_space_once_and_a_finished_one_is_not_changed(
    build: Any,
) -> None:
    one, _ = build("FROM tiny\nRUN echo one > /app/file && mkdir /app/folder\n")
    two, _ = build(
        "FROM tiny\nRUN echo one > /app/file && mkdir /app/folder\nRUN echo two >> /app/file\n"
    )
    assert (one / "app/file").read_text() == "one\n" and (
        two / "app/file"
    ).read_text() == "one\ntwo\n"
    assert (one / "usr/bin/cat").stat().st_ino == (two / "usr/bin/cat").stat().st_ino


def test_only_steps_behind_a_change_are_executed_again(build: Any) -> None:
    dockerfile = "FROM tiny\nRUN echo $RANDOM$RANDOM > /app/first\nCOPY data /app/data\nRUN touch /app/second\n"
    first, _ = build(dockerfile, {"data": "1"})
    second, _ = build(dockerfile, {"data": "2"}, build_command="touch '/app/a third'")
    assert (first / "app/first").read_text() == (second / "app/first").read_text()
    assert (second / "app/data").read_text() == "2" and (second / "app/a third").exists()


def test_links_out_of_the_context_reach_nothing_of_this_machine(build: Any, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("secret")
    context = tmp_path / "tasks" / "answer" / "environment"
    context.mkdir(parents=True)
    (context / "link").symlink_to(tmp_path / "private")
    with pytest.raises(
        ConfigError, match='cannot be built: .*building at STEP "COPY link /x"'
    ) as caught:
        build("FROM tiny\nCOPY link /x\n")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "dockerfile",
    [None, "FROM tiny\nWORKDIR /app\n", "FROM tiny\nWORKDIR /app\nRUN echo 1 > /etc/new\n"],
)
def test_commands_in_an_image_find_localhost(
    built_from: dict[str, Any], tmp_path: Path, dockerfile: str | None
) -> None:
    test = "[[ $(cat /etc/hosts /app/seen) == 127.0.0.1*localhost*127.0.0.1* ]] && echo 1 > /logs/verifier/reward.txt\n"
    toml = '[environment]\ndocker_image = "tiny"\nworkdir = "/app"\n'
    task = make_task(tmp_path / "tasks", dockerfile=dockerfile, toml=toml, test=test)
    build_image(recipe_of(task), HarborSettings(**built_from), lambda line: None)
    env, info, _ = play(
        task.parent, "cat /etc/hosts > /app/seen; echo 1 > /etc/hosts", **built_from
    )
    assert info["reward"] == 1 and env.task.root is not None
    assert (env.task.root / "etc" / "hosts").read_text() == ""


def test_copy_sees_no_file_that_dockerignore_hides(build: Any) -> None:
    files = {".dockerignore": "**/*.pyc\nold\n", "a/x.pyc": "", "a/y": "1", "old/z": ""}
    tree, _ = build("FROM tiny\nCOPY . /app/\nCOPY a/* /all/\n", files)
    assert (tree / "app/a/y").read_text() == "1" and os.listdir(tree / "app/a") == os.listdir(
        tree / "all"
    ) == ["y"]
    assert not (tree / "app/old").exists()


@pytest.mark.parametrize(
    ("line", "options", "sentence"),
    [
        (
            "RUN echo no; exit 3",
            {},
            r"; no; .*building at STEP \"RUN echo no; exit 3\".* exit status 3",
        ),
        ("RUNN ls", {}, '(?i)unknown instruction: "?RUNN'),
        ("RUN sleep 60", {"build_timeout_s": 3.0}, "was stopped by its time limit"),
        (
            "RUN for i in 1 2 3 4 5; do dd if=/dev/zero of=/big$i bs=1M count=4; done; sleep 60",
            {"build_mb": 8},
            "was stopped by its disk limit|file size limit exceeded",
        ),
        pytest.param(
            "RUN dd if=/dev/zero of=/dev/null bs=300M count=9",
            {"memory_mb": 200},
            "was stopped by its memory limit",
            marks=pytest.mark.skipif(
                not groups.can_be_made(), reason="control groups cannot be made here"
            ),
        ),
    ],
)
def test_commands_that_fail_or_break_a_limit_are_named(
    build: Any, images: Path, line: str, options: dict[str, Any], sentence: str
) -> None:
    build("FROM tiny\n")  # fetches the base outside of these limits
    known = set(images.glob("tasks/*"))
    with pytest.raises(ConfigError, match=sentence):
        build(f"FROM tiny\n{line}\n", **options)
    assert not list(images.glob("building-*")) and set(images.glob("tasks/*")) == known


def test_a_task_is_played_in_its_built_image_and_an_edited_one_must_be_built_again(
    built_from: dict[str, Any], tmp_path: Path
) -> None:
    dockerfile = "FROM tiny\nRUN echo 42 > /usr/lib/secret\nWORKDIR /app\n"
    task = make_task(tmp_path / "tasks", dockerfile=dockerfile)
    config = write_config(tmp_path, **built_from)
    with pytest.raises(
        ConfigError, match="has no image of the task as it is now; run: slime-verlog build-images"
    ):
        play(task.parent, **built_from)
    assert slime_verlog("build-images", config) == 0
    assert play(task.parent, "cat /usr/lib/secret > answer.txt", **built_from)[1]["reward"] == 1.0
    (task / "environment" / "Dockerfile").write_text(f"{dockerfile}RUN false\n")
    context_digest.cache_clear()
    with pytest.raises(ConfigError, match="run: slime-verlog build-images"):
        play(task.parent, **built_from)
    assert slime_verlog("build-images", config) == 1


def test_a_change_deep_inside_an_exported_base_is_noticed(
    build: Any, base: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(base, tmp_path / "base", symlinks=True)
    (copied / "opt" / "deep").mkdir(parents=True)
    for text in ("old\n", "new\n"):
        (copied / "opt" / "deep" / "file").write_text(text)
        tree, _ = build(f"FROM tiny\nENV A={text}", base_sources={"tiny": str(copied)})
        assert (tree / "opt" / "deep" / "file").read_text() == text


def test_the_check_goes_on_with_the_tasks_whose_images_are_built(
    built_from: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, line in (("fine", "RUN echo 1 > /app/x"), ("one", "RUN false"), ("two", "RUN false")):
        dockerfile = f"FROM tiny\nWORKDIR /app\n{line}\n"
        make_task(tmp_path / "tasks", name, dockerfile=dockerfile, solution="echo 42 > answer.txt")
    config = write_config(tmp_path, **built_from)
    assert slime_verlog("check", config, "--max-turns", "1", "--no-prompt") == 1
    shown = capsys.readouterr().out
    assert "fine: the reference solution is paid 1 and the untouched files 0" in shown
    assert "not built: one, two" in shown
    shutil.rmtree(tmp_path / "tasks" / "one")
    shutil.rmtree(tmp_path / "tasks" / "two")
    Path(config).write_text(Path(config).read_text().replace('"tasks": ["*"]', '"tasks": []'))
    assert (
        slime_verlog("build-images", config) == 0 and "fine: ready after" in capsys.readouterr().out
    )


def test_an_oci_layout_is_unpacked_with_its_settings(
    build: Any, base: Path, tmp_path: Path
) -> None:
    if shutil.which("umoci") is None:
        pytest.skip("umoci is not installed; apt-get install -y umoci")
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
    tree, image = build(
        "FROM acme/tiny:1\nRUN echo $COLOR > color\n", base_sources={"acme/tiny:*": f"oci:{layout}"}
    )
    assert (tree / "app/color").read_text() == "red\n" and image.folder == "/app"
