"""Runs one command of a Dockerfile as the only user of its image, root, in a sandbox that changes nothing else.

From outside to inside: a sandbox with this machine's programs; in it a user namespace, in which our user without rights
is root and mounts an overlay over the finished tree; in that, the command with the overlay as its root. Files have one
owner, so changes of owners and users succeed without effect (see `seccomp_filter`).
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.harbor.images.layers import inside
from envs.swe.sandbox.sandbox import WITHOUT_ROOT, find_bwrap, system_mounts
from envs.swe.sandbox.seccomp import seccomp_filter
from envs.swe.sandbox.supervise import BUILD_FILTER, OUTER_FILTER, Limits, Outcome, supervise
from envs.swe.sandbox.workspace import give_to_agent

_APT = "/dev/apt.conf"
_RIGHTS = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETFCAP")
_NETWORK_FILES = ("/etc/hosts", "/etc/resolv.conf")


def run_in_image(
    tree: Path, work: Path, argv: Sequence[str], folder: str, variables: Mapping[str, str], limits: Limits
) -> Outcome:
    """Run a command on an overlay over `tree`, with its changes in `work / "upper"`; `work` must be empty."""
    for name in ("upper", "work", "merged"):
        (work / name).mkdir()
        give_to_agent(work / name)
    # apt would switch to another user for downloads, and check that it did.
    (work / "apt.conf").write_text('APT::Sandbox::User "root";\n', encoding="utf-8")
    as_root = [find_bwrap(), "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL", "--dev-bind", "/", "/"]
    options = "lowerdir=/build/tree,upperdir=/build/work/upper,workdir=/build/work/work,userxattr"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, "/build/work/merged"]
    given = {"APT_CONFIG": _APT, **variables}
    mounted = ["sh", "-c", f'{shlex.join(mount)} && exec "$@"', "sh", *_image_layer(tree, folder, given)]
    limited = ["prlimit", f"--nproc={limits.processes}", f"--fsize={limits.file_mb << 20}", "--core=0", "--"]
    command = [*_machine_layer(tree, work), *limited, *as_root, *mounted, *argv]
    return supervise(command, limits, work / "upper")


def _machine_layer(tree: Path, work: Path) -> list[str]:
    """The outermost sandbox: this machine's programs, the network, and the folders of the build."""
    as_agent, own_user = (WITHOUT_ROOT, ()) if os.geteuid() == 0 else ((), ("--unshare-user",))
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    layer = [find_bwrap(), *spaces, "--die-with-parent", "--new-session"]
    layer += [OUTER_FILTER] if seccomp_filter(inside=False) else []
    layer += [*own_user, *system_mounts(), "--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
    layer += ["--ro-bind", str(work / "apt.conf"), _APT]
    for name in _NETWORK_FILES:
        layer += ["--ro-bind-try", name, name]
    layer += ["--dir", "/build", "--ro-bind", str(tree), "/build/tree", "--bind", str(work), "/build/work"]
    layer += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin:/usr/sbin:/sbin"]
    return [*layer, *as_agent]


def _image_layer(tree: Path, folder: str, variables: Mapping[str, str]) -> list[str]:
    """The innermost sandbox, which shows the image."""
    layer = [find_bwrap(), "--die-with-parent", "--bind", "/build/work/merged", "/"]
    layer += ["--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc"]
    for name in _NETWORK_FILES:
        # A link would lead out of the image while bubblewrap looks for the place.
        if inside(tree, name) == tree / name.lstrip("/"):
            layer += ["--ro-bind-try", name, name]
    layer += ["--cap-drop", "ALL", *(word for right in _RIGHTS for word in ("--cap-add", right))]
    layer += [BUILD_FILTER] if seccomp_filter(inside=True, pretend=True) else []
    layer += ["--chdir", folder, "--clearenv"]
    return [*layer, *(word for item in variables.items() for word in ("--setenv", *item))]
