"""What the notes of trained policies are worth: the same held-out episodes with their own, empty and foreign notes.

    python -m embedded.studies.run recall --variants notes_400 --keep-policies
    python -m benchmarks.note_controls [--seeds 0 1] > controls.csv

The last policy of each run that is there plays its held-out episodes three times. `own` leaves its notes as they are,
`empty` loses every rewrite, and `foreign` gives what it wrote at the same place of an episode whose facts differ. If it
answers from its notes, empty ones score like guessing, and foreign ones lower.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from embedded.arguments import EmbeddedFlags, make_args
from embedded.engine.engine import EngineOptions
from embedded.engine.process import EngineProcess
from embedded.launch import set_up_process
from embedded.run.folder import DONE
from embedded.run.record import evaluation_means, held_out
from embedded.studies.study import Plan, load_study, make_plan
from embedded.warmstart.imitation import read_imitation
from rollout.bridge.framework import run
from rollout.data_source import EpisodeSource
from rollout.evaluate import evaluate
from rollout.play.episode import Episode
from rollout.play.runtime import close_runtimes
from slime_verlog import ConfigError, command

CONTROLS = ("own", "empty", "foreign")
VARIANT = "notes_400"


@dataclass
class Notes:
    """What was written with the policy's own notes, by the seed of the episode, and the facts of each episode."""

    written: dict[int, list[str]] = field(default_factory=dict)
    facts: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def foreign(self, seed: int, number: int) -> str:
        """Return rewrite `number` of the next episode with other facts; empty if it has fewer, or if there is none."""
        seeds = sorted(self.written)
        later = [*(s for s in seeds if s > seed), *(s for s in seeds if s < seed)]
        other = next((self.written[s] for s in later if self.facts[s] != self.facts[seed]), [])
        return other[number] if number < len(other) else ""

    @contextlib.contextmanager
    def controlled(self, control: str) -> Iterator[list[float]]:
        """Meanwhile, episodes in this process get these notes; yields the share of facts in each rewrite."""
        write, kept, numbers = Episode._write_notes, [], dict[int, int]()

        async def controlled(episode: Episode, generation: Any, text: str, engine_s: float) -> Any:
            seed = episode.spec.env.metadata["seed"]
            if control == "own":
                self.facts[seed] = tuple(episode.reply.facts)
                self.written.setdefault(seed, []).append(text)
            number = numbers[seed] = numbers.get(seed, -1) + 1
            shown = self.foreign(seed, number) if control == "foreign" else text if control == "own" else ""
            turn = await write(episode, generation, shown, engine_s)
            assert turn.summary is not None
            kept.append(turn.summary["facts_kept"])
            return turn

        with mock.patch.object(Episode, "_write_notes", controlled):
            yield kept


def play_controls(plan: Plan, seed: int) -> Iterator[tuple[str, float, float]]:
    """Yield control, score and the share of facts that rewrites kept, for the last policy of one run."""
    folder, flags = plan.run_folder(VARIANT, seed), plan.settings(VARIANT, seed)["flags"]
    policy, notes = folder / "policy_after", Notes()
    lengths = read_imitation(folder / "policy_before").lengths(EmbeddedFlags(hf_checkpoint=""))
    options = EngineOptions(model_path=str(policy), seed=seed)
    args = make_args(folder / "run.yaml", **{**lengths, **flags, "hf_checkpoint": str(policy)})
    for control in CONTROLS:
        with EngineProcess(options) as engine, notes.controlled(control) as kept:
            args.sglang_router_ip, args.sglang_router_port = engine.host, engine.port
            means = evaluation_means(held_out(run(evaluate(args, EpisodeSource(args)))))
            run(close_runtimes())  # the next engine has another address
        yield control, plan.study.score(means[f"eval/{plan.study.measure}"]), sum(kept) / max(len(kept), 1)


@command()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the study's")
    parser.add_argument("--out", type=Path, default=Path("outputs/ablations"), help="the study runner's --out")
    given = parser.parse_args(arguments)
    set_up_process()
    plan = make_plan(load_study("recall"), given.out, [VARIANT])
    folders = {seed: plan.run_folder(VARIANT, seed) for seed in given.seeds or plan.study.seeds}
    there = [s for s, folder in folders.items() if (folder / DONE).exists() and (folder / "policy_after").is_dir()]
    if not there:
        raise ConfigError(f"{plan.folder} has no finished run of {VARIANT} with a policy; use --keep-policies")
    print("variant,seed,control,score,facts_kept")
    for seed in there:
        for control, score, kept in play_controls(plan, seed):
            print(f"{VARIANT},{seed},{control},{score:.4f},{kept:.4f}", flush=True)


if __name__ == "__main__":
    main()
