"""A decoded sampling request: what of it an engine can do, and what the engine is asked in the end."""

from __future__ import annotations

from dataclasses import dataclass

from descant.errors import UserError
from descant.types import EngineCapabilities, ModelInput, SampleRequest, SamplingParams, TensorData, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSubmission:
    """A decoded ``asample``: the request without what the service adds (its id and which version)."""

    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    num_samples: int
    sampling_params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    topk_sample_logprobs: int = 0
    polls_at_once: bool = False
    """Its client polls as soon as it has the id: if it does not, no client will."""

    def check(self, base: str, capabilities: EngineCapabilities) -> None:
        """Raises ``UserError`` for what is out of range, and for what the engine of this base cannot do."""
        if self.seq_id < 0:
            raise UserError(f"seq_id is {self.seq_id}, expected 0 or more")
        if not 1 <= self.num_samples <= capabilities.max_num_samples:
            raise UserError(f"num_samples is {self.num_samples}, expected 1 to {capabilities.max_num_samples}")
        if self.prompt_logprobs and not capabilities.prompt_logprobs:
            raise UserError(f"prompt_logprobs is true, which the engine of {base} cannot do")
        if self.target_prompt_logprobs is not None and not capabilities.target_prompt_logprobs:
            raise UserError(f"target_prompt_logprobs is set, which the engine of {base} cannot do")
        for name, k, most in (
            ("topk_prompt_logprobs", self.topk_prompt_logprobs, capabilities.max_topk_prompt_logprobs),
            ("topk_sample_logprobs", self.topk_sample_logprobs, capabilities.max_topk_sample_logprobs),
            ("prompt_alt_tokens_k", self.prompt_alt_tokens_k, capabilities.max_prompt_alt_tokens_k),
        ):
            if not 0 <= k <= most:
                raise UserError(f"{name} is {k}, expected 0 to {most}")

    def request(
        self, request_id: str, *, version: Version | None, inflight: bool, owner: str, prefix_scope: str
    ) -> SampleRequest:
        """For the engine, on these weights."""
        return SampleRequest(
            request_id=request_id,
            version=version,
            inflight=inflight,
            prompt=self.prompt,
            num_samples=self.num_samples,
            sampling_params=self.sampling_params,
            prompt_logprobs=self.prompt_logprobs,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
            target_prompt_logprobs=self.target_prompt_logprobs,
            prompt_alt_tokens_k=self.prompt_alt_tokens_k,
            topk_sample_logprobs=self.topk_sample_logprobs,
            owner=owner,
            prefix_scope=prefix_scope,
        )
