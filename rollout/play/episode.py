"""One live episode: starts it, asks the engine, steps the environment, records the turn, and builds
the next prompt.

Invariant: a turn reaches the environment exactly once, unless it was asked for notes, which the
environment never gets. After an aborted or failed generation, the same prompt is sent again before
the environment sees anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.bridge.trace import SpanLog
from rollout.errors import ConfigError, EncodingError, EnvironmentFault, TurnAbortedError
from rollout.play.parts import Runtime
from rollout.play.prompts import Prompts
from rollout.play.request import complete_params, differing_prompt, routing_headers
from rollout.play.whole_prompts import WholePrompts
from rollout.spec import EpisodeSpec, Replay
from rollout.turn import FinishReason, Generation, Prompt, Segment, StopReason, Turn
from rollout.workers.pool import EnvSession, ReplayError
from rollout.workers.reply import check_history

logger = logging.getLogger(__name__)

ABORT_PAUSE_S = 0.2
"""Pause before a turn that was aborted more than once is sent again."""


class Episode:
    """An episode between two turns: `prompt` is the next prompt, `stop` says why the episode ended
    (None: it runs)."""

    def __init__(
        self, runtime: Runtime, spec: EpisodeSpec, session: EnvSession, prompts: Prompts
    ) -> None:
        """Encode the first prompt; raises EncodingError, and ConfigError if it does not fit."""
        self.runtime = runtime
        self.spec = spec
        self.session = session
        self.prompts = prompts
        self.index = 0
        self.steps = 0
        """Turns that the environment got; in the others, the model wrote its notes."""
        self.max_turns = spec.env.max_turns
        """Turns of the environment after which the episode counts as truncated; None for no
        limit."""
        self.stop: StopReason | None = None
        self.total_reward = 0.0
        self.answers: list[tuple[int, ...]] = []
        """Token ids of every response so far: tuples, which the garbage collector stops tracking,
        unlike lists."""
        self.stepped: list[bool] = []
        """Whether the environment got each of them."""
        self.prompt: Prompt = prompts.first()
        self.writes_notes = False
        """Whether `prompt` asks for notes."""
        self.has_next_prompt = True
        """False once the last observation could not be encoded; `prompt` then shows the state
        before it."""
        self._spans = SpanLog(runtime.traced)

    @property
    def digests(self) -> list[str]:
        """The digests of everything that the environment has shown."""
        return self.session.digests

    async def generate(
        self, params: Mapping[str, Any], gives_up: Callable[[], bool] = lambda: False
    ) -> Generation:
        """Ask the engine for the response; an aborted request is sent again, unless `gives_up` says
        to return it.

        Raises:
            EngineError: as the client's.
            TurnAbortedError: the turn was aborted more often than `max_turn_retries` allows.
        """
        assert self.stop is None, "the episode is over"
        runtime = self.runtime
        aborts = 0
        while (
            generation := await self._request(params)
        ).finish_reason is FinishReason.ABORT and not gives_up():
            aborts += 1
            runtime.counters["turns_aborted"] += 1
            if aborts > runtime.settings.max_turn_retries:
                raise TurnAbortedError(
                    f"turn {self.index} of episode {self.spec.episode_id} was aborted {aborts} "
                    "times (max_turn_retries bounds this)"
                )
            if aborts > 1:
                await asyncio.sleep(ABORT_PAUSE_S)
        return generation

    async def _request(self, params: Mapping[str, Any]) -> Generation:
        """Send the prompt to the engine once; the generation may be aborted."""
        flags = self.runtime.flags
        spec = self.spec
        began_s = time.time()
        params = complete_params(params, self.prompts.encoder, flags, spec, self.index)
        if self.writes_notes:
            most = self.prompts.conversation.notes_tokens or 0
            params["max_new_tokens"] = min(most, params.get("max_new_tokens", most))
        headers = routing_headers(flags, spec)
        extra = {"return_routed_experts": True} if flags.use_rollout_routing_replay else None
        generation = await self.runtime.engine.generate(
            self.prompt, params, headers=headers, extra=extra
        )
        if (difference := differing_prompt(generation, self.prompt)) is not None:
            name, words = difference
            self.runtime.count_fault(name, spec.episode_id, words)
        self._spans.add_request(began_s, generation.meta_info)
        return generation

    async def step(self, generation: Generation, engine_s: float = 0.0) -> Turn:
        """Step the environment with a finished generation, record the turn, and build the next
        prompt.

        If the prompt asked for notes, the environment gets nothing. Raises EnvironmentFault if the
        environment is lost, and this turn with it.
        """
        generation = self.prompts.encoder.without_placeholders(generation)
        if not generation.trained:
            self.runtime.counters["answers_with_placeholder"] += 1
        play = self._write_notes if self.writes_notes else self._step_environment
        turn = replace(await play(generation), engine_s=engine_s, spans=self._spans.take())
        self.answers.append(tuple(generation.token_ids))
        self.stepped.append(turn.stepped)
        self.index += 1
        self.steps += turn.stepped
        self.total_reward += turn.reward
        return await self._look_ahead(turn)

    async def _step_environment(self, generation: Generation) -> Turn:
        prompts = self.prompts
        sent_s = time.time()
        shown = prompts.reply.observation
        reading = prompts.read(generation)
        reply = await self.session.step(reading.text)
        self._spans.add_step(sent_s, reply)
        info = reply.info
        assert info is not None, "a step has an info"
        prompts.answered(shown, self.prompt, generation, info)
        span = reading.own_span(info.get("action_span"))
        return replace(
            self._turn(generation),
            action=info.get("action"),
            valid=info["valid_action"],
            executed_action=info["executed_action"],
            reward=float(info["reward"]),
            terminated=info["terminated"],
            truncated=info["truncated"] and not info["terminated"],
            action_span=prompts.encoder.token_span(generation.token_ids, span),
            moves=info.get("moves", True),
            env_s=reply.seconds,
            notes=prompts.conversation.inline_notes,
            notes_events=prompts.conversation.notes_events,
        )

    async def _write_notes(self, generation: Generation) -> Turn:
        """Give the response to the conversation alone; the turn's state is that of the
        environment's last turn."""
        summary = self.prompts.noted(self.prompt, generation)
        notes = self.prompts.conversation.notes
        return replace(self._turn(generation), moves=False, notes=notes, summary=summary)

    def _turn(self, generation: Generation) -> Turn:
        """What is known of a turn from the environment's last reply, apart from its outcome."""
        info = self.prompts.reply.info
        assert info is not None, "notes are written after a step"
        return Turn(
            episode_id=self.spec.episode_id,
            index=self.index,
            prompt=self.prompt,
            generation=generation,
            progression=float(info["progression"]),
            metrics={name: float(value) for name, value in (info.get("metrics") or {}).items()},
        )

    async def _look_ahead(self, turn: Turn) -> Turn:
        """Build the next prompt; the episode ends if the prompt does not fit or `max_turns` is
        reached.

        Nothing is noted after a limit.
        """
        self.writes_notes = False
        at_limit = self.max_turns is not None and self.steps >= self.max_turns
        if turn.done:
            self.stop = StopReason.TERMINATED if turn.terminated else StopReason.TIME_LIMIT
        if turn.terminated:
            await self._check_last_prompt()
            return turn
        if not self.prompts.reply.messages:  # a limit ended an agent that has not asked again
            self.has_next_prompt = False
            return turn
        fits = True
        try:
            may_write_notes = not at_limit and self.stop is None
            self.prompt, fits, self.writes_notes = await self.prompts.after(turn, may_write_notes)
        except EncodingError as error:
            # For example an image that cannot be read. The episode ends, the batch goes on.
            logger.warning(
                "episode %d ends at turn %d: %s", self.spec.episode_id, turn.index, error
            )
            self.stop = self.stop or StopReason.ENCODING
            self.has_next_prompt = False
        if not fits:
            self.stop = self.stop or StopReason.CONTEXT
        if at_limit:
            self.stop = self.stop or StopReason.MAX_TURNS
        if self.stop is None:
            return turn
        if self.has_next_prompt:
            await self._check_last_prompt()
        return replace(turn, truncated=True)

    async def _check_last_prompt(self) -> None:
        await self.prompts.check_last(self.prompt, self.answers[-1])

    def segment(self, turns: Sequence[Turn], stop: StopReason) -> Segment:
        """Return these turns, the last ones played, as a segment that ended because of `stop`.

        It has a bootstrap prompt if the batch or a lost environment ended it, after a limit with
        `bootstrap_on_time_limit` if the next prompt fits, and never after a final state.
        """
        wanted = not stop.is_end
        if stop.is_end and turns[-1].truncated and self.runtime.settings.bootstrap_on_time_limit:
            wanted = self.has_next_prompt and self.runtime.flags.fits(len(self.prompt.token_ids))
        bootstrap = self.prompt if wanted else None
        return Segment(self.spec.name, tuple(turns), bootstrap, stop, self.total_reward, self.steps)

    async def close(self) -> None:
        await self.session.close()


async def open_episode(
    runtime: Runtime, spec: EpisodeSpec, replay: Replay | None = None
) -> Episode:
    """Start an episode in this process or another one; with `replay`, give it the same responses
    again.

    Raises:
        EnvironmentFault: the environment could not be started, or its first prompt cannot be
            encoded or does not fit.
        ReplayError: a replay showed something else.
        EncodingError: the chat template does not show the environment's tools.
    """
    if runtime.players is not None:
        return await runtime.players.open(spec, replay)
    episode = await start_episode(runtime, spec)
    # An episode without responses starts afresh: nothing of it was handed out.
    if replay is not None and replay.answers:
        await _play_again(episode, replay)
    return episode


async def start_episode(
    runtime: Runtime, spec: EpisodeSpec, response_len: int | None = None
) -> Episode:
    """Start an episode's environment in this process and encode its first prompt. Raises as
    `open_episode`."""
    session = await runtime.pool.open(spec.env)
    try:
        assert session.reply is not None, "an open session has a reply"
        encoder = runtime.encoder_for(session.reply.tools)
        try:
            check_history(session.reply, runtime.settings.history)
            prompts_of = WholePrompts if session.reply.whole_prompts else Prompts
            prompts = prompts_of(runtime, spec, session, encoder, response_len)
            return await asyncio.to_thread(Episode, runtime, spec, session, prompts)
        except (EncodingError, ConfigError) as error:
            raise EnvironmentFault(f"{error}\n{session.describe()}") from error
    except BaseException:
        await session.close()
        raise


async def _play_again(episode: Episode, replay: Replay) -> None:
    """Give the episode its earlier responses; closes it and raises ReplayError if it shows
    something else."""
    try:
        if not episode.prompts.reply.deterministic:
            raise ReplayError(
                "the environment is not deterministic, so the episode cannot be replayed"
            )
        episode.session.replayed = True
        for token_ids, to_environment in zip(replay.answers, replay.stepped, strict=True):
            if episode.writes_notes is to_environment:
                raise ReplayError(
                    "the memory asks for notes at other turns than when the episode was played"
                )
            stop_id = token_ids[-1] if token_ids else None
            replayed = Generation(
                token_ids, [0.0] * len(token_ids), "", FinishReason.STOP, stop_id=stop_id
            )
            await episode.step(replayed)
        if episode.digests != list(replay.digests) or episode.stop is not None:
            raise ReplayError("the replayed episode differs from the original")
        episode.session.replayed = False
    except BaseException:
        await episode.close()
        raise
