"""Every feature beside every other one, while each process dies or is restarted: streams have exact tokens.

The default suite has one service with all features but ranks, so every pair of them, and every event with each; a group
of ranks starts too slowly for it. The long suite adds a service with ranks, and each pair alone.
"""

import pytest

from tests.system.combinations import Feature, Features, Service, covering, events_of, pairs

# Its workers are forked by a process that has imported torch, which takes seconds.
pytestmark = pytest.mark.together("torch")


def _named(features: Features) -> str:
    return "+".join(sorted(features))


def _check(features: Features) -> None:
    with Service(features) as service:
        for event in events_of(features):
            service.check(event)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "features",
    [
        pytest.param(features, id=_named(features), marks=[pytest.mark.long] if Feature.RANKS in features else [])
        for features in covering()
    ],
)
def test_all_features_that_go_together(features: Features) -> None:
    _check(features)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("features", pairs(), ids=_named)
def test_a_pair_of_features(features: Features) -> None:
    _check(features)


def test_the_services_have_every_pair_and_every_event_with_each_feature() -> None:
    def met(services: list[Features]) -> set[tuple[str, str]]:
        return {(feature, event) for features in services for event in events_of(features) for feature in features}

    services = covering()
    assert all(any(pair <= features for features in services) for pair in pairs())
    assert met(services) == met(pairs())
