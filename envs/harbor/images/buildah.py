"""Runs buildah and skopeo in a sandbox that shows this machine's programs and the folders of the
build, nothing else.

From outside to inside: bubblewrap with the mounts and a user without rights; in it a user
namespace, in which that user is root; in that, buildah, whose RUN lines see only the image (chroot)
and cannot leave it (no CAP_SYS_CHROOT). Control groups limit all of it. All files have one owner,
so changes of owners and users succeed without effect (`build_filter`). This needs neither root nor
a range of users.
"""

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.errors import ConfigError
from envs.harbor.settings import HarborSettings
from envs.swe.sandbox.filters import build_filter
from envs.swe.sandbox.sandbox import find_bwrap, find_tool, system_mounts
from envs.swe.sandbox.supervise import FILTERS, Limits, Outcome, supervise
from envs.swe.sandbox.usage import tree_bytes
from envs.tools.results import clip

BUILD_USER = 60999
"""Owner of an image's files if the trainer runs as root."""
WORK = "/work"
"""Where the sandbox shows the folder of one build."""
_LAYERS = "/layers"
_APT = "/sys/apt.conf"
"""Where RUN lines see apt's settings: the folder /sys is the sandbox's own in them."""
FIRST_LINE = f"ARG APT_CONFIG={_APT}\n"
"""Line of each stage that leaves nothing in the image: `--env` of buildah 1.28 does not reach RUN
lines."""
_STORAGE = (
    "--log-level",
    "error",
    "--root",
    _LAYERS,
    "--runroot",
    "/tmp/run",
    "--storage-driver",
    "overlay",
)
_BUILD = (
    *("bud", "--layers", "--pull-never", "--isolation", "chroot", "--network", "host"),
    *("--cap-drop", "CAP_SYS_CHROOT"),
)
_PROCESSES = 1024
_FILES = 1 << 16
UNLIMITED_MB = 1 << 20
_VARIABLES = {
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/tmp",
    "TMPDIR": f"{WORK}/out",
    "_CONTAINERS_USERNS_CONFIGURED": "done",
}


def give_to_builder(path: Path) -> None:
    """Hand a file or folder to the owner of images, but not what is in it."""
    if os.geteuid() == 0:
        os.chown(path, BUILD_USER, BUILD_USER)


@dataclass
class Buildah:
    """The layers in `store`, and the folder `work` of one build, which is removed at its end."""

    store: Path
    work: Path
    settings: HarborSettings
    stop_at: float = field(init=False)

    def __post_init__(self) -> None:
        for tool in ("buildah", "skopeo"):
            find_tool(tool, tool)
        self.stop_at = time.monotonic() + self.settings.build_timeout_s
        for folder in (self.layers, self.out):
            folder.mkdir(exist_ok=True)
            give_to_builder(folder)
        # apt would switch to another user for downloads, and check that it did.
        (self.work / "apt.conf").write_text('APT::Sandbox::User "root";\n', encoding="utf-8")
        (self.work / "passwd").write_text("root:x:0:0:root:/tmp:/bin/sh\n", encoding="utf-8")

    @property
    def layers(self) -> Path:
        return self.store / "layers"

    @property
    def out(self) -> Path:
        """The one folder in `work` that the sandbox may change."""
        return self.work / "out"

    def build(self, *words: str, megabytes: int = UNLIMITED_MB) -> None:
        """Run `buildah bud`; raises ConfigError with the end of its output if it fails or breaks a
        limit."""
        outcome = self._run(["buildah", *_STORAGE, *_BUILD, *words], megabytes)
        if outcome.returncode or outcome.stopped:
            self._run(["buildah", *_STORAGE, "rm", "--all"])
            raise ConfigError(f"environment/Dockerfile cannot be built: {_why(outcome)}")

    def import_layout(self, layout: str, name: str) -> None:
        """Unpack an OCI layout into the layers; raises ConfigError if that fails."""
        target = f"containers-storage:[overlay@{_LAYERS}+/tmp/run]{name}"
        outcome = self._run(
            ["skopeo", "copy", "--quiet", "--insecure-policy", f"oci:{layout}", target]
        )
        if outcome.returncode or outcome.stopped:
            raise ConfigError(
                f"a base image cannot be unpacked: {_why(outcome)}; check env.base_sources"
            )

    def export(self, name: str, folder: str) -> None:
        """Copy the files of an image to `out`; raises ConfigError if that fails. `bud --output`
        ignores deletions."""
        storage = shlex.join(["buildah", *_STORAGE])
        made = (
            f'made=$({storage} from --pull-never "$1") && cp -a "$({storage} mount "$made")" "$2"'
        )
        outcome = self._run(
            ["sh", "-c", f"{made} && {storage} rm --all", "sh", name, f"{WORK}/out/{folder}"]
        )
        if outcome.returncode or outcome.stopped:
            raise ConfigError(f"the finished image cannot be copied: {_why(outcome)}")

    def config(self, name: str) -> dict[str, Any] | None:
        """The settings of an image, in OCI's names; None if there is no such image."""
        outcome = self._run(["buildah", *_STORAGE, "inspect", "--type", "image", name])
        return None if outcome.returncode else json.loads(outcome.output)["OCIv1"].get("config", {})

    def _run(self, argv: Sequence[str], megabytes: int = UNLIMITED_MB) -> Outcome:
        limits = Limits(
            seconds=max(self.stop_at - time.monotonic(), 1.0),
            memory_mb=self.settings.memory_mb,
            address_mb=UNLIMITED_MB,
            processes=_PROCESSES,
            file_mb=megabytes,
            files=_FILES,
            tree_mb=megabytes,
            output_mb=1024,
            keep_bytes=1 << 20,
        )
        known = set(self.layers.glob("overlay/*/diff"))

        def written() -> int:
            fresh = set(self.layers.glob("overlay/*/diff")) - known
            # Only buildah writes to `out`, copies of layers among others, and closes some of its
            # own folders there.
            return tree_bytes(self.out, may_hide=True) + sum(map(tree_bytes, fresh))

        return supervise([*self._machine(), *_as_root(), *argv], [build_filter()], limits, written)

    def _machine(self) -> list[str]:
        """The outer layer: mounts, and a user without rights."""
        layer = [
            find_bwrap(),
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        layer += [
            "--die-with-parent",
            "--new-session",
            *system_mounts(),
            "--proc",
            "/proc",
            "--dev",
            "/dev",
        ]
        if not self.settings.build_network:
            layer.append("--unshare-net")
        for name in ("/tmp", "/var/tmp", "/run", "/sys"):
            layer += [
                "--perms",
                "0755",
                "--dir",
                os.path.dirname(name),
                "--perms",
                "1777",
                "--dir",
                name,
            ]
        for name in ("/etc/hosts", "/etc/resolv.conf", "/etc/ssl", "/etc/containers"):
            layer += ["--perms", "0755", "--dir", "/etc", "--ro-bind-try", name, name]
        for name, place in (("passwd", "/etc/passwd"), ("apt.conf", _APT)):
            layer += ["--ro-bind", str(self.work / name), place]
        layer += ["--bind", str(self.work), WORK, "--bind", str(self.layers), _LAYERS]
        if os.geteuid() != 0:
            return [*layer, "--unshare-user"]
        drop = [
            find_tool("setpriv"),
            f"--reuid={BUILD_USER}",
            f"--regid={BUILD_USER}",
            "--clear-groups",
        ]
        return [*layer, *drop, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def _as_root() -> list[str]:
    """The inner layer, in which the user without rights is root."""
    layer = [
        find_bwrap(),
        "--unshare-user",
        "--uid",
        "0",
        "--gid",
        "0",
        "--cap-add",
        "ALL",
        "--die-with-parent",
    ]
    layer += ["--bind", "/", "/", "--dev", "/dev", FILTERS, "--clearenv"]
    return [*layer, *(word for item in _VARIABLES.items() for word in ("--setenv", *item))]


def _why(outcome: Outcome) -> str:
    if outcome.stopped:
        return f"it was stopped by its {outcome.stopped} limit"
    lines = [" ".join(clip(line, 300).split()) for line in outcome.output.splitlines()[-8:]]
    return (
        "; ".join(filter(None, lines))
        or f"exit status {outcome.returncode}, and nothing was printed"
    )
