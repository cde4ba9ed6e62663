"""Checks of images in slime's model and of its critic's head (`python -m
tests.advantage.image_critic`).

slime's own Qwen3.5-VL model, tiny, around Megatron's language model; slime's own model provider
builds both roles.
"""

import importlib
import importlib.util
import os
import tempfile
from argparse import Namespace
from typing import Any
from unittest.mock import patch as mock_patch

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.inside_slime import installed, megatron, report, slime_args, start
from tests.slime.cpu.cuda_on_cpu import choose_cpu

TOKENIZER = chatml_tokenizer()
IMAGE, VISION_START = TOKENIZER.convert_tokens_to_ids(["<|image_pad|>", "<|vision_start|>"])
VOCABULARY, HIDDEN = len(TOKENIZER), 32


def build(args: Namespace, role: str, **stages: bool) -> Any:
    """A role's model as slime's provider builds it, frozen parameters included."""
    provider = megatron("model_provider")
    with mock_patch.object(
        provider, "core_transformer_config_from_args", lambda _: transformer_config()
    ):
        return provider.get_model_provider_func(args, role)(**stages)


def transformer_config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
    )


def vl_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> Any:
    """`--spec`: slime's Qwen3.5-VL model with local layers instead of TransformerEngine's."""
    from slime_plugins.models.qwen3_5_vl import Qwen3_5VLModel

    from tests.slime.cpu.megatron_on_cpu import layer_spec

    hf_config = vl_config()
    layers = layer_spec(Namespace(qk_layernorm=False, normalization="RMSNorm"), config)

    def provider(
        pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> Any:
        stages = dict(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        return Qwen3_5VLModel(config, layers, hf_config, args, **stages)

    return provider


def vl_config() -> Qwen3_5Config:
    """A tiny Qwen3.5 with the patches of its real image processor."""
    vision = dict(
        depth=1,
        hidden_size=16,
        intermediate_size=16,
        num_heads=2,
        patch_size=16,
        temporal_patch_size=2,
    )
    vision |= dict(
        out_hidden_size=HIDDEN, num_position_embeddings=16, in_channels=3, spatial_merge_size=2
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = dict(
        hidden_size=HIDDEN, vocab_size=VOCABULARY, num_hidden_layers=1, rope_parameters=rope
    )
    ids = dict(
        image_token_id=IMAGE, video_token_id=VOCABULARY + 1, vision_start_token_id=VISION_START
    )
    return Qwen3_5Config(text_config=text, vision_config=vision, **ids)


def vl_args(**changes: Any) -> Namespace:
    model: dict[str, Any] = dict(
        transformer_impl="local", spec=("tests.advantage.image_critic", "vl_spec")
    )
    model |= dict(custom_model_provider_path=None, mtp_num_layers=None, fp16_lm_cross_entropy=False)
    model |= dict(padded_vocab_size=VOCABULARY, max_position_embeddings=64, use_rope_scaling=False)
    model |= dict(untie_embeddings_and_output_weights=True, rotary_percent=1.0, rotary_base=10000)
    return slime_args(**{**model, **changes})


def values(model: Any) -> torch.Tensor:
    """What the model says about a packed batch of one sequence with an image of one token."""
    tokens = torch.tensor([[1, 2, VISION_START, IMAGE, 3, 4]])
    ends = torch.tensor([0, tokens.shape[1]], dtype=torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=ends, cu_seqlens_kv=ends, qkv_format="thd")
    image = dict(
        pixel_values=torch.ones(4, 3 * 2 * 16 * 16), image_grid_thw=torch.tensor([[1, 2, 2]])
    )
    return model(tokens, packed_seq_params=packed, **image)


def one_value_per_token_reaches_the_head_and_the_image_model() -> None:
    args = vl_args()
    with installed(args):
        actor, critic = build(args, "actor"), build(args, "critic")
        assert values(actor).shape == (1, 6, VOCABULARY)
        found = values(critic)
    assert found.shape == (1, 6, 1), found.shape
    found.sum().backward()
    names = {name for name, parameter in critic.named_parameters() if parameter.grad is not None}
    assert {"language_model.output_layer.weight", "language_model.output_layer.bias"} < names
    assert any(name.startswith("model.visual") for name in names)
    assert not any(name.startswith("output_layer") for name, _ in critic.named_parameters())


def turns_with_pictures() -> dict[str, Any]:
    """Samples of two pictures (window memory), one and none, as a training rank has them: pictures
    as PNG bytes."""
    from rollout.tokens.encoding import DeltaEncoder
    from tests.fixtures.vision import picture, processor

    encoder = DeltaEncoder(TOKENIZER, processor(), small_images=True)
    shown = [[picture(0), picture(1, 96, 64)], [picture(2, 64, 128)], []]
    prompts = [
        encoder.prompt(
            [
                {
                    "role": "user",
                    "content": [*({"type": "image", "image": p} for p in pictures), WORDS],
                }
            ]
        )
        for pictures in shown
    ]
    answers = [(5, 6, 7), (5, 6), (5, 6, 7)]
    tokens = [
        torch.tensor([*p.token_ids, *answer]) for p, answer in zip(prompts, answers, strict=True)
    ]
    return {
        "tokens": tokens,
        "loss_masks": [torch.ones(len(answer)) for answer in answers],
        "response_lengths": list(map(len, answers)),
        "total_lengths": [len(ids) for ids in tokens],
        "multimodal_train_inputs": [prompt.train_inputs for prompt in prompts],
    }


WORDS = {"type": "text", "text": "a red key"}


def logits_of(model: Any, data: dict[str, Any]) -> torch.Tensor:
    """The model's logits [tokens, vocabulary] for a micro-batch that slime itself packs; the patch
    is installed."""
    iterator = Namespace(get_next=lambda keys: {key: data.get(key) for key in keys})
    batch = megatron("model").get_batch(iterator, list(data), 1)
    return model(
        batch["tokens"],
        packed_seq_params=batch["packed_seq_params"],
        **batch["multimodal_train_inputs"],
    )[0]


def pictures_of_the_encoder_reach_their_turns_through_slimes_own_batches() -> None:
    data = turns_with_pictures()
    assert {length % 2 for length in data["total_lengths"]} == {0, 1}
    with installed(
        vl_args(spec=("slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider"))
    ):
        model = build(vl_args(), "actor")
        together = logits_of(model, data).split(data["total_lengths"])
        alone = [
            logits_of(model, {key: values[k : k + 1] for key, values in data.items()})
            for k in range(3)
        ]
        one, other, none = data["multimodal_train_inputs"]
        swapped = logits_of(model, {**data, "multimodal_train_inputs": [other, one, none]})
    assert not torch.allclose(swapped, torch.cat(together)), "pictures do not matter"
    for one, packed in zip(alone, together, strict=True):
        torch.testing.assert_close(packed, one, atol=1e-5, rtol=1e-5)
    sum(logits.sum() for logits in together).backward()
    assert all(
        parameter.grad.abs().sum() > 0 for parameter in model.model.visual.merger.parameters()
    )


def positions_of_pictures_in_training_are_the_engines() -> None:
    from slime_plugins.models.qwen3_5_vl_utils import build_packed_mrope_position_ids
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    engine, data = Qwen3_5Model(vl_config()), turns_with_pictures()
    kinds = dict(
        image_token_id=IMAGE, video_token_id=VOCABULARY + 1, vision_start_token_id=VISION_START
    )
    for ids, images in zip(data["tokens"], data["multimodal_train_inputs"], strict=True):
        grids = None if images is None else images["image_grid_thw"]
        bounds = torch.tensor([0, len(ids)])
        trained = build_packed_mrope_position_ids(
            ids[None], bounds, grids, None, **kinds, spatial_merge_size=2
        )
        served, _ = engine.get_rope_index(
            ids[None], (ids[None] == IMAGE).int(), image_grid_thw=grids
        )
        assert torch.equal(trained, served[-3:])


def a_stage_without_a_head_is_left_alone() -> None:
    args = vl_args()
    with installed(args):
        model = build(args, "critic", pre_process=True, post_process=False)
    assert not [name for name, _ in model.named_parameters() if "output_layer" in name]


def the_critic_starts_from_the_reference_with_a_new_head_and_from_a_critic_with_its_own() -> None:
    for untied in (True, False):
        args = vl_args(untie_embeddings_and_output_weights=untied)
        with installed(args):
            actor = build(args, "actor")
            args.untie_embeddings_and_output_weights = True  # slime's setting for a critic
            critic = started_critic(args, actor)
            head = critic.language_model.output_layer
            assert 0 < float(head.weight.detach().std()) < 0.1 and not head.bias.detach().any()
            torch.testing.assert_close(
                critic.language_model.decoder.state_dict(), actor.decoder.state_dict()
            )
            head.bias.data.fill_(7.0)
            torch.testing.assert_close(values(saved_and_loaded(args, critic)), values(critic))


def started_critic(args: Namespace, actor: Any) -> Any:
    """A critic that slime starts from the actor's checkpoint; its head was trained on something
    else before."""
    slime, critic = megatron("model"), build(args, "critic")
    with (
        tempfile.TemporaryDirectory() as folder,
        mock_patch.object(slime, "unwrap_model", lambda model: model),
    ):
        reference = os.path.join(folder, "reference")
        save(actor, reference)
        assert needs_new_head(slime, args, critic, reference)
        load(critic, reference)
        critic.language_model.output_layer.weight.data.fill_(3.0)
        slime._reinitialize_critic_output_layer(args, [critic])
    return critic


def saved_and_loaded(args: Namespace, critic: Any) -> Any:
    """Another critic, which starts from this one's checkpoint."""
    later = build(args, "critic")
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, "critic")
        save(critic, saved)
        assert not needs_new_head(megatron("model"), args, later, saved)
        load(later, saved)
    return later


def needs_new_head(slime: Any, args: Namespace, model: Any, folder: str) -> bool:
    args.load = folder
    with (
        mock_patch.object(slime, "unwrap_model", lambda model: model),
        mock_patch.object(slime, "get_load_checkpoint_path_by_args", lambda _: folder),
    ):
        return slime._critic_output_layer_needs_reinit(args, [model], "critic")


def save(model: Any, folder: str) -> None:
    os.mkdir(folder)
    dist_checkpointing.save(model.sharded_state_dict(), folder)


def load(model: Any, folder: str) -> None:
    # slime's patched Megatron, too, passes over what a checkpoint lacks.
    lenient = StrictHandling.IGNORE_ALL
    model.load_state_dict(
        dist_checkpointing.load(model.sharded_state_dict(), folder, strict=lenient), strict=False
    )


CHECKS = (
    pictures_of_the_encoder_reach_their_turns_through_slimes_own_batches,
    positions_of_pictures_in_training_are_the_engines,
    one_value_per_token_reaches_the_head_and_the_image_model,
    a_stage_without_a_head_is_left_alone,
    the_critic_starts_from_the_reference_with_a_new_head_and_from_a_critic_with_its_own,
)


def without_cuda() -> None:
    """Let slime's provider build models on a CPU."""
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign]
    if importlib.util.find_spec("slime.utils.accelerator"):  # newer than v0.3.1
        choose_cpu(importlib.import_module("slime.utils.accelerator"))


if __name__ == "__main__":
    start()
    without_cuda()
    report(CHECKS)
