"""The custom YAML as a settings model; invalid settings are refused here, before any GPU is used.

`KEY=VALUE` on a command line overrides a YAML's keys, and slime's flags.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Annotated, Any, Literal, Self, cast

from pydantic import model_validator

from advantage.settings import AdvantageSettings
from rollout.errors import ConfigError
from slime_verlog import Field, Settings, parse_yaml, read_settings, read_yaml_mapping

CORE_FLAGS = frozenset(
    """
    advantage_estimator custom_config_path data_source_path eps_clip gamma global_batch_size hf_checkpoint kl_coef
    lambd load lr n_samples_per_prompt num_critic_only_steps num_rollout rollout_batch_size rollout_function_path
    rollout_max_context_len rollout_max_response_len rollout_seed rollout_temperature rollout_top_k rollout_top_p save
    """.split()  # noqa: SIM905 - reads better as words
)
"""Flags of slime's own that it reads before the YAML, which must therefore not hold them."""


_READ = {
    "window": {"n"},
    "actions_only": {"n"},
    "periodic_clear": {"period"},
    "full": set[str](),
    "inline_notes": {"n", "notes_chars"},
    "notes": {"every", "budget", "keep", "max_tokens"},
}
"""The keys that each kind of memory reads with `history: window`."""
_READ_BY_COMPACTION = {"free", "keep", "times", "max_tokens"}
"""The keys that `notes` reads with `history: full`."""


COMPACTED = {"kind": "notes", "free": 10_240, "keep": 2, "times": 3, "max_tokens": 2048}
"""The `memory` of `preset: glm52`, beside `history: full`."""


class MemorySettings(Settings):
    """The past turns that a prompt shows in `history: window`; see `rollout/play/memory.py`.

    With `history: full`, only `notes` applies: when the context is nearly full, the model writes
    its notes, and the conversation goes on from the task, these notes and the last turns.
    """

    kind: str = "window"
    """`window`: the last `n` turns. `actions_only`: the same, with the executed action in place of
    each response. `periodic_clear`: all turns since the last clearing. `full`: all turns.
    `inline_notes`: the last `n` turns, and the notes that the model wrote last as a line of a
    response. `notes`: the turns since the model last wrote its notes, which it does in a separate
    turn, and those notes. Or the import path of a factory."""
    n: int = Field(default=1, ge=0)
    """Past turns that `window`, `actions_only` and `inline_notes` show; `notes` refuses it and has
    `keep`."""
    period: int = Field(default=16, ge=1)
    """Turns after which `periodic_clear` empties the memory."""
    notes_chars: int = Field(default=400, ge=1, le=4096)
    """Characters of notes that `inline_notes` shows; longer notes are cut."""
    every: int = Field(default=10, ge=1)
    """`notes`: environment turns after which the model writes its notes."""
    budget: int = Field(default=1024, ge=1)
    """`notes`: the model also writes its notes before a prompt that would have more tokens than
    this."""
    keep: int = Field(default=1, ge=0)
    """`notes`: past turns that stay in the prompt when the model has written its notes."""
    max_tokens: int = Field(default=128, ge=1)
    """`notes`: the longest notes, in tokens; longer ones are cut."""
    free: int = Field(default=10_240, ge=1)
    """`notes` with `history: full`: the model writes its notes when fewer tokens of the context
    than this are left."""
    times: int = Field(default=3, ge=1)
    """`notes` with `history: full`: how often in an episode; after that, a full context ends it."""

    def unread(self, history: str) -> list[str]:
        """Return the given keys that `kind` does not read; none for a factory, which may read them
        all."""
        if self.kind not in _READ:
            return []
        read = _READ[self.kind]
        if history == "full":
            read = _READ_BY_COMPACTION if self.kind == "notes" else set[str]()
        return [f"memory.{key}" for key in sorted(self.model_fields_set - {"kind", *read})]

    @model_validator(mode="after")
    def _no_window_beside_notes(self) -> Self:
        if self.kind == "notes" and "n" in self.model_fields_set:
            raise ConfigError(
                f"memory.n: {self.n} does nothing with memory.kind: notes; remove it or set "
                "memory.keep"
            )
        return self


class EngineSettings(Settings):
    """When a failed `/generate` request is repeated, and after which pause."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds to wait for one response."""
    max_retries: int = Field(default=6, ge=0)
    """How often a request is repeated after a refused or lost connection, a timeout, an HTTP error
    or a malformed response. With `--use-fault-tolerance` the default is higher, so that slime can
    replace a dead engine first."""
    backoff_s: float = Field(default=0.5, gt=0)
    """Longest pause before the first repetition, in seconds; it doubles with each further one."""
    backoff_max_s: float = Field(default=20.0, gt=0)
    """Upper limit of that pause, in seconds."""


class EvalSettings(Settings):
    """Held-out episodes, played between updates and never trained on."""

    episodes: int = Field(default=64, ge=1)
    """Episodes per task; episode k plays seed `seed_start` + k."""
    seed_start: int = Field(default=1_000_000_000, ge=0)
    """First held-out seed."""
    tasks: tuple[Any, ...] = ()
    """Tasks to evaluate, written as in `tasks`; an empty list means the training tasks."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns after which a held-out episode counts as truncated; leave it out for the training
    limit."""


class RolloutSettings(AdvantageSettings):
    """Every key of the custom YAML (`--custom-config-path`)."""

    rollout_interaction_env_path: str
    """The environment: a module such as `envs.babyai`, or a `.py` file."""
    env: Mapping[str, Any] = {}
    """Options of the environment; its module checks them."""
    tasks: tuple[Any, ...] = ()
    """Task names, or mappings {task, weight, env, options, sweep}."""
    seed_start: int = Field(default=0, ge=0)
    """Seed of the first training episode. Those after it play the seeds after it, except for the
    held-out ones."""
    eval: EvalSettings = EvalSettings()

    history: Literal["window", "full"] = "window"
    """`window`: the memory builds every prompt. `full`: each prompt appends to the whole
    conversation."""
    memory: MemorySettings = MemorySettings()
    samples: Literal["chains", "turns"] = "chains"
    """`chains`: turns whose prompts repeat the turn before them share a training sample, which
    trains the same at a fraction of the cost. `turns`: each turn is a sample."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns after which an episode counts as truncated; leave it out for the environment's own
    limit."""
    tokenization_sanity_check: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """How strictly a prompt is compared with its one-shot encoding (the whole conversation encoded
    in one call). A difference in an episode's first prompt fails the episode; a later one is
    counted and does not stop the run."""
    use_inference_chat_template: bool = False
    """Let the chat template shorten earlier responses, as it does when serving (Qwen3 drops their
    reasoning)."""
    chat_template_kwargs: Mapping[str, Any] = {}
    """Passed to the chat template, for example {enable_thinking: false}."""
    max_image_pixels: int = Field(default=2_097_152, ge=1)
    """Larger images are scaled down to this size. The default is slightly over 1920 x 1080. With
    Qwen3-VL it gives about 2,048 tokens, one per 32 x 32 pixels."""
    max_observation_chars: int = Field(default=65_536, ge=1)
    """Characters per observation; a longer one is cut in the middle, with a note and a count. A
    first observation of a task that is longer stops the run before it starts."""
    max_observation_images: int = Field(default=16, ge=1)
    """Images per observation; further ones are left out, with a note."""

    n_env: int = Field(default=32, ge=1)
    """Number of slots. Each slot plays one episode after another, so this many episodes are in
    progress at once."""
    rollout_processes: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = 1
    """Processes that play the slots of fixed-turn and continuous batches, and a run's held-out
    episodes. 1: slime's own process plays. Otherwise it keeps the batch alone. `auto`: one per 4
    engines. In a Ray cluster they are actors on any node. `slime-verlog evaluate` plays in one
    process, whatever the number."""
    turn_quota: Literal["global", "per_env"] = "global"
    """`global`: all slots draw from one common budget of turns. `per_env`: every slot plays the
    same number of turns."""
    stagger_turns: int | None = Field(default=None, ge=1)
    """The usual turns of an episode; null: off, as Verlog. Slots that begin together play the same
    stretch of the game in each batch. With this, the first episode of slot k of n is given up at
    the end of the batch in which it has k/n of these turns; its cut is bootstrapped like any
    other."""
    max_staleness: int = Field(default=1, ge=1, le=4)
    """With `rollout.continuous`: the largest number of actor updates between playing and training a
    turn."""
    stale_turns: Literal["wait", "mask"] = "wait"
    """With `rollout.continuous`: what happens if a turn is so slow that it would be older than
    `max_staleness`. `wait`: the last batch that may train on it waits for it. `mask`: no batch
    waits; the turn keeps its place in its episode and its tokens get no loss."""
    bootstrap_on_time_limit: bool = False
    """After a time limit, use the critic's value for the rest of the episode. False uses 0, as
    Verlog does."""

    env_backend: Literal["inline", "process", "ray"] = "process"
    """Where environments run: threads of this process, worker processes, or Ray actors."""
    env_workers: int | None = Field(default=None, ge=1)
    """Number of worker processes, over all `rollout_processes`; leave it out for one per CPU core,
    at most `n_env`."""
    env_step_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one step may take before the worker is replaced."""
    env_reset_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds for building and resetting an environment."""
    max_env_retries_per_turn: int = Field(default=2, ge=0)
    """How often an environment may be restarted and replayed within one turn before its episode is
    given up."""
    max_episode_failures_per_batch: int = Field(default=8, ge=0)
    """Episodes that may be given up in one batch before the run stops."""
    max_turn_retries: int = Field(default=8, ge=0)
    """How often a turn may be requested again after the engine aborted it."""
    engine: EngineSettings = EngineSettings()
    checkpoints_kept: int | None = Field(default=None, ge=1)
    """Number of latest steps whose checkpoints (actor, critic and rollout state) stay on disk;
    leave it out to keep all."""

    @property
    def joins_episodes(self) -> bool:
        """Whether a whole episode is one sample: its prompts only grow, and its turns share
        samples."""
        return self.history == "full" and self.samples == "chains" and self.memory.kind != "notes"

    @classmethod
    def with_preset(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """As in the base class; `glm52` sets `history` and `memory` as well."""
        given = super().with_preset(given)
        if given.get("preset") != "glm52":
            return given
        keys: dict[str, Any] = {"history": "full", **given}
        memory = given.get("memory", {})
        if isinstance(memory, Mapping) and "kind" not in memory and keys["history"] == "full":
            keys["memory"] = {**COMPACTED, **cast(Mapping[str, Any], memory)}
        return keys

    @model_validator(mode="after")
    def _possible_together(self) -> Self:
        if self.history == "full" and self.use_inference_chat_template:
            raise ConfigError(
                "use_inference_chat_template drops earlier reasoning, so tokens cannot be "
                "appended; use history: window with it, or leave it false"
            )
        if self.history == "full" and self.memory.kind == "inline_notes":
            raise ConfigError(
                "history: full shows every response, and the notes in them, in one conversation "
                "that only grows; memory.kind: inline_notes replaces old notes, so use history: "
                "window with it"
            )
        if self.history == "full" and self.memory.kind == "notes" and self.memory.keep == 0:
            raise ConfigError(
                "memory.keep: 0 would leave the current observation without the response that it "
                "replies to; with history: full, give memory.keep at least 1"
            )
        return self


YAML_KEYS = frozenset(RolloutSettings.model_fields)


def load_settings(args: Any) -> RolloutSettings:
    """Read the plugin's settings from slime's `args`, and the YAML again to find unknown keys.

    Raises ConfigError for an unreadable file, an unknown or mistyped key, a flag of slime's or a
    wrong combination.
    """
    path = getattr(args, "custom_config_path", None)
    given = read_yaml_mapping(str(path), "--custom-config-path") if path else {}
    known = {name: getattr(args, name) for name in YAML_KEYS if hasattr(args, name)}
    return check_keys({**given, **known})


def check_keys(keys: Mapping[str, Any]) -> RolloutSettings:
    """Return the YAML's mapping as settings; raises ConfigError as `load_settings`."""
    for key in keys:
        if key in CORE_FLAGS:
            flag = "--" + key.replace("_", "-")
            raise ConfigError(
                f"'{key}' is one of slime's own flags, read before the YAML; give {flag} instead"
            )
    try:
        json.dumps(dict(keys), default=_refuse, skipkeys=True, check_circular=False)
    except RecursionError as error:
        raise ConfigError(
            "the YAML is nested too deep, or an alias in it contains itself"
        ) from error
    return read_settings(RolloutSettings, keys)


def _refuse(value: Any) -> None:
    """Raise ConfigError for a value that a checkpoint cannot hold."""
    if isinstance(value, date | bytes | set):
        kind = type(cast("object", value)).__name__
        raise ConfigError(
            f"the YAML has {cast('object', value)}, a {kind}, which no checkpoint can hold; write "
            "it as text, in quotes"
        )


def with_assignments(
    config: Mapping[str, Any], assignments: Sequence[str], option: str, example: str = "memory.n=4"
) -> dict[str, Any]:
    """Set keys such as `memory.n` in a copy of `config`; a ConfigError about a malformed one shows
    the `example`."""
    changed = dict(config)
    for assignment in assignments:
        key, text = split_assignment(assignment, option, example)
        changed = set_key(changed, key, read_value(text, assignment))
    return changed


def split_assignment(assignment: str, option: str, example: str) -> tuple[str, str]:
    """Return the key and the text of `KEY=VALUE`; raises ConfigError for another form."""
    key, equals, text = assignment.partition("=")
    if not equals or not text or not all(key.split(".")):
        raise ConfigError(f"{option} must look like {example}, got {assignment!r}")
    return key, text


def read_value(text: str, assignment: str) -> Any:
    """Return the value of an assignment; raises ConfigError if it is neither JSON nor YAML."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return parse_yaml(text, f"the value in {assignment[:100]!r}")


def set_key(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with the dotted key `path` set; raises ConfigError if it leads through a
    scalar."""
    head, _, rest = path.partition(".")
    if not rest:
        return {**config, head: value}
    found: Any = config.get(head) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path} cannot be set, because {head} is {found!r}")
    return {**config, head: set_key(cast(Mapping[str, Any], found), rest, value)}
