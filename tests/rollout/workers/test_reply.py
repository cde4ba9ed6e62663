"""The environment contract, checked on every reply where the environment runs."""

import socket
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from envs.base import make_observation
from rollout.errors import EnvironmentFault
from rollout.turn import EnvReply
from rollout.workers.reply import check_info, check_observation, check_reply, read_step
from rollout.workers.worker import EnvHost, pack, serve

INFO = MappingProxyType(
    {
        "reward": 1.0,
        "terminated": False,
        "truncated": False,
        "valid_action": True,
        "executed_action": "left",
        "progression": 0.5,
    }
)
REPLY = EnvReply(
    make_observation("s", "l"), [{"role": "user", "content": "l"}], "i", "f", "left", True
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": float("nan")}, r"info\['reward'\] must be a finite number, got nan"),
        ({"reward": 10**400}, r"info\['reward'\] must be a number"),
        ({"reward": 1e308}, r"info\['reward'\] must be at most 1e\+30, got 1e\+308"),
        ({"metrics": {"m": -1e31}}, r"info\['metrics'\]\['m'\] must be at least -1e\+30"),
        ({"progression": 1.5}, r"info\['progression'\] must be at most 1, got 1.5"),
        ({"valid_action": 1}, r"info\['valid_action'\] must be true or false, got 1"),
        ({"terminated": True}, "done is False but terminated is True"),
        (
            {"executed_action": "\ud800"},
            r"info\['executed_action'\] must be .* unable to parse raw data as a unicode",
        ),
        ({"action": 3}, r"info\['action'\] must be text, got 3"),
        ({"action_span": (0, 1.5)}, r"info\['action_span'\]\[1\] must be an integer, got 1.5"),
        ({"metrics": {"m": "many"}}, r"info\['metrics'\]\['m'\] must be a number, got 'many'"),
    ],
)
def test_an_info_that_breaks_the_contract_is_refused_by_name(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        check_info({**INFO, **changes}, done=False)


@pytest.mark.parametrize("info", [None, [("reward", 1.0)], 1.0])
def test_an_info_that_is_no_mapping_is_refused(info: Any) -> None:
    with pytest.raises(EnvironmentFault, match="info must be a mapping"):
        read_step((make_observation("s"), False, info))


def test_scalars_of_numpy_in_an_info_become_pythons() -> None:
    metrics, span = {"solved": np.bool_(True), "size": np.float32(0.5)}, [np.int64(1), np.int64(3)]
    given = {
        **INFO,
        "reward": np.float32(1.0),
        "valid_action": np.bool_(True),
        "metrics": metrics,
        "action_span": span,
    }
    _, done, info = read_step((make_observation("s"), np.bool_(False), given))
    check_info(info, done)
    assert info["metrics"] == {"solved": True, "size": 0.5} and info["action_span"] == (1, 3)
    assert [type(value) for value in (*info["metrics"].values(), *info["action_span"])] == [
        bool,
        float,
        int,
        int,
    ]


@pytest.mark.parametrize("done", [5, None])
def test_done_is_a_bool(done: Any) -> None:
    with pytest.raises(EnvironmentFault, match=f"done must be bool, got {done!r}"):
        read_step((make_observation("s"), done, INFO))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"observation": None}, r"the observation must be a mapping .* got NoneType None"),
        ({"observation": (REPLY.observation, {})}, "got tuple .*; return the observation alone"),
        ({"observation": {"obs_str": "a"}}, "observation has no key 'text'; its keys are obs_str"),
        (
            {"observation": {"obs_str": "a", "text": "a"}},
            r"observation\['text'\] must be a mapping, got 'a'",
        ),
        (
            {"observation": {**REPLY.observation, "obs_str": 3}},
            r"observation\['obs_str'\] must be text, got 3",
        ),
        (
            {"observation": {**REPLY.observation, "multi_modal_data": {"image": "a"}}},
            r"\['multi_modal_data'\]\['image'\] must be a valid list, got 'a'",
        ),
        ({"instruction_prompt": None}, "instruction_prompt must be a string"),
        ({"messages": []}, "messages must be mappings with a role"),
        ({"facts": [" "]}, r"facts\(\) must return a list of texts, none blank, got \[' '\]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "content must be a text or",
        ),
        (
            {"tools": [{"name": {1, 2}}]},
            r"tools must be a list of JSON schemas, got .* \(Object of type set",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]},
            "surrogate pair",
        ),
    ],
)
def test_a_reply_that_breaks_the_contract_is_refused_by_name(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        check_observation(changes.get("observation", REPLY.observation))
        check_reply(replace(REPLY, **changes))


def test_the_digest_depends_on_what_the_agent_sees_and_is_paid() -> None:
    replies = [
        REPLY,
        replace(REPLY, observation=make_observation("s", "other")),
        replace(REPLY, done=True),
        replace(REPLY, info=INFO),
        replace(REPLY, info={**INFO, "reward": 0.5}),
    ]
    assert len({reply.digest for reply in replies}) == len(replies)
    assert replace(REPLY, seconds=1.0).digest == REPLY.digest


def test_a_worker_whose_rollout_has_ended_ends_silently() -> None:
    ours, theirs = socket.socketpair()

    class Leaving(EnvHost):
        def handle(self, method: str, *arguments: Any) -> tuple[bool, Any]:
            ours.close()
            return True, None

    ours.sendall(pack((1, "reset", (0,))))
    serve(theirs, Leaving())
