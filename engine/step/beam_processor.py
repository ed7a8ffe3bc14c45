"""Applies the logits of beams: when all of a search are computed, they fork, go on or end."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from millrace.engine.beams.group import BeamGroup
from millrace.engine.beams.search import Extension
from millrace.engine.sampling.beam_candidates import likeliest
from millrace.engine.scheduling.planner import Planner
from millrace.engine.step.live_requests import LiveRequests
from millrace.engine.step.outputs import started_output
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import EngineOutput, NonFiniteLogitsError


class BeamProcessor:
    """Advances beam searches. The beams of one may be computed in several steps, as far as budget,
    slots and blocks go; the next token of each is chosen when those of all are known.

    A beam that goes on as several shares its blocks with the others, and the first to write copies
    the last one. A preempted beam is computed again from its tokens, which changes nothing.
    """

    def __init__(self, planner: Planner, live: LiveRequests) -> None:
        self._planner = planner
        self._live = live

    def add(
        self, sequences: Rows[Sequence], logits: torch.Tensor, outputs: list[EngineOutput]
    ) -> None:
        """Take in the logits [len(sequences), vocab_size] of beams of one search that were
        computed; those of a search that is over are dropped."""
        group: BeamGroup = sequences[0].beams
        search = group.search
        excluded = search.excluded(sequences[0].num_output_tokens)
        candidates = likeliest(logits, search.temperature, search.num_candidates, excluded)
        if candidates is None:
            error = NonFiniteLogitsError(sequences[0].num_output_tokens)
            self._live.fail(sequences[0], error, outputs)
            return
        for sequence, own in zip(sequences, candidates, strict=True):
            group.note(sequence, own)
        if group.is_complete:
            self._advance(group, outputs)

    def _advance(self, group: BeamGroup, outputs: list[EngineOutput]) -> None:
        group.add_up()
        for sequence in group.members:
            self._planner.tables.cache_full_blocks(sequence, sequence.num_computed_tokens)
        extensions = group.extend()
        if not extensions:
            self._live.finish_search(group, outputs)
            return
        if not group.has_advanced:
            if not group.first.started:
                group.first.started = True
                outputs.append(started_output(group.first))
            outputs.append(EngineOutput(request_id=group.request.request_id))
        parents = list(zip(list(group.members), group.children(extensions), strict=True))
        for sequence, own in parents:
            if not own:
                group.leave(sequence)
                self._live.drop_beam(sequence)
        beams: dict[Extension, Sequence] = {}
        for parent, own in parents:
            for extension in own[1:]:
                child = group.child_of(parent, extension.token)
                self._planner.fork_beam(parent, child)
                self._live.add_beam(child)
                beams[extension] = child
            if own:
                parent.token_ids[-1] = own[0].token
                beams[own[0]] = parent
        group.advance([(beams[extension], extension.logprob) for extension in extensions])
