"""Reads slime's debug dumps as episodes: --save-debug-rollout-data, --save-debug-train-data and --dump-details.

A rollout's dump has `samples`, each `Sample.to_dict()`; a training dump also has `dp_shards`, and per-token tensors in
its samples. Samples of this project's rollouts are turns, which are put together again; any other sample is an episode.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from advantage.errors import TurnTableError
from advantage.turn_table import TABLE_KEY, TurnKind, TurnRow, TurnSpan, decode_row
from inspection.records import CLOSINGS, rollout_of
from rollout.bridge.chains import places_of
from rollout.bridge.sample import FACTS_OF_TURNS, LATER_GROUPS
from rollout.turn import FinishReason, SampleKind, StopReason
from slime_verlog import ConfigError


class Decoder:
    """Decodes with a tokenizer; without one, tokens are shown as their ids."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self._special = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}

    @classmethod
    def find(cls, folder: str | None, dumps: Iterable[Path]) -> Decoder:
        """Load a tokenizer's folder, by default the one beside slime's dumps; raises ConfigError if that fails."""
        beside = [path.parent.parent / "tokenizer" for path in dumps]
        chosen = folder or next((str(path) for path in beside if path.is_dir()), None)
        if chosen is None:
            return cls()
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(chosen))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no tokenizer can be loaded from {chosen!r}: {str(error).splitlines()[0]}") from error

    def prompt(self, ids: Sequence[int], given: Any = None) -> Any:
        """The prompt as text with its control tokens, an image's as one; without a tokenizer, `given` or a note."""
        if self.tokenizer is not None:
            shown = [i for before, i in itertools.pairwise([None, *ids]) if i != before or i not in self._special]
            return self.tokenizer.decode(shown, skip_special_tokens=False)
        return given or f"A prompt of {len(ids)} tokens. To read it, give --tokenizer with the model's folder."

    def response(self, ids: Sequence[int], given: str | None = None) -> str:
        """Return the response's text, without the token that ends it; without a tokenizer, from `given`, or a note."""
        if self.tokenizer is not None:
            end = next((at for at in range(len(ids), 0, -1) if ids[at - 1] not in self._special), 0)
            return self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False)
        note = f"An answer of {len(ids)} tokens. To read it, give --tokenizer with the model's folder."
        return CLOSINGS.sub("", given) if given else note

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return one text per token. A character that spans several tokens is put at the last of them."""
        if self.tokenizer is None:
            return [f"{token} " for token in ids]
        texts, waiting = [], []
        for token in ids:
            waiting.append(token)
            text = self.tokenizer.decode(waiting, skip_special_tokens=False)
            whole = not text.endswith("\ufffd") or len(waiting) > 4
            texts.append(text if whole else "")
            waiting = [] if whole else waiting
        return texts


_ARRAYS = [np.ndarray, np.zeros(0).__reduce__()[0], np.dtype]
_ARRAYS += [type(np.dtype(name)) for name in ("uint8", "int32", "int64", "float32", "float64")]
_SAFE = [FinishReason, SampleKind, StopReason, TurnKind, TurnRow, TurnSpan, *_ARRAYS, array.array, list]
_TRAINED_VALUES = "log_probs", "ref_log_probs", "teacher_log_probs", "values", "advantages", "returns", "kl", "entropy"
_MARK_OF_VERSION_4 = [7_206_381_955.0, 4.0]
_UNSHOWN = (SampleKind.BOOTSTRAP, SampleKind.PADDING)


def read_dumps(files: Sequence[Path], tokenizer: str | None, trusted: bool, with_ids: bool) -> Iterator[dict[str, Any]]:
    """Yield the episodes of dumps that are sorted by rollout; one that a later batch continues is put together.

    The folder `tokenizer` is needed to show prompts, and by `with_ids`, which keeps each turn's `token_ids`. `trusted`
    also loads Python objects of other packages, which may run code. Raises ConfigError for what cannot be loaded.
    """
    decoder = Decoder.find(tokenizer, files)
    if with_ids and decoder.tokenizer is None:
        raise ConfigError(f"{files[0]} holds token ids and no texts; give --tokenizer with the model's folder")
    ongoing: dict[Any, dict[str, Any]] = {}  # unfinished episodes that a later rollout may continue
    for (is_eval, number), group in itertools.groupby(sorted(files, key=rollout_of), key=rollout_of):
        whole: dict[Any, dict[str, Any]] = {}  # episodes that end with this rollout
        rollout = f"{'evaluation' if is_eval else 'rollout'} {number}"
        for sample, row in _samples([_load(path, trusted) for path in group]):
            metadata = sample.get("metadata") or {}
            if metadata.get("kind") in _UNSHOWN:
                continue
            if isinstance(metadata.get("story"), list) and isinstance(metadata.get("messages"), list):
                yield {**metadata, "setting": rollout, "player": "policy"}
                continue
            key, goes_on = _episode_of(sample, len(whole))
            episode = (ongoing if goes_on else whole).setdefault(key, {"turns": []})
            episode["turns"] += _turns(sample, row, decoder, with_ids)
            last_turn = row.indices[-1] if row else 0
            if last_turn >= episode.get("last_turn", 0):
                episode |= {"rollout": rollout, "metadata": metadata, "sample": sample, "last_turn": last_turn}
        ended = [key for key, episode in ongoing.items() if _has_ended(episode["metadata"])]
        yield from (_finish(ongoing.pop(key)) for key in ended)
        yield from map(_finish, whole.values())
    yield from map(_finish, ongoing.values())


def _has_ended(metadata: Mapping[str, Any]) -> bool:
    return bool(metadata.get("terminated") or metadata.get("truncated"))


def _episode_of(sample: Mapping[str, Any], number: int) -> tuple[Any, bool]:
    """What the samples of one episode share, and whether a later rollout may continue the episode."""
    metadata = sample.get("metadata") or {}
    if "episode_turns" in metadata:
        return ("index", sample.get("index")), False
    if "episode_id" in metadata:
        return metadata["episode_id"], True
    return (("segment", metadata["segment"]) if "segment" in metadata else ("sample", number)), False


def _load(path: Path, trusted: bool) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_SAFE):
            payload = torch.load(path, map_location="cpu", weights_only=not trusted)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # torch.load raises RuntimeError, UnpicklingError, EOFError and others
        if "GLOBAL " in str(error):
            wanted = str(error).partition("GLOBAL ")[2].split(" ")[0] or "of another package"
            raise ConfigError(f"{path} holds Python objects ({wanted}); if you trust it, add --trust") from error
        raise ConfigError(f"{path} is not a dump of slime: {error}") from error
    if not isinstance(payload, Mapping) or not isinstance(payload.get("samples"), list):
        raise ConfigError(f"{path} is not a dump of slime: it has no list 'samples'")
    return dict(payload)


def _samples(payloads: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], TurnRow | None]]:
    """Each sample of a rollout with its turns, joined with what training computed for it."""
    rolled = [sample for payload in payloads if "dp_shards" not in payload for sample in payload["samples"]]
    trained = [sample for payload in payloads if "dp_shards" in payload for sample in payload["samples"]]
    if not rolled:
        yield from (_from_training(sample, number) for number, sample in enumerate(trained))
        return
    by_place = {sample.get("rollout_position"): sample for sample in trained}
    later = [(sample.get("train_metadata") or {}).get(LATER_GROUPS, ()) for sample in rolled]
    for place, sample in zip(places_of([_group_of(sample) for sample in rolled], later), rolled, strict=True):
        values = by_place.get(place)
        if values is not None and len(values["tokens"]) == len(sample.get("tokens") or ()):
            sample = {**sample, "trained": values}
        row = (sample.get("train_metadata") or {}).get("turn_row")
        yield sample, row if isinstance(row, TurnRow) else None


def _group_of(sample: Mapping[str, Any]) -> int:
    group = sample.get("rollout_id")
    return (sample.get("index") if group is None else group) or 0


def _from_training(values: Mapping[str, Any], number: int) -> tuple[dict[str, Any], TurnRow | None]:
    """A sample of a training dump alone, which has no text, in the form of a rollout's sample."""
    row = _row_of(values.get(TABLE_KEY))
    metadata: dict[str, Any] = {"task_name": values.get("source_names")}
    if row is not None:
        kind = SampleKind.BOOTSTRAP if row.kind is TurnKind.BOOTSTRAP else SampleKind.TURN
        metadata |= {"kind": kind, "segment": row.segment, "round_number": row.first_turn}
        metadata |= {"terminated": row.terminated, "truncated": row.truncated}
    sample = {
        "tokens": values["tokens"],
        "response_length": int(values["response_lengths"]),
        "loss_mask": values.get("loss_masks"),
        "rollout_log_probs": values.get("rollout_log_probs"),
        "reward": values.get("rewards"),
        "index": values.get("sample_index", number),
        "metadata": metadata,
        "multimodal_train_inputs": values.get("multimodal_train_inputs"),
        "trained": values,
    }
    return sample, row


def _row_of(entry: Any) -> TurnRow | None:
    """The sample's row of the turn table; None for the prompt of another converter."""
    if isinstance(entry, torch.Tensor | np.ndarray):
        return _row_of_version_4(entry.tolist())
    try:
        return decode_row(entry)
    except TurnTableError:
        return None


def _row_of_version_4(numbers: list[float]) -> TurnRow | None:
    """A row that was written as one vector: a mark, the version, seven numbers, then seven for each turn."""
    if numbers[:2] != _MARK_OF_VERSION_4:
        return None
    segment, first_turn, kind, terminated, truncated, group, _ = map(int, numbers[2:9])
    spans: list[TurnSpan] = []
    for start in range(9, len(numbers), 7):
        first, end, reward, action_start, anchor, staleness, moves = numbers[start : start + 7]
        places = int(first), int(end), reward, int(action_start)
        spans.append(TurnSpan(*places, int(anchor), int(staleness), bool(moves)))
    return TurnRow(segment, first_turn, TurnKind(kind), bool(terminated), bool(truncated), tuple(spans), group)


def _turns(sample: Mapping[str, Any], row: TurnRow | None, decoder: Decoder, with_ids: bool) -> list[dict[str, Any]]:
    tokens, length = _numbers(sample.get("tokens")), int(sample.get("response_length") or 0)
    columns = _columns(sample, length)
    metadata, first = sample.get("metadata") or {}, len(tokens) - length
    spans = [(span.start, span.end, span.reward) for span in row.turns] if row else _spans(sample, columns, length)
    facts_of_turns = metadata.get(FACTS_OF_TURNS) or [*({} for _ in spans[1:]), metadata]
    rounds = row.indices if row else [metadata.get("round_number") or 0] * len(spans)
    turns = []
    for (start, end, reward), facts, index in zip(spans, facts_of_turns, rounds, strict=True):
        ids = tokens[first + start : first + end]
        text = sample.get("response") if len(spans) == 1 else None
        turns.append(
            {
                "prompt": decoder.prompt(tokens[: first + start], sample.get("prompt") if not start else None),
                "response": decoder.response(ids, text),
                "has_images": sample.get("multimodal_train_inputs") is not None,
                "executed_action": facts.get("executed_action"),
                "valid": facts.get("valid_action"),
                "notes": facts.get("notes"),
                **({"summary": facts["summary"]} if "summary" in facts else {}),
                "reward": reward,
                "terminated": bool(facts.get("terminated")),
                "truncated": bool(facts.get("truncated")),
                "tokens": {"text": decoder.tokens(ids), **{key: values[start:end] for key, values in columns.items()}},
                "round": index,
            }
        )
        if with_ids:
            turns[-1]["token_ids"] = {"shared": 0, "prompt": tokens[: first + start], "response": ids}
    return turns


def _spans(sample: Mapping[str, Any], columns: Mapping[str, Any], length: int) -> list[tuple[int, int, float | None]]:
    """The runs of trained tokens, which are the model's responses; the last one has the sample's reward."""
    mask = [bool(value) for value in columns.get("loss_mask") or [1] * length]
    edges = [place for place, (a, b) in enumerate(itertools.pairwise([False, *mask, False])) if a != b] or [0, length]
    reward = sample.get("reward")
    last = float(reward) if isinstance(reward, int | float) else None
    spans = zip(edges[::2], edges[1::2], strict=True)
    return [(start, end, last if end == edges[-1] else None) for start, end in spans]


def _columns(sample: Mapping[str, Any], length: int) -> dict[str, list[Any]]:
    trained = sample.get("trained") or {}
    found = {"loss_mask": sample.get("loss_mask"), "rollout_log_probs": sample.get("rollout_log_probs")}
    found |= {key: trained.get(key) for key in _TRAINED_VALUES}
    columns = {key: _numbers(value) for key, value in found.items() if value is not None}
    columns = {key: value for key, value in columns.items() if len(value) == length}
    if "kl" not in columns and {"log_probs", "ref_log_probs"} <= columns.keys():
        columns["kl"] = [a - b for a, b in zip(columns["log_probs"], columns["ref_log_probs"], strict=True)]
    return columns


def _finish(episode: Mapping[str, Any]) -> dict[str, Any]:
    metadata, sample = episode["metadata"], episode["sample"]
    turns = sorted(episode["turns"], key=lambda turn: turn["round"])
    last = turns[-1] if turns else {}
    rewards = [turn["reward"] for turn in turns if turn["reward"] is not None]
    ended = StopReason.TIME_LIMIT if last.get("truncated") else StopReason.CUT if "kind" in metadata else None
    ended = StopReason.TERMINATED if last.get("terminated") else ended
    success = metadata.get("success", metadata["progression"] >= 1.0 if "progression" in metadata else None)
    played = [turn for turn in turns if "summary" not in turn]
    valid = [turn["valid"] for turn in played if turn["valid"] is not None]
    return {
        "setting": episode["rollout"],
        "player": "policy",
        "env_path": metadata.get("env_path"),
        "task": metadata.get("task"),
        "options": metadata.get("env_options") or {},
        "task_name": metadata.get("task_name") or metadata.get("task") or "sample",
        "seed": metadata.get("seed", f"episode {metadata.get('episode_id', sample.get('index'))}"),
        "stop": str(metadata.get("stop") or ended or sample.get("status") or ""),
        "fault": metadata.get("fault"),
        "turns": len(played),
        "return": metadata.get("episode_return", sum(rewards) if rewards else None),
        "success": success,
        "progression": metadata.get("progression"),
        "valid_action_ratio": sum(valid) / len(valid) if valid else None,
        "metrics": metadata.get("env_metrics") or {},
        "messages": [],
        "story": turns,
    }


def _numbers(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values or ())
