"""One live episode: asks the engine, steps the environment, records the turn, and builds the next prompt.

Invariant: a turn reaches the environment exactly once, unless it was asked for notes, which the environment never gets.
After an aborted or failed generation, the same prompt is sent again before the environment sees anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from envs.base import Observation
from envs.plain_text import LONG_CHARS, MAX_CACHED_CHARS
from rollout.errors import ConfigError, EncodingError, EnvironmentFault, TurnAbortedError
from rollout.play.loop import LiveEpisode
from rollout.play.memory import SUMMARY_REQUEST, Conversation, Message, after_reasoning
from rollout.play.metrics import measure_notes
from rollout.play.parts import Runtime
from rollout.spec import EpisodeSpec, Replay
from rollout.tokens.encoding import DeltaEncoder
from rollout.turn import ENGINE, EnvReply, FinishReason, Generation, Prompt, Segment, Span, StopReason, Turn
from rollout.workers.pool import EnvSession, ReplayError
from rollout.workers.reply import check_history

logger = logging.getLogger(__name__)

NOT_COUNTED = (0, 1)
"""What engines report that do not count the tokens of prompts; no prompt is that short."""
ABORT_PAUSE_S = 0.2
"""Pause before a turn that was aborted more than once is sent again."""


class Episode:
    """An episode between two turns: `prompt` is the next prompt, `stop` says why the episode ended (None: it runs)."""

    def __init__(
        self, spec: EpisodeSpec, session: EnvSession, encoder: DeltaEncoder, runtime: Runtime, response_len: int | None
    ) -> None:
        self.spec = spec
        self.session = session
        self.encoder = encoder
        self.runtime = runtime
        self.response_len = response_len
        """Most tokens of a response; None for `--rollout-max-response-len`."""
        self.index = 0
        self.steps = 0
        """Turns that the environment got; in the others, the model wrote its notes."""
        self.writes_notes = False
        """Whether `prompt` asks for notes."""
        self.max_turns = spec.env.max_turns
        """Turns of the environment after which the episode counts as truncated; None for no limit."""
        self.stop: StopReason | None = None
        self.has_next_prompt = True
        """False once the last observation could not be encoded; `prompt` then shows the state before it."""
        self.total_reward = 0.0
        self._spans: list[Span] = []
        """Requests of the turn in progress, while spans are recorded."""
        self.answers: list[tuple[int, ...]] = []
        """Token ids of every response so far: tuples, which the garbage collector stops tracking, unlike lists."""
        self.stepped: list[bool] = []
        """Whether the environment got each of them."""
        self._stop_ids: set[int] = set()
        """The tokens that ended responses."""
        self._whole_turns: list[tuple[Prompt, Generation]] = []
        """The turns so far, if each prompt is whole."""
        check_history(self.reply, runtime.settings.history)
        self.conversation = Conversation(runtime.memory)
        self.prompt: Prompt = self._build_prompt(None)
        settings = None if self.reply.whole_prompts else runtime.settings
        runtime.flags.check_first_prompt(spec.name, len(self.prompt.token_ids), settings, response_len)
        if self._is_comparable:
            self.encoder.check(self.conversation.messages, self.prompt.token_ids)

    @property
    def _is_comparable(self) -> bool:
        """Not if an agent's prompt ends with an answer: a template renders that as a finished conversation."""
        return not self.reply.whole_prompts or self.conversation.messages[-1]["role"] != "assistant"

    @property
    def reply(self) -> EnvReply:
        assert self.session.reply is not None
        return self.session.reply

    @property
    def digests(self) -> list[str]:
        """The digests of everything that the environment has shown."""
        return self.session.digests

    def _build_prompt(self, turn: Turn | None, notes: bool = False) -> Prompt:
        """The prompt after a turn, None for the first one; with `notes`, it asks for notes."""
        new = self.conversation.show(self.reply, notes=notes)
        if self.reply.whole_prompts:
            self.encoder = self.runtime.encoder_for(self.reply.tools)
            if self.reply.continues is not None:
                return self._continued_prompt(new, *self.reply.continues)
        if turn is None or not self.conversation.appends:
            return self.encoder.prompt(new)
        return self.encoder.append(turn.prompt, turn.generation.token_ids, new, turn.generation.stop_id)

    def _continued_prompt(self, messages: Sequence[Message], turn: int, first: int) -> Prompt:
        """Encode a whole prompt that continues a turn, with that turn's own tokens unless the template disagrees.

        `first` is the number of the first message after the turn's response.
        """
        prompt, generation = self._whole_turns[turn]
        try:
            found = self.encoder.append(prompt, generation.token_ids, messages[first:], generation.stop_id)
            self.encoder.check(messages, found.token_ids, self._stop_ids)
            return found
        except EncodingError as error:
            found = self.encoder.prompt(messages)
            kept = [*prompt.token_ids, *generation.token_ids]
            if found.token_ids[: len(kept)] != kept:
                words = "the chat template does not write a response as the model did, so its prompts cannot share "
                words += f"training samples (see rollout/turns_per_sample): {error}"
                self._count("responses_rewritten", words)
            return found

    async def generate(self, params: Mapping[str, Any], gives_up: Callable[[], bool] = lambda: False) -> Generation:
        """Ask the engine for the response; an aborted request is sent again, unless `gives_up` says to return it.

        Raises:
            EngineError: as the client's.
            TurnAbortedError: the turn was aborted more often than `max_turn_retries` allows.
        """
        assert self.stop is None, "the episode is over"
        runtime, aborts = self.runtime, 0
        while (generation := await self._request(params)).finish_reason is FinishReason.ABORT and not gives_up():
            aborts += 1
            runtime.counters["turns_aborted"] += 1
            if aborts > runtime.settings.max_turn_retries:
                raise TurnAbortedError(
                    f"turn {self.index} of episode {self.spec.episode_id} was aborted {aborts} times "
                    "(max_turn_retries bounds this)"
                )
            if aborts > 1:
                await asyncio.sleep(ABORT_PAUSE_S)
        return generation

    async def _request(self, params: Mapping[str, Any]) -> Generation:
        """Send the prompt to the engine once; the generation may be aborted."""
        runtime, began_s = self.runtime, time.time()
        params = self._with_stops(self._seeded(params))
        if self.writes_notes:
            most = self.conversation.notes_tokens or 0
            params = {**params, "max_new_tokens": min(most, params.get("max_new_tokens", most))}
        if self.encoder.placeholder_ids:
            # An image placeholder in a response would refer to an image that does not exist.
            params = {**params, "logit_bias": {str(token): -100.0 for token in self.encoder.placeholder_ids}}
        hashed = runtime.flags.router_policy == "consistent_hashing"
        # Keeps the episode on the engine with its cached prefix.
        headers = {"X-SMG-Routing-Key": self.spec.routing_key} if hashed else None
        extra = {"return_routed_experts": True} if runtime.flags.use_rollout_routing_replay else None
        generation = await runtime.engine.generate(self.prompt, params, headers=headers, extra=extra)
        self._compare_prompt(generation)
        if runtime.traced:
            self._spans.append(Span(ENGINE, began_s, time.time(), generation.meta_info))
        return generation

    def _compare_prompt(self, generation: Generation) -> None:
        """Count an answer to a prompt of another length than the one that is trained."""
        used, sent = generation.meta_info.get("prompt_tokens"), len(self.prompt.token_ids)
        if not isinstance(used, int) or used in (sent, *NOT_COUNTED):
            return
        name = "image_prompt_tokens_differ" if self.prompt.image_data else "prompt_tokens_differ"
        words = f"the engine used {used} prompt tokens, but {sent} are trained; it cut the prompt or encoded it again"
        self._count(name, words)

    def _with_stops(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Stop at every token that ends a turn: an engine may know fewer than the template writes."""
        stops = self.encoder.end_of_turn_ids
        if given := params.get("stop_token_ids"):
            stops = tuple(dict.fromkeys((*given, *stops)))
        return {**params, "stop_token_ids": list(stops)}

    def _seeded(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Under deterministic inference, add a seed per turn, or every turn would draw the same numbers."""
        flags = self.runtime.flags
        if not flags.sglang_enable_deterministic_inference:
            return params
        base = params.get("sampling_seed", flags.rollout_seed)
        # The environment's seed tells held-out episodes from those of training with the same id.
        turn = f"{base}/{self.spec.env.metadata.get('seed')}/{self.spec.episode_id}/{self.index}"
        return {**params, "sampling_seed": int.from_bytes(blake2b(turn.encode(), digest_size=4).digest()) % 2**31}

    async def step(self, generation: Generation, engine_s: float = 0.0) -> Turn:
        """Step the environment with a finished generation, record the turn, and build the next prompt.

        If the prompt asked for notes, the environment gets nothing. Raises EnvironmentFault if the environment is lost,
        and this turn with it.
        """
        generation = self.encoder.without_placeholders(generation)
        if not generation.trained:
            self.runtime.counters["answers_with_placeholder"] += 1
        text = self.encoder.answer_text(generation.token_ids, generation.stop_id)
        if (ended := self.encoder.end_of(generation.token_ids, generation.stop_id)) is not None:
            self._stop_ids.add(ended)
        if self.writes_notes:
            notes = after_reasoning(self.encoder.read(generation.token_ids, generation.stop_id).text)
            turn = await self._write_notes(generation, notes, engine_s)
        else:
            turn = await self._step_environment(generation, text, engine_s)
        if self.reply.whole_prompts:
            self._whole_turns.append((self.prompt, generation))
        self.answers.append(tuple(generation.token_ids))
        self.stepped.append(turn.stepped)
        self.index += 1
        self.steps += turn.stepped
        self.total_reward += turn.reward
        return await self._look_ahead(turn)

    async def _step_environment(self, generation: Generation, text: str, engine_s: float) -> Turn:
        shown, sent_s = self.reply.observation, time.time()
        reading = self.encoder.read(generation.token_ids, generation.stop_id)
        reply = await self.session.step(reading.text)
        info = reply.info
        assert info is not None
        span = reading.own_span(info.get("action_span"))
        ended = self.encoder.end_of(generation.token_ids, generation.stop_id)
        told = self.encoder.past_answer(text, cut=ended is None)
        if self.encoder.profile.channels and self.runtime.settings.history == "window":
            told = reading.text
        self.conversation.answered(shown, told, info["valid_action"], info["executed_action"])
        return Turn(
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
            action_span=self.encoder.token_span(generation.token_ids, span),
            progression=float(info["progression"]),
            metrics={name: float(value) for name, value in (info.get("metrics") or {}).items()},
            moves=info.get("moves", True),
            engine_s=engine_s,
            env_s=reply.seconds,
            notes=self.conversation.inline_notes,
            notes_events=self.conversation.notes_events,
            spans=self._take_spans(sent_s, reply),
        )

    async def _write_notes(self, generation: Generation, text: str, engine_s: float) -> Turn:
        """Give the response to the conversation alone; the turn's state is that of the environment's last turn."""
        self.conversation.noted(text)
        info = self.reply.info
        assert info is not None, "notes are written after a step"
        ends, control = self.encoder.end_of_turn_ids, self.encoder.text.control_ids
        spans, self._spans = tuple(self._spans), []
        return Turn(
            episode_id=self.spec.episode_id,
            index=self.index,
            prompt=self.prompt,
            generation=generation,
            progression=float(info["progression"]),
            metrics={name: float(value) for name, value in (info.get("metrics") or {}).items()},
            moves=False,
            engine_s=engine_s,
            notes=self.conversation.notes,
            summary={**measure_notes(generation, text, self.prompt, ends, control), **self.conversation.facts_kept()},
            spans=spans,
        )

    def _take_spans(self, sent_s: float, reply: EnvReply) -> tuple[Span, ...]:
        if not self.runtime.traced:
            return ()
        now_s = time.time()
        began_s = now_s - reply.seconds
        parts = tuple(Span(name, began_s + start, began_s + end) for name, start, end in reply.parts)
        spans = (*self._spans, Span("environment", sent_s, now_s, {"env_s": reply.seconds}, parts))
        self._spans = []
        return spans

    async def _look_ahead(self, turn: Turn) -> Turn:
        """Build the next prompt; the episode ends if the prompt does not fit or `max_turns` is reached.

        Nothing is noted after a limit.
        """
        self.writes_notes = False
        at_limit = self.max_turns is not None and self.steps >= self.max_turns
        if turn.done:
            self.stop = StopReason.TERMINATED if turn.terminated else StopReason.TIME_LIMIT
        if turn.terminated:
            await self._check_conversation()
            return turn
        if not self.reply.messages:  # a limit ended an agent that has not asked again
            self.has_next_prompt = False
            return turn
        try:
            before, self.prompt = len(self.prompt.token_ids), await self._next_prompt(turn)
            tokens = len(self.prompt.token_ids)
            fits = self.runtime.flags.fits(tokens, self.response_len)
            can_wait = fits and self._can_ask(tokens + max(tokens - before, 0))  # after another turn as long
            left = self.runtime.flags.left(tokens)
            if self.conversation.wants_notes(tokens, can_wait, left) and not at_limit and self.stop is None:
                fits = await self._ask_for_notes(turn) or fits
        except EncodingError as error:
            # For example an image that cannot be read. The episode ends, the batch goes on.
            logger.warning("episode %d ends at turn %d: %s", self.spec.episode_id, turn.index, error)
            self.stop, fits, self.has_next_prompt = self.stop or StopReason.ENCODING, True, False
        if not fits:
            self.stop = self.stop or StopReason.CONTEXT
        if at_limit:
            self.stop = self.stop or StopReason.MAX_TURNS
        if self.stop is not None and self.has_next_prompt:
            await self._check_conversation()
        return turn if self.stop is None else replace(turn, truncated=True)

    def _can_ask(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens leaves room to ask for notes, if the memory asks for any."""
        most = self.conversation.notes_tokens
        request = self.encoder.text.encode(SUMMARY_REQUEST.format(most)) if most else ()
        return most is None or self.runtime.flags.fits(tokens + len(request), most)

    async def _ask_for_notes(self, turn: Turn) -> bool:
        """Replace the prompt after the turn by one that asks for notes, if that fits; returns whether it does."""
        asking = await self._next_prompt(turn, notes=True)
        self.writes_notes = self.runtime.flags.fits(len(asking.token_ids), self.conversation.notes_tokens)
        if self.writes_notes:
            self.prompt = asking
            return True
        self.prompt = await self._next_prompt(turn)
        if not self.session.replayed:
            self._count(
                "notes_not_asked",
                f"the prompt that asks for notes has {len(asking.token_ids)} tokens and does not fit, so turns are "
                "forgotten without notes: ask earlier (memory.budget, memory.every, memory.free), lower "
                "memory.max_tokens, or raise --rollout-max-context-len (and --rollout-max-prompt-len)",
            )
        return False

    def _count(self, fault: str, words: object) -> None:
        """Count the fault; log the first of its kind."""
        if not self.runtime.counters[fault]:
            logger.warning("%s, episode %d: %s", fault, self.spec.episode_id, words)
        self.runtime.counters[fault] += 1

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

    async def _check_conversation(self) -> None:
        """Compare the last prompt with its one-shot encoding; a difference is counted and does not stop the run."""
        if self.runtime.settings.tokenization_sanity_check == "disable" or not self._is_comparable:
            return
        messages = self.conversation.messages
        last = self.answers[-1] if messages[-1]["role"] == "assistant" else ()  # no prompt shows the last response
        try:
            ids = [*self.prompt.token_ids, *last]
            await asyncio.to_thread(self.encoder.check, messages, ids, self._stop_ids)
        except EncodingError as error:
            self._count("sanity_check_failed", error)

    async def _next_prompt(self, turn: Turn, notes: bool = False) -> Prompt:
        shown = [self.reply.observation, *(exchange.observation for exchange in self.conversation.past)]
        long_text = len(self.reply.instruction_prompt) > MAX_CACHED_CHARS or self.reply.whole_prompts
        if long_text or any(map(_takes_long, shown)):  # milliseconds, which would stall the event loop
            return await asyncio.to_thread(self._build_prompt, turn, notes)
        return self._build_prompt(turn, notes)

    async def close(self) -> None:
        await self.session.close()


async def open_episode(runtime: Runtime, spec: EpisodeSpec, replay: Replay | None = None) -> LiveEpisode:
    """Start an episode in this process or another one; with `replay`, give it the same responses again.

    Raises:
        EnvironmentFault: the environment could not be started, or its first prompt cannot be encoded or does not fit.
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


async def start_episode(runtime: Runtime, spec: EpisodeSpec, response_len: int | None = None) -> Episode:
    """Start an episode's environment in this process and encode its first prompt. Raises as `open_episode`."""
    session = await runtime.pool.open(spec.env)
    try:
        encoder = runtime.encoder_for(session.reply.tools if session.reply else ())
        try:
            return await asyncio.to_thread(Episode, spec, session, encoder, runtime, response_len)
        except (EncodingError, ConfigError) as error:
            raise EnvironmentFault(f"{error}\n{session.describe()}") from error
    except BaseException:
        await session.close()
        raise


async def _play_again(episode: Episode, replay: Replay) -> None:
    """Give the episode its earlier responses; closes it and raises ReplayError if it shows something else."""
    try:
        if not episode.reply.deterministic:
            raise ReplayError("the environment is not deterministic, so the episode cannot be replayed")
        episode.session.replayed = True
        for token_ids, to_environment in zip(replay.answers, replay.stepped, strict=True):
            if episode.writes_notes is to_environment:
                raise ReplayError("the memory asks for notes at other turns than when the episode was played")
            stop_id = token_ids[-1] if token_ids else None
            replayed = Generation(token_ids, [0.0] * len(token_ids), "", FinishReason.STOP, stop_id=stop_id)
            await episode.step(replayed)
        if episode.digests != list(replay.digests) or episode.stop is not None:
            raise ReplayError("the replayed episode differs from the original")
        episode.session.replayed = False
    except BaseException:
        await episode.close()
        raise


def _takes_long(observation: Observation) -> bool:
    """Whether encoding the observation takes more than a millisecond."""
    parts = observation["text"]
    texts = (observation["obs_str"], parts["long_term_context"], parts["short_term_context"])
    return bool(observation.get("multi_modal_data")) or max(map(len, texts)) > LONG_CHARS
