"""A value that is sent tells of the samples that taught it, however adoption treats the work before it."""

from __future__ import annotations

import pytest

from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.messages import NO_VERSION, SYNCER, FragmentValue, GlobalFragment, Lease, PullRequest, Welcome
from diloco_jax.protocol.pacing import ProtocolConfig
from tests.protocol.syncer_inputs import sent


def fragment(version: int, merged_round: int = NO_VERSION) -> GlobalFragment:
    return GlobalFragment(version, 0, version, 1, 10 + version, 0, merged_round=merged_round)


@pytest.mark.parametrize(
    ("adopt_mode", "shared", "merged", "since"),
    [
        ("overwrite", True, True, 8),
        ("overwrite", False, False, 8),
        ("rebase", True, True, 4),
        ("rebase", True, False, 8),
        ("rebase", False, False, 8),
        ("blend", True, True, 0),
        ("blend", True, False, 8),
        ("blend", False, False, 0),
    ],
)
def test_a_value_says_from_which_sample_on_it_holds_what_was_taught(
    adopt_mode: str, shared: bool, merged: bool, since: int
) -> None:
    """Staged after step 2 of 2 samples each; the round's result is adopted after step 4.

    Of a value that was left out nothing stays.
    """
    config = ProtocolConfig(sync_every=1, num_fragments=1, overlap_steps=2)
    learner = Learner("a", 1, config, (), step_samples=2, adopt_mode=adopt_mode)
    learner.on_connected(0.0)
    learner.on_message(Welcome(0, (0,), 1), 0.0)
    learner.on_message(Lease(0, 0, 1000), 0.0)
    learner.on_message(fragment(0), 0.0)

    def step() -> None:
        learner.on_step(10, 1.0, 2.5, 1.0, samples_end=learner.take_batch().end)

    step()
    step()
    if shared:
        (first,) = sent(learner.on_pull(PullRequest(1, 0, 2), 1.0), SYNCER)
        assert isinstance(first, FragmentValue) and (first.since, first.samples) == (0, 4)
    step()
    step()
    learner.on_message(fragment(1, 1 if merged else NO_VERSION), 2.0)
    step()
    (second,) = sent(learner.on_pull(PullRequest(2, 0, 5), 3.0), SYNCER)
    assert isinstance(second, FragmentValue) and (second.since, second.samples) == (since, 10)
