"""One live episode: prompt, engine, environment, record; the same for every rollout that drives episodes.

Invariant: a turn reaches the environment exactly once. An aborted or failed generation is issued again with the
same prompt before the environment sees anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envs.base import Observation
from envs.plain_text import LONG_CHARS, LONGEST_KEPT
from rollout.errors import ConfigError, EncodingError, EngineError, EnvironmentFault
from rollout.play.memory import Exchange, Message, build_messages
from rollout.play.runtime import Runtime
from rollout.spec import EpisodeSpec
from rollout.tokens.encoding import DeltaEncoder
from rollout.turn import FinishReason, Generation, Prompt, Segment, StopReason, Turn
from rollout.workers.pool import EnvSession
from rollout.workers.reply import EnvReply

logger = logging.getLogger(__name__)

ABORT_PAUSE_S = 0.2
"""Pause before an aborted turn is issued again: the engine is taking new weights and would abort it again."""


class Episode:
    """The state between two turns. `prompt` is always the next one; `stop` says why the episode ended."""

    def __init__(self, spec: EpisodeSpec, session: EnvSession, encoder: DeltaEncoder, runtime: Runtime) -> None:
        self.spec = spec
        self.session = session
        self.encoder = encoder
        self.runtime = runtime
        self.index = 0
        self.stop: StopReason | None = None
        self.total_reward = 0.0
        self.answers: list[tuple[int, ...]] = []
        """Token ids of every answer so far: with the seed, all that a checkpoint needs of the episode.

        Tuples, since the garbage collector walks every list of every live turn, and lets go of tuples of numbers.
        """
        horizon = runtime.memory.horizon if runtime.settings.history == "window" else 0
        self.past: deque[Exchange] = deque(maxlen=horizon)
        self.conversation: list[Message] = []
        """What the current prompt says, as messages; for the sanity check alone."""
        self.prompt: Prompt = self._first_prompt()

    @property
    def reply(self) -> EnvReply:
        assert self.session.reply is not None
        return self.session.reply

    def _first_prompt(self) -> Prompt:
        prompt = self._window_prompt() if self.runtime.settings.history == "window" else self._full_prompt(None)
        if not self.runtime.fits(prompt):
            raise ConfigError(
                f"the first prompt of task {self.spec.name!r} has {len(prompt.token_ids)} tokens; with "
                f"--rollout-max-response-len {self.runtime.flags.rollout_max_response_len} it does not fit: raise "
                "--rollout-max-context-len (and --rollout-max-prompt-len)"
            )
        self.encoder.check(self.conversation, prompt.token_ids)
        return prompt

    def _window_prompt(self) -> Prompt:
        reply = self.reply
        self.conversation = build_messages(
            self.runtime.memory,
            reply.instruction_prompt,
            list(self.past),
            reply.observation,
            self.index,
            reply.answer_format,
        )
        return self.encoder.prompt(self.conversation)

    def _full_prompt(self, generation: Generation | None) -> Prompt:
        reply = self.reply
        *earlier, last = reply.messages
        messages = [*earlier, _ask(last, reply.answer_format)]
        if generation is None:
            system = {"role": "system", "content": reply.instruction_prompt}
            self.conversation = [system, *messages] if reply.instruction_prompt else messages
            return self.encoder.prompt(self.conversation)
        prompt = self.encoder.append(self.prompt, generation.token_ids, messages)[0]
        answer = {"role": "assistant", "content": self.encoder.answer_text(generation.token_ids)}
        self.conversation += [answer, *messages]
        return prompt

    async def play_turn(self, params: Mapping[str, Any]) -> Turn:
        """Generate the answer, step the environment, prepare the next prompt.

        Raises:
            EngineError: no usable answer within the retries allowed; the environment was not touched.
            EnvironmentFault: the environment is lost; the turn never happened.
        """
        assert self.stop is None, "the episode is over"
        began = time.perf_counter()
        generation = await self.generate(params)
        engine_s = time.perf_counter() - began
        return await self.take(generation, engine_s)

    async def take(self, generation: Generation, engine_s: float = 0.0) -> Turn:
        """Give a finished generation to the environment and record the turn."""
        encoder = self.encoder
        generation = encoder.without_placeholders(generation)
        if not generation.trained:
            self.runtime.counters["answers_with_placeholder"] += 1
        text = encoder.answer_text(generation.token_ids)
        shown = self.reply.observation
        reply = await self.session.step(text)
        info = reply.info
        assert info is not None
        turn = Turn(
            episode_id=self.spec.episode_id,
            index=self.index,
            prompt=self.prompt,
            generation=generation,
            action=info.get("action"),
            valid=info["valid_action"],
            executed_action=info["executed_action"],
            reward=float(info["reward"]),
            terminated=info["terminated"],
            truncated=info["truncated"] and not info["terminated"],
            action_span=_action_tokens(encoder, generation.token_ids, info.get("action_span")),
            progression=float(info["progression"]),
            metrics={name: float(value) for name, value in (info.get("metrics") or {}).items()},
            engine_s=engine_s,
            env_s=reply.seconds,
        )
        self.past.append(Exchange(shown, text, turn.valid, turn.executed_action))
        self.answers.append(tuple(generation.token_ids))
        self.index += 1
        self.total_reward += turn.reward
        return await self._look_ahead(turn)

    async def _look_ahead(self, turn: Turn) -> Turn:
        """Build the next prompt; the turn is the last one if there is no room or no turn left for it."""
        if turn.done:
            self.stop = StopReason.TERMINATED if turn.terminated else StopReason.TIME_LIMIT
        if turn.terminated:
            await self._check_conversation()
            return turn
        try:
            self.prompt = await self._next_prompt(turn.generation)
            fits = self.runtime.fits(self.prompt)
        except EncodingError as error:
            # A picture that cannot be read, or placeholders that the model wrote: the episode ends, not the batch.
            logger.warning("episode %d ends at turn %d: %s", self.spec.episode_id, turn.index, error)
            self.stop, fits = self.stop or StopReason.ENCODING, True
        if not fits:
            self.stop = self.stop or StopReason.CONTEXT
        limit = self.spec.env.max_turns
        if limit is not None and self.index >= limit:
            self.stop = self.stop or StopReason.MAX_TURNS
        if self.stop is None:
            return turn
        if self.stop is not StopReason.ENCODING:
            await self._check_conversation()
        return replace(turn, truncated=True)

    def segment(self, turns: Sequence[Turn], stop: StopReason) -> Segment:
        """These turns, the last ones played, as a segment that ended because of `stop`.

        The value of its bootstrap prompt stands in for the rest of the episode: always if the batch or a lost
        environment ended the segment, after a limit if `bootstrap_on_time_limit` and the next prompt fits, and never
        after a final state.
        """
        possible = turns[-1].truncated and stop is not StopReason.ENCODING and self.runtime.fits(self.prompt)
        wanted = not stop.is_end or (self.runtime.settings.bootstrap_on_time_limit and possible)
        bootstrap = self.prompt if wanted else None
        return Segment(self.spec.name, tuple(turns), bootstrap, stop, self.total_reward, self.index)

    async def _check_conversation(self) -> None:
        """Compare the last prompt with its one-shot encoding; a difference is counted, it does not end a run."""
        if self.runtime.settings.tokenization_sanity_check == "disable":
            return
        try:
            await asyncio.to_thread(self.encoder.check, self.conversation, self.prompt.token_ids)
        except EncodingError as error:
            if not self.runtime.counters["sanity_check_failed"]:
                logger.warning("tokenization_sanity_check, episode %d: %s", self.spec.episode_id, error)
            self.runtime.counters["sanity_check_failed"] += 1

    async def _next_prompt(self, generation: Generation) -> Prompt:
        build = self._window_prompt if self.runtime.settings.history == "window" else None
        shown = [self.reply.observation, *(exchange.observation for exchange in self.past)]
        long_instruction = len(self.reply.instruction_prompt) > LONGEST_KEPT
        if long_instruction or any(map(_takes_long, shown)):  # milliseconds, which the event loop does not have
            return await asyncio.to_thread(build or (lambda: self._full_prompt(generation)))
        return build() if build else self._full_prompt(generation)

    async def ask(self, params: Mapping[str, Any]) -> Generation:
        """Ask the engine once; its answer may be an abort."""
        runtime = self.runtime
        params = self._seeded(params)
        if self.encoder.placeholder_ids:
            # An image placeholder in an answer would stand for a picture that does not exist.
            params = {**params, "logit_bias": {str(token): -100.0 for token in self.encoder.placeholder_ids}}
        return await runtime.engine.generate(
            self.prompt, params, headers=self._routing(), extra=runtime.flags.request_extra
        )

    def _seeded(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Under deterministic inference, a seed of the turn's own, from the one that the outer loop may have given.

        One seed for all turns of an episode would draw the same random numbers at each of them.
        """
        flags = self.runtime.flags
        if not flags.sglang_enable_deterministic_inference:
            return params
        base = params.get("sampling_seed", flags.rollout_seed)
        return {**params, "sampling_seed": (base * 1_000_003 + self.spec.episode_id * 1009 + self.index) % 2**31}

    async def generate(self, params: Mapping[str, Any]) -> Generation:
        """Ask the engine, again if it aborts, until there is a whole answer."""
        retries = 0
        while (generation := await self.ask(params)).finish_reason is FinishReason.ABORT:
            retries += 1
            await self.after_abort(retries)
        return generation

    async def after_abort(self, retries: int) -> None:
        """Count an aborted answer and pause; `retries` counts the aborts of the turn so far.

        Raises:
            EngineError: the turn was aborted more often than `max_turn_retries` allows.
        """
        runtime = self.runtime
        runtime.counters["turns_aborted"] += 1
        if retries > runtime.settings.max_turn_retries:
            raise EngineError(
                f"turn {self.index} of episode {self.spec.episode_id} was aborted {retries} times (max_turn_retries "
                "bounds this)"
            )
        await asyncio.sleep(ABORT_PAUSE_S)

    def _routing(self) -> dict[str, str] | None:
        """Keep an episode on the engine that holds its prefix, where the router hashes by key."""
        if self.runtime.flags.router_policy != "consistent_hashing":
            return None
        return {"X-SMG-Routing-Key": self.spec.routing_key}

    async def close(self) -> None:
        await self.session.close()


async def open_episode(runtime: Runtime, spec: EpisodeSpec) -> Episode:
    """Start the episode's environment and encode its first prompt.

    Raises:
        EnvironmentFault: the environment could not be started, or what it shows first cannot be encoded or does not
            fit into the context. One odd episode is given up within the failure budget; if all are, the batch stops.
        EncodingError: the chat template hides the environment's tools, as it would in every episode.
    """
    session = await runtime.pool.open(spec.env)
    try:
        encoder = runtime.encoder_for(session.reply.tools if session.reply else ())
        try:
            return await asyncio.to_thread(Episode, spec, session, encoder, runtime)
        except (EncodingError, ConfigError) as error:
            raise EnvironmentFault(f"{error}\n{session.describe()}") from error
    except BaseException:
        await session.close()
        raise


def _takes_long(observation: Observation) -> bool:
    """Whether encoding the observation takes more than a millisecond."""
    parts = observation["text"]
    texts = (observation["obs_str"], parts["long_term_context"], parts["short_term_context"])
    return bool(observation.get("multi_modal_data")) or max(map(len, texts)) > LONG_CHARS


def _action_tokens(
    encoder: DeltaEncoder, token_ids: list[int], span: tuple[int, int] | None
) -> tuple[int, int] | None:
    """The tokens that spell the action; None where the environment found none."""
    tokens = encoder.token_span(token_ids, span) if span is not None and span[0] < span[1] else None
    return tokens if tokens is not None and tokens[0] < tokens[1] else None


def _ask(message: Mapping[str, Any], answer_format: str) -> dict[str, Any]:
    """The environment's message with the request for an answer at its end."""
    if not answer_format:
        return dict(message)
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}\n\n{answer_format}"}
    return {**message, "content": [*content, {"type": "text", "text": f"\n\n{answer_format}"}]}
