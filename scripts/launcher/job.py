"""A job as data, and as the scripts that `--dry-run` and `--flat` print."""

import json
import re
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from scripts.launcher.variables import Variables

GROUPS = {
    "LAYOUT": "GPUs, and whether training and serving share them",
    "MODEL": "the model's shape, from slime's scripts/models",
    "CKPT": "weights: where they come from and where they are saved",
    "HOOK": "what this project plugs into slime",
    "ROLLOUT": "a batch: its turns, their lengths, sampling",
    "EVAL": "held-out episodes",
    "PPO": "advantages and losses",
    "OPTIMIZER": "optimizer",
    "PERF": "parallelism and memory of training",
    "SGLANG": "serving",
    "TRACKING": "where metrics go",
    "MISC": "numerics",
    "EXTRA": "from the command line, after --",
}
"""The groups of flags in the order in which later flags win, and what each is for."""


@dataclass(frozen=True)
class Job:
    """What Ray is asked to run, and the YAML files that it reads."""

    script: str
    """The script that describes it, such as `run_crafter.sh`."""
    purpose: str
    """The comment at the script's head."""
    program: str
    """slime's train.py or train_async.py, with its path."""
    groups: dict[str, list[str]]
    """The words of each group in `GROUPS`."""
    model_lines: list[str]
    """Shell commands that set MODEL_ARGS, the words of the group MODEL."""
    environment: dict[str, str]
    """Variables that every process of the job gets."""
    address: str
    """Ray's job server."""
    name: str
    """Name of the run's folder."""
    run_dir: str
    config: str
    """Text of `run_dir`/config.yaml."""
    roles: str
    """Text of `run_dir`/roles.yaml; empty without a critic."""
    preparation: str = ""
    """Shell commands that must run first, if any."""

    @property
    def words(self) -> list[str]:
        """The command line of `program`, without the program."""
        return [word for name in GROUPS for word in self.groups[name]]

    def submission(self) -> list[str]:
        """Return the command that hands the job to Ray."""
        environment = f"--runtime-env-json={runtime_environment(self.environment)}"
        head = ["ray", "job", "submit", f"--address={self.address}", environment]
        return [*head, "--", "python3", self.program, *self.words]


def runtime_environment(variables: dict[str, str], separator: str = ", ") -> str:
    """Return the variables as Ray takes them."""
    return json.dumps({"env_vars": variables}, ensure_ascii=False, separators=(separator, ": "))


def dry_run(job: Job) -> str:
    """Return a script that submits the job, with one flag per line."""
    lines = [
        "#!/usr/bin/env bash",
        f"# What scripts/{job.script} submits. Only {job.run_dir} was written so far.",
        *(_group(name, job.groups[name]) for name in GROUPS),
        "",
    ]
    options = map(shlex.quote, job.submission()[3:5])
    command = ["ray job submit", *options, f"-- python3 {shlex.quote(job.program)}"]
    return "\n".join([*lines, _continued([*command, *map(_expansion, GROUPS)])])


FLAT = """\
#!/usr/bin/env bash
{purpose}
#
# Printed by: bash scripts/{script} --flat
# It starts a new run, with the same flags as scripts/{script}. That script also resumes a run, and it checks the
# flags before it uses a GPU.
set -euo pipefail

{paths}

[ -d "$REPO/rollout" ] || {{ echo "error: $REPO is not the slime-verlog checkout; set REPO" >&2; exit 2; }}
[ ! -e "$RUN_DIR/critic" ] && [ ! -e "$RUN_DIR/actor" ] ||
  {{ echo "error: $RUN_DIR holds a run; resume it with: bash scripts/{script}" >&2; exit 2; }}
mkdir -p "$RUN_DIR"

cat > "$RUN_DIR/config.yaml" << 'END'
{config}
END
"""
ROLES = """
cat > "$RUN_DIR/roles.yaml" << END
{roles}
END
"""
START_RAY = """\
# A Ray head on this machine; delete this line if one is running.
ray start --head --num-gpus={gpus} --dashboard-port=8265 --disable-usage-stats
"""
ENVIRONMENT = """
PATHS=$REPO:$SLIME_PATH:$MEGATRON_PATH${{PYTHONPATH:+:$PYTHONPATH}}
RUNTIME_ENV_JSON="{environment}"

"""


def flat(job: Job, given: Variables) -> str:
    """Return the job as one script in the style of slime's examples, which starts a new run.

    Its words may begin with variables that the script sets: SLIME_PATH, MODELS, RUN_DIR and PATHS.
    """
    paths = given.model_dump(
        include={"slime_path", "megatron_path", "models", "output"}, by_alias=True
    )
    notes = {
        "REPO": "  # the slime-verlog checkout",
        "SLIME_PATH": "  # the checkout whose train.py runs",
    }
    notes["MODELS"] = "  # scripts/prepare_model.sh puts checkpoints here"
    settings = [
        f"{name}=${{{name}:-{path}}}{notes.get(name, '')}"
        for name, path in {"REPO": "$PWD", **paths}.items()
    ]
    settings.append(f"RUN_DIR=$OUTPUT/{job.name}")
    comment = textwrap.wrap(
        _purpose(job.purpose, given.num_gpus), 117, break_on_hyphens=False, break_long_words=False
    )
    text = FLAT.format(
        purpose="\n".join(f"# {line}" for line in comment),
        script=job.script,
        paths="\n".join(settings),
        config=job.config,
    )
    text += ROLES.format(roles=job.roles) if job.roles else ""
    text += "".join(f"\n{line}\n" for line in job.model_lines)
    filled = [name for name in GROUPS if job.groups[name]]
    text += "".join(f"{_group(name, job.groups[name])}\n" for name in filled)
    text += f"\n{job.preparation}\n" if job.preparation else ""
    environment = runtime_environment(job.environment, ",\n  ")
    text += ENVIRONMENT.format(environment=environment.replace('"', '\\"'))
    text += START_RAY.format(gpus=given.num_gpus) if given.num_nodes == 1 else ""
    command = [f"ray job submit --address={job.address}", '--runtime-env-json="$RUNTIME_ENV_JSON"']
    expansions = [_expansion(name) for name in GROUPS if name in filled or name == "MODEL"]
    return text + _continued([*command, f'-- python3 "{job.program}"', *expansions])


def _purpose(header: str, gpus: int) -> str:
    """The first sentences of the script's header, with the number of GPUs that this run takes."""
    sentences = header.partition("\n  ")[0].replace("\n", " ")
    return re.sub(r"\d* GPUs unless NUM_GPUS says otherwise", f"{gpus} GPUs", sentences)


def _continued(lines: Iterable[str]) -> str:
    return " \\\n  ".join(lines)


def _expansion(group: str) -> str:
    return f'"${{{group}_ARGS[@]}}"'


def _group(name: str, words: list[str]) -> str:
    """An array of the shell with one flag per line, after an empty line."""
    text = f"\n{name}_ARGS=(  # {GROUPS[name]}"
    for word in words:
        text += f"\n  {word}" if word.startswith("--") else f" {quoted(word)}"
    return f"{text}\n)"


def quoted(word: str) -> str:
    """Quote a word for the shell; paths that begin with a variable of `flat` keep it."""
    if re.fullmatch(r"\$(RUN_DIR|MODELS|SLIME_PATH)(/[\w./-]*)?", word):
        return f'"{word}"'
    return shlex.quote(word)
