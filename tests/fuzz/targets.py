"""What is fed with anything at all: every function takes bytes and may raise only its named errors.

Model answers, tool output, engine answers, configuration and checkpoints all come from outside. Each target takes
bytes, builds its input from them and calls the real code.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml

from advantage.turn_table import TurnKind, TurnRow, TurnSpan, decode_row, encode_row
from envs import babaisai, babyai, crafter
from envs.text_game import find_action
from rollout.checkpoint import read_checkpoint
from rollout.config import RolloutConfig, load_config
from rollout.engine import parse_generation
from rollout.errors import CheckpointError, ConfigError, EngineError

GAMES = {babyai: "goto", babaisai: "goto_win", crafter: "default"}


@cache
def game(module: object) -> object:
    sample = SimpleNamespace(metadata={"task": GAMES[module], "seed": 1})
    env = module.build_env(sample, Namespace(env={}))
    env.reset()
    return env


def action_parser(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    candidate, (start, end) = find_action(text)
    assert text[start:end] == candidate
    for module in GAMES:
        env = game(module)
        action = env.translate(candidate)
        assert action is None or action in env.actions


def turn_table(data: bytes) -> None:
    vector = torch.tensor(struct.unpack(f"{len(data) // 8}d", data[: len(data) // 8 * 8]), dtype=torch.float64)
    try:
        row = decode_row(vector)
    except ValueError:
        return
    assert torch.equal(encode_row(row), vector)


def config_reader(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        try:
            assert isinstance(load_config(Namespace(custom_config_path=file.name)), RolloutConfig)
        except ConfigError as error:
            assert str(error)


def engine_answer(data: bytes) -> None:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        generation = parse_generation(answer)
    except EngineError:
        return
    assert len(generation.token_ids) == len(generation.log_probs)


def checkpoint_reader(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        try:
            read_checkpoint(Path(file.name))
        except CheckpointError as error:
            assert str(error)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "action_parser": action_parser,
    "turn_table": turn_table,
    "config_reader": config_reader,
    "engine_answer": engine_answer,
    "checkpoint_reader": checkpoint_reader,
}


def _row() -> bytes:
    row = TurnRow(3, 0, TurnKind.TURN, False, True, (TurnSpan(0, 4, 0.5, 2), TurnSpan(6, 9, -0.1)))
    return encode_row(row).numpy().tobytes()


def _checkpoint() -> bytes:
    from safetensors.torch import save

    body = torch.frombuffer(bytearray(b'{"slots": []}'), dtype=torch.uint8)
    return save({"state": body}, {"format": "slime-verlog-rollout", "version": "1", "sha256": "0"})


SEEDS: dict[str, list[bytes]] = {
    "action_parser": [
        b"THINK: x\nACTION: go forward",
        b"Action Move North 2 steps.",
        b"action: turn_left",
        b"ACTION:",
        "ACTION: Move East \N{SNOWMAN}".encode(),
        b"<tool_call>{\"name\": \"up\"}</tool_call>",
    ],
    "turn_table": [_row()],
    "config_reader": [
        (Path(__file__).parents[2] / "custom_configs" / "babyai.yaml").read_bytes(),
        yaml.safe_dump({"rollout_interaction_env_path": "e", "memory": {"n": 2}, "gamma_step": 0.5}).encode(),
        b"a: &a [*a]\n",
        b"!!python/object/apply:os.system ['true']\n",
    ],
    "engine_answer": [
        b'{"text": "x", "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1, 2, null]]}}',
        b'{"text": "x", "meta_info": {"finish_reason": "abort", "weight_version": NaN}}',
    ],
    "checkpoint_reader": [_checkpoint()],
}


INTERESTING = [b"ACTION:", b"\x00", b"\xff", b"{", b"]", b": ", b"\n", b"1e999", b"NaN"]


def mutate(seed: bytes, generator: random.Random) -> bytes:
    """A few random edits: flips, cuts, repeats, insertions of bytes that parsers care about."""
    data = bytearray(seed)
    for _ in range(generator.randint(1, 8)):
        at = generator.randrange(len(data) + 1)
        match generator.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << generator.randrange(8)
            case 1:
                del data[at : at + generator.randrange(1, 9)]
            case 2:
                data[at:at] = data[at : at + generator.randrange(1, 40)] * generator.randrange(1, 4)
            case 3:
                data[at:at] = generator.choice(INTERESTING)
            case _:
                data[at:at] = generator.randbytes(generator.randrange(1, 9))
    return bytes(data)
