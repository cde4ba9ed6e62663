"""Builds the images of Harbor tasks from their Dockerfiles, without a container daemon.

    slime-verlog build-images my_tasks.yaml
    slime-verlog build-images my_tasks.yaml --task fix-git --set env.images=/data/images

Builds each task's Dockerfile with buildah in a sandbox and keeps the image below `env.images`; what
is there already is not built again. Without `tasks` in the YAML, the images of all tasks are built.
`env.base_sources` says where base images come from. Prints one line per task. The exit code is 0 if
every image was built.
"""

import argparse
from typing import Any

from inspection import target

add_arguments = target.add_arguments


def run(options: argparse.Namespace) -> int:
    """Build the images of every task, and return the exit code."""
    from slime_verlog import ConfigError

    chosen = target.read_target(options.target, options.task, options.set, default="*")
    tasks = [task for task in chosen.tasks if task.env_path == "envs.harbor"]
    if not tasks:
        raise ConfigError(
            f"{options.target} has no tasks of envs.harbor, and only these have images to build"
        )
    failed = [
        name for task in tasks for name, is_built in build_images_of(task).items() if not is_built
    ]
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}")
    return int(bool(failed))


def build_images_of(task: Any) -> dict[str, bool]:
    """Build the images of a Harbor task, or of all tasks of `*`; print a line for each; return
    which were built."""
    import time

    from envs.harbor import select_folders
    from envs.harbor.dockerfile import UnsupportedLine
    from envs.harbor.images.build import build_image
    from envs.harbor.settings import HarborSettings
    from envs.harbor.task import recipe_of
    from slime_verlog import SlimeVerlogError, read_settings

    settings = read_settings(HarborSettings, task.options, "env.")
    settings.image_store()
    built = {}
    for folder in select_folders(task.task, settings):
        began = time.monotonic()
        try:
            build_image(recipe_of(folder), settings, lambda text: print(f"  {text}", flush=True))
        except (SlimeVerlogError, UnsupportedLine, OSError) as error:
            built[folder.name] = False
            print(
                f"{folder.name}: not built: {str(error).removeprefix(f'{folder.name}: ')}",
                flush=True,
            )
        else:
            built[folder.name] = True
            print(f"{folder.name}: ready after {time.monotonic() - began:.0f} s", flush=True)
    return built
