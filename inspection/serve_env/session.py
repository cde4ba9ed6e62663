"""One client's session: its frames become steps of an environment in the worker pool."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from envs.mixture import TaskSpec
from envs.openenv.protocol import (
    ErrorCode,
    MalformedFrameError,
    NotJsonError,
    Reply,
    Request,
    read_frame,
    write_frame,
)
from inspection.serve_env.frames import Answer, ResetRequest, ShownState, error_frame, observation_frame, shown
from rollout.bridge.settings import RolloutSettings
from rollout.errors import ConfigError, EnvironmentFault, SlimeVerlogError
from rollout.spec import EnvSpec
from rollout.tasks import make_episode, pick_task
from rollout.workers.pool import EnvPool, EnvSession
from slime_verlog import read_settings


class Catalogue:
    """The tasks that are served, and the pool that plays them."""

    def __init__(self, settings: RolloutSettings, drawn: Sequence[TaskSpec], others: Sequence[TaskSpec]) -> None:
        """Offer all these tasks; an episode without a task in `reset` plays one of `drawn`."""
        self.settings, self.pool = settings, EnvPool(settings)
        self._drawn = list(drawn)
        self.tasks = {task.name: task for task in drawn}
        known = [_content(task) for task in drawn]
        for task in others:
            if _content(task) not in known:
                self.tasks[f"eval/{task.name}" if task.name in self.tasks else task.name] = task
        self._seeds = itertools.count(settings.seed_start)

    def choose(self, request: ResetRequest) -> tuple[str, EnvSpec]:
        """The name of the episode's task, and its environment.

        Raises:
            ConfigError: there is no such task.
        """
        if request.task is not None and request.task not in self.tasks:
            raise ConfigError(f"unknown task {request.task!r}; this server has {', '.join(self.tasks)}")
        seed = next(self._seeds) if request.seed is None else request.seed
        name = request.task or pick_task(self._drawn, 0, seed).name
        return name, make_episode(self.settings, self.tasks[name], 0, seed).env


def _content(task: TaskSpec) -> tuple[Any, ...]:
    """What is played under a task's name."""
    return task.env_path, task.task, dict(task.options)


class Session:
    """One environment; every frame gets one reply, except `close`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._env: EnvSession | None = None
        self._state = ShownState(episode_id=None, step_count=0, task=None, seed=None, done=False)
        self._instruction: str | None = None

    async def answer(self, frame: str | bytes) -> str | None:
        """The reply to a frame; None ends the session."""
        try:
            kind, data = read_frame(frame)
            match kind:
                case Request.RESET:
                    return await self._reset(read_settings(ResetRequest, data, "reset."))
                case Request.STEP:
                    return await self._step(read_settings(Answer, data, "step."))
                case Request.STATE:
                    return write_frame(Reply.STATE, self._state.model_dump())
                case Request.CLOSE:
                    return None
            known = ", ".join(other for other in Request if other is not Request.MCP)
            return error_frame(ErrorCode.UNKNOWN_TYPE, f"this server has no requests of type {kind!r}; it has {known}")
        except NotJsonError as error:
            return error_frame(ErrorCode.INVALID_JSON, f"the client sent {error}")
        except MalformedFrameError as error:
            example = write_frame(Request.STEP, {"message": "..."})
            return error_frame(ErrorCode.VALIDATION_ERROR, f"the client sent {error}; it must look like {example}")
        except ConfigError as error:
            return error_frame(ErrorCode.VALIDATION_ERROR, str(error))
        except SlimeVerlogError as error:
            return error_frame(ErrorCode.EXECUTION_ERROR, str(error).partition("\n")[0])

    async def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            await self._env.close()
        self._env = None

    async def _reset(self, request: ResetRequest) -> str:
        task, spec = self._catalogue.choose(request)
        await self.close()
        self._instruction = None
        self._env = await self._catalogue.pool.open(spec)
        seed = spec.metadata["seed"]
        self._state = ShownState(episode_id=request.episode_id, step_count=0, task=task, seed=seed, done=False)
        return await self._shown(None, {})

    async def _step(self, request: Answer) -> str:
        env, state = self._env, self._state
        if env is None or state.done:
            raise EnvironmentFault("the episode is over; send reset" if state.done else "no episode runs; send reset")
        try:
            reply = await env.step(request.message)
        except EnvironmentFault:
            await self.close()
            raise
        info = reply.info
        assert info is not None
        steps = state.step_count + 1
        at_limit = env.turn_limit is not None and steps >= env.turn_limit
        self._state = state.model_copy(update={"step_count": steps, "done": reply.done or at_limit})
        details = {
            "terminated": info["terminated"],
            "truncated": self._state.done and not info["terminated"],
            "valid_action": info["valid_action"],
            "executed_action": info["executed_action"],
            "progression": float(info["progression"]),
            "metrics": dict(info.get("metrics") or {}),
        }
        return await self._shown(float(info["reward"]), details)

    async def _shown(self, reward: float | None, details: Mapping[str, Any]) -> str:
        assert self._env is not None and self._env.reply is not None
        reply, known = self._env.reply, self._instruction
        self._instruction = reply.instruction_prompt
        # On a thread, because encoding images takes milliseconds.
        observation = await asyncio.to_thread(shown, reply, known)
        where = {"task": self._state.task, "seed": self._state.seed}
        return observation_frame(observation, reward, self._state.done, {**where, **details})
