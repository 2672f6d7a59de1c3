"""The role that samples: versions that are published, and steps of the scheduler's plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from descant.ckpt.snapshot import Snapshots
from descant.errors import DescantError, NotFound
from descant.model.base import BaseModel
from descant.ranks.agreement import all_or_none, gather_outcomes
from descant.ranks.executor import to_descant_error
from descant.ranks.ops import Pin, Publish, Release, SampleStep, Unpin
from descant.ranks.peers import Peers
from descant.ranks.roles import Handlers
from descant.ranks.settings import ReplicaSettings
from descant.ranks.sizes import SamplingSizes
from descant.sample.plan import SampleLimits, SequenceOutput, StepPlan
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.sample.speculative import NgramDrafter
from descant.types import EngineCapabilities, Version


class SampleRole:
    def __init__(
        self,
        model: BaseModel,
        snapshots: Snapshots,
        peers: Peers,
        *,
        settings: ReplicaSettings,
        sizes: SamplingSizes,
        sampler: type[Sampler] = Sampler,
    ):
        """Takes the memory for keys and values, and warms up. ``sampler``: what makes the steps."""
        self._model, self._snapshots, self._peers = model, snapshots, peers
        self._settings, self._sizes = settings, sizes
        self.capabilities = EngineCapabilities(max_num_seqs=sizes.max_num_seqs)
        self.sampler = sampler(
            model,
            num_pages=sizes.num_pages,
            max_rows=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            compile_decode=settings.rank.compile is not False,
            batch_invariant=settings.sample.batch_invariant,
        )
        self.sampler.warm_up()
        self._published: set[Version] = set()

    def handlers(self) -> Handlers:
        return {
            SampleStep: self.step,
            Publish: self.publish,
            Release: self.release,
            Pin: self.pin,
            Unpin: lambda op: self.sampler.unpin(op.version, op.count),
        }

    # ------------------------------------------------------------------------------------------------ steps
    def step(self, op: SampleStep) -> list[Sequence[SequenceOutput] | DescantError | None]:
        return gather_outcomes(self._peers, "outputs", lambda: self.sample(op.plans[self._peers.rank]))

    def sample(self, plan: StepPlan | None) -> Sequence[SequenceOutput] | DescantError | None:
        """``plan`` None: another rank has one, maybe."""
        if plan is None:
            if self._model.sharded:
                self._model.empty_pass(backward=False)
            return None
        try:
            return self.sampler.step(plan)
        except Exception as error:
            if self._model.sharded:  # it may have left a pass that others are in
                raise
            return to_descant_error(error)

    def make_scheduler(self) -> Scheduler:
        settings, facts, sizes = self._settings, self._model.facts, self._sizes
        limits = SampleLimits(
            max_num_seqs=sizes.max_num_seqs,
            num_pages=sizes.num_pages,
            max_num_batched_tokens=max(sizes.max_num_batched_tokens, self.sampler.chunk_tokens or 1),
            chunk_tokens=self.sampler.chunk_tokens,
            copies_pages=self.sampler.copies_pages,
            max_queued_requests=settings.sample.max_queued_requests,
            max_context_length=facts.max_context_length,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            max_num_samples=self.capabilities.max_num_samples,
            max_topk=self.capabilities.max_topk_prompt_logprobs,
            num_speculative_tokens=settings.speculative.num_tokens,
        )
        seeds = torch.Generator()
        seeds.seed()  # from the system's entropy: requests without a seed differ from run to run
        return Scheduler(
            limits,
            decode_text=self._decode_text,
            fresh_seed=lambda: int(torch.randint(0, 2**62, (), generator=seeds)),
            drafter=NgramDrafter() if settings.speculative.method == "ngram" else None,
        )

    def _decode_text(self, tokens: Sequence[int]) -> str:
        tokenizer = cast(PreTrainedTokenizerBase, self._model.tokenizer())
        return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    # ------------------------------------------------------------------------------------------------ versions
    def publish(self, op: Publish) -> None:
        version = op.ref.version
        was_there = version in self._published

        def undo() -> None:
            if not was_there:
                self._withdraw(version)

        all_or_none(self._peers, lambda: self.make_known(op), undo)

    def make_known(self, op: Publish) -> None:
        self._snapshots.publish(op.ref, op.loaded)
        self._published.add(op.ref.version)

    def release(self, op: Release) -> None:
        self._withdraw(op.version)

    def _withdraw(self, version: Version) -> None:
        self._published.discard(version)
        self._model.bank.release(version)

    def pin(self, op: Pin) -> None:
        all_or_none(
            self._peers,
            lambda: self.pin_version(op.version, op.count),
            lambda: self.sampler.unpin(op.version, op.count),
        )

    def pin_version(self, version: Version, count: int) -> None:
        if version not in self._published:
            raise NotFound(f"version {version.number} of model {version.model_id} was never published, or was released")
        self.sampler.pin(version, count)
