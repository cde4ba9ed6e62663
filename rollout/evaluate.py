"""Plays held-out episodes to their end; results per task in slime's evaluation format."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from rollout.bridge.framework import RolloutFnEvalOutput
from rollout.bridge.sample import turn_facts
from rollout.data_source import EpisodeSource
from rollout.errors import EngineError
from rollout.play.episode import Episode, open_episode
from rollout.play.memory import Message
from rollout.play.metrics import mean
from rollout.play.player import Place, gather, play
from rollout.play.runtime import Runtime, get_runtime
from rollout.samples import evaluation_sample
from rollout.spec import EpisodeSpec
from rollout.transcript import Transcript
from rollout.turn import Generation, StopReason, Turn
from slime_verlog import BAR_S

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeResult:
    """One held-out episode."""

    spec: EpisodeSpec
    turns: tuple[Turn, ...]
    stop: StopReason
    fault: str | None
    """Why the environment was lost; None if it was not."""
    transcript: Transcript
    """Each turn as readable text."""

    def facts(self) -> dict[str, Any]:
        """Return the values that tables, metrics and the viewer show."""
        return self.transcript.facts(self.spec, self.stop, self.fault)


async def evaluate(args: Any, source: EpisodeSource) -> RolloutFnEvalOutput:
    """Play all of `source.eval_episodes()`, `n_env` at a time.

    `data[task]` has `rewards` (the return) and `truncated` of each episode in seed order, without those that failed
    unless all did, and `samples` of all of them (the last turn, whose metadata describes the whole episode). `metrics`
    come from `eval_metrics`.

    Raises:
        EngineError: the engine did not answer within the allowed retries, or refused more than a single prompt.
        ConfigError, EncodingError, PlayerError, MissingDependencyError: as `rollout.fixed_turn.generate_rollout`.
    """
    runtime = await get_runtime(args)
    results = await play_episodes(runtime, source.eval_episodes(), source.settings.n_env)
    by_task: dict[str, list[EpisodeResult]] = defaultdict(list)
    for result in results:
        by_task[result.spec.name].append(result)
    data: dict[str, dict[str, list[Any]]] = {}
    for name, group in by_task.items():
        played = [result for result in group if result.fault is None]
        if lost := [result.fault for result in group if result.fault is not None]:
            words = "%d of %d held-out episodes of %s failed and are in no mean: %s"
            logger.warning(words, len(lost), len(group), name, lost[-1])
        data[name] = {
            "rewards": [result.facts()["return"] for result in played or group],
            "truncated": [bool(result.turns and result.turns[-1].truncated) for result in played or group],
            "samples": [evaluation_sample(runtime.samples, r.spec, r.turns, r.facts()) for r in group],
        }
    return RolloutFnEvalOutput(data=data, metrics=eval_metrics(by_task))


async def play_episodes(runtime: Runtime, specs: Sequence[EpisodeSpec], at_once: int) -> list[EpisodeResult]:
    """Play the episodes, `at_once` at a time; return their results in the order of `specs`. Raises as `evaluate`."""
    places = asyncio.Semaphore(at_once)
    play_one = partial(play_episode, runtime) if runtime.players is None else runtime.players.evaluate
    with tqdm(total=len(specs), desc="evaluation", unit="episode", leave=False, mininterval=BAR_S) as progress:

        async def one(spec: EpisodeSpec) -> EpisodeResult:
            async with places:
                result = await play_one(spec)
                progress.update()
                return result

        return await gather(one(spec) for spec in specs)


async def play_episode(runtime: Runtime, spec: EpisodeSpec, *, detailed: bool = False) -> EpisodeResult:
    """Play one episode to its end; a lost environment or a refused prompt ends it.

    If `detailed`, the transcript keeps images, token ids, and every token's text and log-prob. Raises as `evaluate`.
    """
    turns, transcript = list[Turn](), Transcript()

    async def start() -> Episode:
        episode = await open_episode(runtime, spec, runtime.flags.eval_max_response_len)
        episode.max_turns, transcript.tools = episode.session.turn_limit, episode.reply.tools
        return episode

    place = Place(start)
    try:
        params = runtime.flags.sampling_params(evaluation=True)
        stop, fault = await _play(place, params, turns, transcript, detailed)
    except EngineError as error:
        stop, fault = after_refusal(error, transcript)
        turns[-1:] = [replace(turn, truncated=True) for turn in turns[-1:]]
    finally:
        await place.leave()
    return EpisodeResult(spec, tuple(turns), stop, fault, transcript)


async def _play(
    place: Place, params: Mapping[str, Any], turns: list[Turn], transcript: Transcript, detailed: bool
) -> tuple[StopReason, str | None]:
    """Play to the end of the episode, and return why it ended and its fault."""
    ended: list[tuple[StopReason, str | None]] = []
    messages: list[Message] = []
    images: list[str] = []

    async def may_issue() -> bool:
        return not ended

    async def ask(episode: Episode) -> Generation:
        messages[:] = episode.conversation.messages
        images[:] = episode.prompt.image_data if detailed else ()
        return await episode.generate(params)

    def record(episode: Episode, turn: Turn) -> None:
        turns.append(turn)
        ids = turn.generation.token_ids
        answer = episode.encoder.answer_text(ids, turn.generation.stop_id)  # as the environment read it
        info = turn_facts(turn) | {"metrics": turn.metrics, "finish_reason": str(turn.generation.finish_reason)}
        tokens = prompt_and_answer = None
        if detailed:
            tokens = {"text": [episode.encoder.decode([i]) for i in ids], "log_probs": list(turn.generation.log_probs)}
            prompt_and_answer = turn.prompt.token_ids, ids
        transcript.add(messages, images, answer, info, tokens, prompt_and_answer)
        if episode.stop is not None:
            ended.append((episode.stop, None))

    await play(place, may_issue, ask, record, lambda fault: ended.append((StopReason.FAILED, str(fault))))
    return ended[0]


def after_refusal(error: EngineError, transcript: Transcript) -> tuple[StopReason, str | None]:
    """Return how an episode ends whose next prompt the engine refused, and its fault; raises any other EngineError.

    The transcript's last turn becomes truncated.
    """
    if not error.concerns_prompt:
        raise error
    for turn in transcript.turns[-1:]:
        turn.update(truncated=True, done=True)
    if error.too_long and transcript.turns:
        return StopReason.CONTEXT, None
    return StopReason.FAILED, str(error)


def eval_metrics(by_task: dict[str, list[EpisodeResult]]) -> dict[str, float]:
    """Compute each task's means as `eval/<task>/<name>`; rates and `progression` are from 0 to 1.

    The names are `success`, its standard error `success_se`, `return`, `progression`, `turns` and `valid_action_ratio`,
    over the `episodes` that did not fail; `episodes_failed` is the number of the others.
    """
    metrics: dict[str, float] = {}
    for name, results in by_task.items():
        facts = [result.facts() for result in results if result.fault is None]
        metrics[f"eval/{name}/episodes"] = float(len(facts))
        metrics[f"eval/{name}/episodes_failed"] = float(len(results) - len(facts))
        if not facts:
            continue
        for key in ("success", "return", "progression", "turns", "valid_action_ratio"):
            metrics[f"eval/{name}/{key}"] = mean(fact[key] for fact in facts)
        success = metrics[f"eval/{name}/success"]
        metrics[f"eval/{name}/success_se"] = (success * (1 - success) / len(facts)) ** 0.5
    return metrics
