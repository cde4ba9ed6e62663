"""Reads slime's debug dumps as episodes: --save-debug-rollout-data, --save-debug-train-data and
--dump-details.

A rollout's dump has `samples`, each `Sample.to_dict()`; a training dump also has `dp_shards`, and
per-token tensors in its samples. Samples of this project's rollouts are turns, which are put
together again; any other sample is an episode.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from inspection.records import CLOSINGS, Record, rollout_of
from rollout.bridge.chains import places_of
from rollout.bridge.sample import FACTS_OF_TURNS, LATER_GROUPS, ROW_KEY
from rollout.turn import FinishReason, SampleKind, StopReason
from slime_verlog import ConfigError

Ids = Sequence[int]
_UNREAD = "of {} tokens. To read it, give --tokenizer with the model's folder."


class Decoder:
    """Decodes with a tokenizer; without one, tokens are shown as their ids."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {number for number, token in added.items() if token.special}

    @classmethod
    def find(cls, folder: str | None, dumps: Iterable[Path]) -> Decoder:
        """Load a tokenizer's folder, by default the one beside slime's dumps; raises ConfigError if
        that fails."""
        beside = [path.parent.parent / "tokenizer" for path in dumps]
        chosen = folder or next((str(path) for path in beside if path.is_dir()), None)
        if chosen is None:
            return cls()
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(chosen))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no tokenizer can be loaded from {chosen!r}: {str(error).splitlines()[0]}"
            ) from error

    def prompt(self, ids: Ids, given: Any = None) -> Any:
        """The prompt as text with its control tokens, an image's as one; without a tokenizer,
        `given` or a note."""
        if self.tokenizer is None:
            return given or f"A prompt {_UNREAD.format(len(ids))}"
        shown = []
        for token in ids:
            is_repeated = shown[-1:] == [token] and token in self._special
            shown += [] if is_repeated else [token]
        return self._decode(shown)

    def response(self, ids: Ids, given: str | None = None) -> str:
        """Return the response's text, without the token that ends it; without a tokenizer, from
        `given`, or a note."""
        if self.tokenizer is None:
            return CLOSINGS.sub("", given) if given else f"An answer {_UNREAD.format(len(ids))}"
        kept = list(ids)
        while kept and kept[-1] in self._special:
            kept.pop()
        return self._decode(kept)

    def tokens(self, ids: Ids) -> list[str]:
        """Return one text per token. A character that spans several tokens is put at the last of
        them."""
        if self.tokenizer is None:
            return [f"{token} " for token in ids]
        texts = []
        waiting = []
        for token in ids:
            waiting.append(token)
            text = self._decode(waiting)
            is_whole = not text.endswith("\ufffd") or len(waiting) > 4
            texts.append(text if is_whole else "")
            if is_whole:
                waiting = []
        return texts

    def _decode(self, ids: Ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


_DTYPES = [type(np.dtype(name)) for name in ("uint8", "int32", "int64", "float32", "float64")]
_ARRAYS = [np.ndarray, np.zeros(0).__reduce__()[0], np.dtype, array.array]
_RECORDS = [FinishReason, SampleKind, StopReason, TurnKind, TurnRow, TurnSpan]
_SAFE = [*_RECORDS, *_ARRAYS, *_DTYPES, list]
_TRAINED_VALUES = (
    "log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "advantages",
    "returns",
    "kl",
    "entropy",
)
_FACTS = "executed_action", "notes", "summary", "terminated", "truncated"
"""What the metadata says of a turn under the name that a record uses."""
_UNSHOWN = (SampleKind.BOOTSTRAP, SampleKind.PADDING)


@dataclass
class _Episode:
    """An episode as far as its samples were read."""

    rollout: str = ""
    """The last rollout with a turn of it."""
    sample: Record = field(default_factory=dict)
    """That of its latest turn."""
    last_turn: int = 0
    turns: list[Record] = field(default_factory=list)


def read_dumps(
    files: Sequence[Path], tokenizer: str | None, trusted: bool, needs_text: bool
) -> Iterator[Record]:
    """Yield the episodes of dumps that are sorted by rollout; one that a later batch continues is
    put together.

    Without the folder `tokenizer`, prompts are not shown, and `needs_text` refuses them. `trusted`
    also loads Python objects of other packages, which may run code. Raises ConfigError for what
    cannot be loaded.
    """
    decoder = Decoder.find(tokenizer, files)
    if needs_text and decoder.tokenizer is None:
        raise ConfigError(
            f"{files[0]} holds token ids and no texts; give --tokenizer with the model's folder"
        )
    ongoing: dict[Any, _Episode] = {}  # unfinished episodes that a later rollout may continue
    for (is_eval, number), group in itertools.groupby(
        sorted(files, key=rollout_of), key=rollout_of
    ):
        whole: dict[Any, _Episode] = {}  # episodes that end with this rollout
        rollout = f"{'evaluation' if is_eval else 'rollout'} {number}"
        payloads = [_load(path, trusted) for path in group]
        if all("dp_shards" in payload for payload in payloads):
            raise ConfigError(
                f"{rollout} has training data alone, without its samples; dump them with "
                "--dump-details"
            )
        for sample, row in _samples(payloads):
            metadata = sample["metadata"]
            if metadata.get("kind") in _UNSHOWN:
                continue
            if isinstance(metadata.get("story"), list) and isinstance(
                metadata.get("messages"), list
            ):
                yield {**metadata, "setting": rollout, "player": "policy"}
                continue
            key, goes_on = _episode_of(sample, len(whole))
            episode = (ongoing if goes_on else whole).setdefault(key, _Episode())
            episode.turns += _turns(sample, row, decoder)
            last_turn = row.indices[-1] if row else 0
            if last_turn >= episode.last_turn:
                episode.rollout = rollout
                episode.sample = sample
                episode.last_turn = last_turn
        for key, episode in list(ongoing.items()):
            metadata = episode.sample["metadata"]
            if metadata.get("terminated") or metadata.get("truncated"):
                yield _finish(ongoing.pop(key))
        yield from map(_finish, whole.values())
    yield from map(_finish, ongoing.values())


def _episode_of(sample: Record, number: int) -> tuple[Any, bool]:
    """What the samples of one episode share, and whether a later rollout may continue the
    episode."""
    metadata = sample["metadata"]
    if "episode_turns" in metadata:
        return ("index", sample.get("index")), False
    if "episode_id" in metadata:
        return metadata["episode_id"], True
    return ("sample", number), False


def _load(path: Path, trusted: bool) -> Record:
    try:
        with torch.serialization.safe_globals(_SAFE):
            payload = torch.load(path, map_location="cpu", weights_only=not trusted)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        # torch.load raises RuntimeError, UnpicklingError, EOFError and others.
        if "GLOBAL " in str(error):
            wanted = str(error).partition("GLOBAL ")[2].split(" ")[0] or "of another package"
            raise ConfigError(
                f"{path} holds Python objects ({wanted}); if you trust it, add --trust"
            ) from error
        raise ConfigError(f"{path} is not a dump of slime: {error}") from error
    if not isinstance(payload, Mapping) or not isinstance(payload.get("samples"), list):
        raise ConfigError(f"{path} is not a dump of slime: it has no list 'samples'")
    return dict(payload)


def _samples(payloads: Sequence[Record]) -> Iterator[tuple[Record, TurnRow | None]]:
    """Each sample of a rollout with its turns, joined with what training computed for it."""
    rolled: list[Record] = []
    trained: list[Record] = []
    for payload in payloads:
        (trained if "dp_shards" in payload else rolled).extend(payload["samples"])
    by_place = {sample.get("rollout_position"): sample for sample in trained}
    about = [sample.get("train_metadata") or {} for sample in rolled]
    places = places_of(
        list(map(_group_of, rolled)), [known.get(LATER_GROUPS, ()) for known in about]
    )
    for sample, known, place in zip(rolled, about, places, strict=True):
        values = by_place.get(place, {})
        if len(values.get("tokens", ())) != len(sample.get("tokens") or ()):
            values = {}
        row = known.get(ROW_KEY)
        joined = {**sample, "metadata": sample.get("metadata") or {}, "trained": values}
        yield joined, row if isinstance(row, TurnRow) else None


def _group_of(sample: Record) -> int:
    group = sample.get("rollout_id")
    return (sample.get("index") if group is None else group) or 0


def _turns(sample: Record, row: TurnRow | None, decoder: Decoder) -> list[Record]:
    tokens = _numbers(sample.get("tokens"))
    length = int(sample.get("response_length") or 0)
    first = len(tokens) - length
    columns = _columns(sample, length)
    metadata = sample["metadata"]
    if row is not None:
        spans = [(span.start, span.end, span.reward) for span in row.turns]
        rounds = row.indices
    else:
        spans = _spans(sample, columns, length)
        rounds = [metadata.get("round_number") or 0] * len(spans)
    facts_of_turns = metadata.get(FACTS_OF_TURNS) or [*({} for _ in spans[1:]), metadata]
    turns = []
    for (start, end, reward), facts, index in zip(spans, facts_of_turns, rounds, strict=True):
        prompt = tokens[: first + start]
        ids = tokens[first + start : first + end]
        text = sample.get("response") if len(spans) == 1 else None
        turn = {
            "prompt": decoder.prompt(prompt, None if start else sample.get("prompt")),
            "response": decoder.response(ids, text),
            "has_images": sample.get("multimodal_train_inputs") is not None,
            "valid": facts.get("valid_action"),
            "reward": reward,
            "tokens": {
                "text": decoder.tokens(ids),
                **{key: values[start:end] for key, values in columns.items()},
            },
            "round": index,
        }
        turn |= {key: facts[key] for key in _FACTS if key in facts}
        turns.append(turn)
    return turns


def _spans(sample: Record, columns: Record, length: int) -> list[tuple[int, int, float | None]]:
    """The runs of trained tokens, which are the model's responses; the last one has the sample's
    reward."""
    spans: list[tuple[int, int, float | None]] = []
    place = 0
    for is_trained, run in itertools.groupby(columns.get("loss_mask") or [1] * length, bool):
        end = place + len(list(run))
        if is_trained:
            spans.append((place, end, None))
        place = end
    start, end, _ = spans.pop() if spans else (0, length, None)
    reward = sample.get("reward")
    return [*spans, (start, end, float(reward) if isinstance(reward, int | float) else None)]


def _columns(sample: Record, length: int) -> dict[str, list[Any]]:
    trained = sample["trained"]
    given = {key: sample.get(key) for key in ("loss_mask", "rollout_log_probs")}
    given |= {key: trained.get(key) for key in _TRAINED_VALUES}
    columns = {}
    for key, value in given.items():
        numbers = _numbers(value)
        if value is not None and len(numbers) == length:
            columns[key] = numbers
    if "kl" not in columns and {"log_probs", "ref_log_probs"} <= columns.keys():
        columns["kl"] = np.subtract(columns["log_probs"], columns["ref_log_probs"]).tolist()
    return columns


def _finish(episode: _Episode) -> Record:
    sample = episode.sample
    metadata = episode.sample["metadata"]
    turns = sorted(episode.turns, key=lambda turn: turn["round"])
    played = [turn for turn in turns if "summary" not in turn]
    rewards = [turn["reward"] for turn in turns if turn["reward"] is not None]
    valid = [turn["valid"] for turn in played if turn["valid"] is not None]
    progression = metadata.get("progression")
    success = None if progression is None else progression >= 1.0
    return {
        "setting": episode.rollout,
        "player": "policy",
        "env_path": metadata.get("env_path"),
        "task": metadata.get("task"),
        "options": metadata.get("env_options") or {},
        "task_name": metadata.get("task_name") or metadata.get("task") or "sample",
        "seed": metadata.get("seed", f"episode {metadata.get('episode_id', sample.get('index'))}"),
        "stop": str(metadata.get("stop") or _end_of(turns, metadata) or sample.get("status") or ""),
        "fault": metadata.get("fault"),
        "turns": len(played),
        "return": metadata.get("episode_return", sum(rewards) if rewards else None),
        "success": metadata.get("success", success),
        "progression": progression,
        "valid_action_ratio": sum(valid) / len(valid) if valid else None,
        "metrics": metadata.get("env_metrics") or {},
        "messages": [],
        "story": turns,
    }


def _end_of(turns: Sequence[Record], metadata: Record) -> StopReason | None:
    """How an episode ended whose rollout did not write it down."""
    last = turns[-1] if turns else {}
    if last.get("terminated"):
        return StopReason.TERMINATED
    if last.get("truncated"):
        return StopReason.TIME_LIMIT
    return StopReason.CUT if "kind" in metadata else None


def _numbers(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values or ())
