"""A study as its YAML file describes it: one question, the variants that answer it, and what all runs share.

Keys, flags and warm-start settings are given twice: for the whole study, and for a variant, whose values win.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from slime_verlog import ConfigError, Field, Settings, merge, read_settings, read_yaml

FOLDER = Path(__file__).with_name("definitions")
PLAYED = ("rollout_interaction_env_path", "env", "tasks", "eval", "max_turns")
"""Keys that decide which environments are built and how they are tried."""


class Variant(Settings):
    """One of the compared settings; it names only what differs from the study."""

    keys: Mapping[str, Any] = {}
    """Keys of the YAML in `config`, nested as in the file."""
    flags: Mapping[str, Any] = {}
    """slime's flags, as in `embedded/arguments.py`."""
    warm: Mapping[str, Any] = {}
    """Fields of `embedded.warmstart.imitation.WarmStart`."""
    share: float = Field(default=1.0, gt=0)
    """Share of the study's updates that this variant trains."""


class Study(Variant):
    """A whole study."""

    question: str
    """What the study asks; the title of its table and plot."""
    note: str = ""
    """How to read the result."""
    name: str = ""
    """Name of the folder with the results; default: the file's name."""
    config: str = "custom_configs/quickstart.yaml"
    """The YAML that the variants change."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of imitation, training episodes and sampling; each variant runs once per seed."""
    updates: int = Field(default=40, ge=1)
    """Updates per run, critic warm-up included."""
    eval_episodes: int = Field(default=128, ge=1)
    """Held-out seeds per task."""
    eval_interval: int = Field(default=10, ge=1)
    """Updates between two evaluations."""
    measure: Literal["success", "progression", "return"] = "success"
    """What held-out episodes are compared by: win rate, BALROG's progression, or the sum of rewards."""
    scale: tuple[float, float] = (0.0, 1.0)
    """What random play and the expert reach on the held-out episodes; contrasts count from 0 to 1 between them."""
    contrasts: Mapping[str, Mapping[str, float]] = {}
    """Planned comparisons by name, the primary one first: the sign of each variant's area under the held-out curve."""
    compares_time: bool = False
    """Table and plot show wall time and not only CPU time. Runs then go one after the other."""
    variants: Mapping[str, Variant]
    """The compared settings by name."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if not self.variants:
            raise ConfigError("variants is empty; name at least one")
        if not self.seeds or min(self.seeds) < 0:
            raise ConfigError(f"seeds must be a list of integers that are at least 0, got {list(self.seeds)}")
        for name in filter(None, (*self.variants, self.name)):
            if "/" in name or name.startswith("."):
                raise ConfigError(f"{name!r} cannot be the name of a folder; leave out '/' and a leading '.'")
        unknown = {name for signs in self.contrasts.values() for name in signs} - set(self.variants)
        if unknown:
            raise ConfigError(f"contrasts name {sorted(unknown)[0]!r}, which is not one of the variants")
        if self.scale[0] >= self.scale[1]:
            raise ConfigError(f"scale must rise from random play to the expert, got {list(self.scale)}")
        return self

    def score(self, value: float) -> float:
        """Scale a held-out result to 0 for random play and 1 for the expert."""
        low, high = self.scale
        return (value - low) / (high - low)

    def variant(self, name: str) -> Variant:
        """Return the variant of this name with what all variants share; raises ConfigError if there is none."""
        if name not in self.variants:
            raise ConfigError(f"{self.name} has no variant {name!r}; choose from {', '.join(self.variants)}")
        own = self.variants[name]
        shared = {key: merge(getattr(self, key), getattr(own, key)) for key in ("keys", "flags", "warm")}
        return Variant(**shared, share=self.share * own.share)


def study_names() -> list[str]:
    """List the studies that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_study(name: str, overrides: Mapping[str, Any] | None = None) -> Study:
    """Load the study with this name, or in this YAML file; `overrides` replace fields of the file.

    Raises ConfigError, with the file's name, if the study does not exist or is invalid.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and name not in study_names():
        raise ConfigError(f"unknown study {name!r}; choose one of {', '.join(study_names())}, or give a YAML file")
    content = read_yaml(str(path), "study")
    named = {"name": path.stem, **content} if isinstance(content, Mapping) else content
    try:
        read_settings(Study, named)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return read_settings(Study, {**named, **(overrides or {})})


def check_study(study: Study) -> None:
    """Try the settings of every variant and build its environments once; an error names the variant."""
    from embedded.arguments import build_args
    from embedded.pretraining import split_run
    from embedded.warmstart.imitation import WarmStart
    from rollout.bridge.settings import check_keys
    from rollout.data_source import EpisodeSource
    from rollout.tasks import try_each_task

    built: list[Any] = []
    for name in study.variants:
        variant = study.variant(name)
        try:
            keys = run_keys(study, variant)
            settings = check_keys(keys)
            for stage in filter(None, split_run(keys, {"hf_checkpoint": "", **variant.flags}, Path())):
                EpisodeSource(build_args(stage.keys, **stage.flags))
            read_settings(WarmStart, variant.warm, "warm.")
        except ConfigError as error:
            raise ConfigError(f"variant {name!r}: {error}") from error
        played = [getattr(settings, field) for field in PLAYED]
        if played not in built:
            built.append(played)
            try_each_task(settings)


def run_keys(study: Study, variant: Variant) -> dict[str, Any]:
    """Build the keys of the YAML that a variant of a study runs with."""
    from embedded.arguments import read_keys

    return merge(merge(read_keys(study.config), {"eval": {"episodes": study.eval_episodes}}), variant.keys)
