"""slime's data source: tasks and seeds from the YAML; `save` and `load` carry live episodes.

Invariant: an episode's task and seed depend on its id alone, not on the order in which requests
finish.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.batches.slots import slots_state
from rollout.bridge.checkpoints import rotate_checkpoints, seeds_file
from rollout.bridge.checks import check_flags
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import Sample
from rollout.bridge.handout import episode_id_of, handout
from rollout.bridge.settings import load_settings
from rollout.checkpoint import SourceState, checkpoint_path, load_state, save_state
from rollout.errors import CheckpointError
from rollout.play.clock import WeightClock, version_of
from rollout.play.loop import Slot
from rollout.spec import EpisodeSpec
from rollout.tasks import held_out_episodes, make_episode, pick_task, read_tasks, training_seed
from rollout.turn import Segment


class EpisodeSource:
    """slime's `--data-source-path`; it also holds what the fixed-turn rollout keeps between
    batches."""

    def __init__(self, args: Any) -> None:
        """Read and check the YAML and the flags; raises ConfigError, which names the key or the
        flag to change."""
        self.settings = load_settings(args)
        check_flags(args, self.settings)
        self.flags = RolloutFlags.read(args)
        self._args = args
        self._first_seed: int | None = None
        self._begin_behind_the_critics_seeds()
        self._written: SourceState | None = None
        self.tasks = read_tasks(self.settings)
        self.eval_tasks = read_tasks(self.settings, self.settings.eval)
        # slime pushes after each rollout with --release-train, and has no critic-only steps without
        # a critic.
        interval = 1 if self.flags.release_train else self.flags.update_weights_interval
        self.clock = WeightClock(
            interval, self.flags.num_critic_only_steps if self.flags.use_critic else 0
        )
        self.next_episode = 0
        """Next id for `get_samples`; slots of the fixed-turn rollout number their own."""
        self.next_group = 0
        self.buffer: list[list[Sample]] = []
        """Aborted groups, which `get_samples` hands out again."""
        self.slots: list[Slot] = []
        """Slots of the fixed-turn rollout; empty until its first batch."""
        self.saved_slots: list[Mapping[str, Any]] = []
        """Slots that `load` read from a checkpoint, until the first batch restores them."""
        self.kept: list[Segment] = []
        """Segments kept by the critic's warm-up."""
        self.snapshots: dict[int, SourceState] = {}
        """State at the end of the newest two rollouts, by rollout id. Under `train_async.py`, slime
        saves rollout r when batch r + 1 has already been played."""

    def _begin_behind_the_critics_seeds(self) -> None:
        """Skip the seeds of a pretrained critic: its values of turns that it was trained on are too
        good."""
        path = seeds_file(self._args, "load")
        if self.settings.value_pretraining.batches or path is None or not path.is_file():
            return
        used = json.loads(path.read_text(encoding="utf-8"))
        if used["first"] <= self.settings.seed_start < used["next"]:
            self._begin_at(used["next"])

    def _begin_at(self, seed: int) -> None:
        self._first_seed = seed
        self.settings = self.settings.model_copy(update={"seed_start": seed})

    def _write_seeds(self, state: SourceState) -> None:
        """Note beside the critic which seeds value pretraining has used, for the PPO that starts
        from it."""
        path = seeds_file(self._args, "save")
        if not self.settings.value_pretraining.batches or path is None:
            return
        episodes = max([state.next_episode, *(slot["next_episode"] for slot in state.slots)])
        used = {"first": self.settings.seed_start, "next": training_seed(self.settings, episodes)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(used), encoding="utf-8")

    def staleness(
        self, segments: Sequence[Segment], rollout_id: int, *, asked_since: bool
    ) -> list[int]:
        """Count actor updates from playing to training: one int per turn, in the order of the
        segments; -1: unknown.

        `asked_since`: the turns were played after slime asked for this batch.
        """
        versions = [version_of(turn.generation) for segment in segments for turn in segment.turns]
        if known := [version for version in versions if version is not None]:
            # The largest, because an engine may have missed a push.
            self.clock.learn(rollout_id, max(known), asked_since=asked_since)
        return [
            -1 if version is None else self.clock.staleness(version, rollout_id)
            for version in versions
        ]

    def episode(self, episode_id: int) -> EpisodeSpec:
        """Make the training episode with this id."""
        task = pick_task(self.tasks, self.flags.rollout_seed, episode_id)
        return make_episode(
            self.settings, task, episode_id, training_seed(self.settings, episode_id)
        )

    def eval_episodes(self) -> list[EpisodeSpec]:
        """List all held-out episodes: the same seeds for every task."""
        return held_out_episodes(self.settings, self.eval_tasks)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Hand out `num_samples` groups, each as `group` makes it: aborted ones first, then those
        of new episodes."""
        groups = self.buffer[:num_samples]
        del self.buffer[: len(groups)]
        while len(groups) < num_samples:
            groups.append(self.group(self.next_episode))
            self.next_episode += 1
        return groups

    def group(self, episode_id: int) -> list[Sample]:
        """Make the `n_samples_per_prompt` samples that all play this episode."""
        spec = self.episode(episode_id)
        count = self.flags.n_samples_per_prompt
        return [handout(spec, spec.episode_id * count + k) for k in range(count)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take back aborted groups; `get_samples` hands them out before new ones."""
        self.buffer.extend(samples)

    def take_group_ids(self, count: int) -> range:
        """Give out `count` ids of training groups, each id once."""
        ids = range(self.next_group, self.next_group + count)
        self.next_group += count
        return ids

    def state(self) -> SourceState:
        """Copy the current state, so that later batches do not change it."""
        buffer = [episode_id_of(group[0]) for group in self.buffer]
        slots = slots_state(self.slots) or self.saved_slots
        return SourceState(
            self.next_episode, self.next_group, buffer, slots, list(self.kept), self._first_seed
        )

    def end_batch(self, rollout_id: int, slots: Sequence[Mapping[str, Any]] = ()) -> None:
        """Keep the state at the end of a rollout for `save`, and write it now if slime is going to
        save this rollout.

        `slots` is the slots' state at the end of the batch, if they have played on since. Raises as
        `save`.
        """
        state = replace(self.state(), slots=list(slots)) if slots else self.state()
        self.snapshots = {r: kept for r, kept in self.snapshots.items() if r == rollout_id - 1} | {
            rollout_id: state
        }
        if self.flags.saves_after(rollout_id):
            self._write(state, rollout_id)

    def save(self, rollout_id: int) -> None:
        """Write the state at the end of this rollout (in slime's own loop, the current state) for a
        resume.

        Raises CheckpointError for a rollout that was not played, or if the file cannot be written.
        """
        if self.snapshots and rollout_id not in self.snapshots:
            raise CheckpointError(
                f"the state of rollout {rollout_id} is not known; the newest rollouts are "
                f"{sorted(self.snapshots)}"
            )
        state = self.snapshots.get(rollout_id) or self.state()
        self._write(state, rollout_id)
        self._write_seeds(state)
        if self.settings.checkpoints_kept is not None and self.flags.save is not None:
            states = checkpoint_path(self.flags.save, rollout_id).parent
            rotate_checkpoints(self._args, rollout_id, self.settings.checkpoints_kept, states)

    def _write(self, state: SourceState, rollout_id: int) -> None:
        if self.flags.save is None:
            raise CheckpointError("there is no folder to save the rollout state in; give --save")
        if self._written is not state:
            save_state(state, self.flags.save, rollout_id)
            self._written = state

    def load(self, rollout_id: int | None = None) -> None:
        """Restore what `save` wrote; does nothing in a fresh run. Raises CheckpointError as
        `load_state`."""
        state = load_state(self.flags.load, self.flags.save, rollout_id)
        if state is None:
            return
        if state.first_seed is not None:
            self._begin_at(state.first_seed)
        self.next_episode = state.next_episode
        self.next_group = state.next_group
        # The environments of aborted episodes ended with their process, so their groups are played
        # from the start.
        self.buffer = [self.group(episode_id) for episode_id in state.buffer]
        self.kept = state.kept
        self.slots = []
        self.saved_slots = state.slots

    def __len__(self) -> int:
        """Episodes never run out; slime divides this by the batch size to count an epoch's
        rollouts."""
        return 2**31
