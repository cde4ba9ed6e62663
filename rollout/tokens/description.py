"""Tells how a checkpoint's template was read, and what it cannot do."""

from rollout.tokens.encoding import DeltaEncoder

TRIED = frozenset(
    {
        ("<|im_start|>assistant\n", "<|im_end|>"),
        ("<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|assistant|>", "<|user|>"),
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        ("<|im_middle|>", "<|im_end|>"),
        ("]~b]ai\n", "[e~["),
        ("<|start|>assistant", "<|end|>"),
        ("[/INST]", "</s>"),
        ("<start_of_turn>model\n", "<end_of_turn>"),
    }
)
"""What opens a response and ends a turn in the families of docs/tokens.md."""


def warnings_of(encoder: DeltaEncoder) -> list[str]:
    """Return one sentence for each thing that this checkpoint may not do as a run needs it."""
    profile = encoder.profile
    found: list[str] = []
    if (profile.answer_start, encoder.decode([profile.end_of_turn])) not in TRIED:
        found.append(
            "the chat template is of no family that docs/tokens.md lists: what it writes was probed, but never tried "
            "with a model, so read the output of slime-verlog check --model"
        )
    if not profile.reads_calls:
        found.append(
            "calls cannot be read in the template's own form, so environments with tools need tools_in: prompt"
        )
    return found


def describe(encoder: DeltaEncoder) -> list[str]:
    """Return the profile as lines of text, with tokens as their texts."""
    shown = dict(vars(encoder.profile))
    shown["stop_ids"] = [encoder.decode([token]) for token in encoder.profile.stop_ids]
    shown["end_of_turn"] = encoder.decode([encoder.profile.end_of_turn])
    shown["call_form"] = form.shape if (form := encoder.profile.call_form) else "JSON objects with a name and arguments"
    return [f"{name:18}{value!r}" for name, value in shown.items()]
