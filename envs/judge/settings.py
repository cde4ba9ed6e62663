"""The settings of the judge and of the environment that it judges."""

import os
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from envs.errors import ConfigError
from envs.judge.rubric import Rubric
from slime_verlog import Field, Settings


class JudgeSettings(Settings):
    """The judge's server and model, the rubric, when the judge is asked, and how its verdict enters the reward."""

    url: str
    """Address of the judge's server, `http://host:port`, with or without `/v1`."""
    api: Literal["openai", "sglang"] = "openai"
    """`openai` posts to `/v1/chat/completions`, which SGLang serves too; `sglang` posts token ids to `/generate`."""
    model: str = "default"
    """Model name in requests and in the cache. With `default`, the cache uses the name that the server reports."""
    tokenizer: str | None = None
    """Folder of the judge's tokenizer, for `api: sglang`; null asks the server for it."""
    api_key_env: str | None = None
    """Environment variable with the API key."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=1024, ge=1)
    """Tokens of one verdict, reasoning included."""
    timeout_s: float = Field(default=20.0, gt=0)
    """Seconds per attempt."""
    deadline_s: float = Field(default=50.0, gt=0)
    """Seconds for all attempts of one verdict together. Keep it below `env_step_timeout_s`."""
    max_retries: int = Field(default=4, ge=0)
    """Further attempts after a failed request or an unusable verdict."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Pause after the first failed request, in seconds; it doubles with every attempt."""
    cache: str | None = None
    """SQLite file that keeps verdicts, shared by all workers and runs. With it, a lost episode can be replayed."""
    rubric: Rubric | str = Field(union_mode="left_to_right")
    """What the judge scores, as a mapping or as the path of a YAML file that holds it."""
    when: Literal["end", "every"] = "end"
    """`end` judges the whole episode after its last turn; `every` judges each turn."""
    weight: float = 1.0
    """The verdict adds this number times its mean score, which is between 0 and 1, to the reward."""
    env_weight: float = 1.0
    """Factor on the environment's own reward."""
    feedback: bool = True
    """With `when: every`, show the judge's feedback with the next observation."""
    on_failure: Literal["fault", "zero"] = "fault"
    """Without a verdict, `fault` gives the episode up; `zero` counts the failure and adds no reward."""
    turns_shown: int = Field(default=16, ge=1)
    """Number of latest turns that the judge sees at the end of an episode."""
    text_chars: int = Field(default=4000, ge=100)
    """Characters of each observation and answer that the judge sees."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"env.judge.url must begin with http:// or https://, got {self.url!r}")
        if self.api_key_env is not None and self.api_key_env not in os.environ:
            raise ConfigError(f"env.judge.api_key_env: the environment has no variable {self.api_key_env}")
        return self


class JudgedSettings(Settings):
    """The YAML's `env:` mapping."""

    inner: str
    """The environment to judge: a module or a `.py` file."""
    judge: JudgeSettings
    """The judge."""
    options: Mapping[str, Any] = {}
    """The `env:` mapping of the inner environment."""
