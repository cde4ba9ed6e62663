"""The engine behind the HTTP routes: tokenizer, decoder and scheduler, with SGLang's native
requests and responses."""

from __future__ import annotations

import asyncio
import json
import reprlib
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedded.engine.decoder import Decoder, RowDecoder, load_hf_model, loading
from embedded.engine.sampling import SamplingParams
from embedded.engine.scheduler import Request, Scheduler
from slime_verlog import ConfigError, Field, Settings, read_settings


class EngineOptions(Settings):
    """Options of the embedded engine."""

    model_path: str
    """Hugging Face folder."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    max_running_requests: int = Field(default=32, ge=1)
    """Requests that run at the same time; the others wait."""
    context_length: int | None = Field(default=None, ge=1)
    """Largest number of tokens in prompt and response together; default: the model's own length, at
    most 4096."""
    device: str = "cpu"
    """torch device."""
    bf16: bool = False
    """Compute in bfloat16 instead of float32; models with images always use float32."""
    seed: int = 0
    """Seed of requests without a sampling_seed."""


HOST = "127.0.0.1"
"""Where the engine listens: only programs on this machine reach it, and may pause it or load
weights."""


class Engine:
    """The model behind the API: tokenizer, decoder and scheduler, with one method per kind of
    request."""

    max_body_bytes = 8 << 20
    UNSUPPORTED: tuple[str, ...] = (
        "text",
        "stream",
        "image_data",
        "input_embeds",
        "lora_path",
        "return_hidden_states",
    )
    SHARES_PREFIXES = True
    load_model = staticmethod(load_hf_model)

    def __init__(self, options: EngineOptions) -> None:
        """Load the model and start its worker thread; raises ConfigError if it is not supported."""
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        self.options = options
        self.model_path = options.model_path
        self.decoder = self._load_decoder()
        with loading(options.model_path):
            self.tokenizer = AutoTokenizer.from_pretrained(options.model_path)
        self._eos = end_tokens(options.model_path, self.tokenizer)
        self.scheduler = Scheduler(self.decoder, options.seed, self.SHARES_PREFIXES)

    def _load_decoder(self) -> RowDecoder:
        o = self.options
        return Decoder(
            o.model_path, o.max_running_requests, o.context_length, o.device, bf16=o.bf16
        )

    def prepare(self, body: Mapping[str, Any]) -> Request:
        """Check the body of `/generate` and return its request, not queued yet; raises ConfigError
        if it is wrong."""
        for name in self.UNSUPPORTED:
            if body.get(name):
                raise ConfigError(
                    f"the embedded engine does not support {name} for this model; remove it"
                )
        if body.get("return_logprob") and body.get("logprob_start_len", -1) not in (-1, None):
            raise ConfigError(
                "log-probabilities of prompt tokens are not supported; remove logprob_start_len"
            )
        rid = body.get("rid") or uuid.uuid4().hex
        if not isinstance(rid, str):
            raise ConfigError(f"rid must be text, got {reprlib.repr(rid)}")
        prompt = self._prompt(body)
        params = read_settings(SamplingParams, body.get("sampling_params"), "sampling_params.")
        self.scheduler.check(prompt, params)
        ends = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            ends |= self._eos
        return Request(rid, prompt, params, ends)

    def response(self, request: Request, started: float) -> dict[str, Any]:
        """Return the JSON that SGLang returns for a finished request."""
        log_probs = zip(request.log_probs, request.output, strict=True)
        spans = []
        start = 0
        for version, end in request.versions:
            spans.append({"version": version, "start": start, "end": end})
            start = end
        return {
            "text": self._text(request),
            "output_ids": request.output,
            "meta_info": {
                "id": request.rid,
                "finish_reason": request.finish_reason,
                "prompt_tokens": len(request.prompt),
                "completion_tokens": len(request.output),
                "cached_tokens": request.cached_tokens,
                "weight_version": request.versions[-1][0],
                "weight_versions": spans,
                "e2e_latency": time.monotonic() - started,
                "output_token_logprobs": [[log_prob, token, None] for log_prob, token in log_probs],
            },
        }

    async def load_folder(self, folder: str, version: str | None) -> str:
        """Load the weights of another folder; returns the version now served. ConfigError leaves
        the old weights."""
        state = await asyncio.to_thread(lambda: self.load_model(folder).state_dict())
        version = await asyncio.wrap_future(self.scheduler.update_weights(state, version))
        self.model_path = folder
        return version

    def _prompt(self, body: Mapping[str, Any]) -> list[int]:
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ConfigError(f"input_ids must be a list of integers, got {reprlib.repr(ids)}")
        return ids

    def _text(self, request: Request) -> str:
        params = request.params
        output = request.output
        is_stopped = (request.finish_reason or {}).get("type") == "stop"
        if is_stopped and not params.no_stop_trim:
            output = output[:-1]
        return self.tokenizer.decode(output, skip_special_tokens=params.skip_special_tokens)


def end_tokens(folder: str, tokenizer: Any) -> frozenset[int]:
    """Collect the ids that end a response: those of the generation config, the model config and the
    tokenizer."""
    found: set[int | None] = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
    return frozenset(token for token in found if token is not None)
