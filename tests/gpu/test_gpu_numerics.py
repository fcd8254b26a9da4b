"""The trainings that are exact on emulated devices, on real ones, beside one rank of their kind."""

from __future__ import annotations

import pytest

from tests.kit.on_devices import (
    FAMILIES,
    FEATURES,
    POLICIES,
    check_family,
    check_feature,
    check_policy,
    check_scaling,
    check_tied,
)


@pytest.mark.parametrize(("schedule", "net"), FAMILIES)
def test_every_family_trains_as_one_rank(places, schedule, net):
    check_family(places, places.of(1, 3, 0, 1), schedule, net)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize(("build", "options"), FEATURES)
def test_features_train_as_one_rank(places, schedule, build, options):
    check_feature(places, places.of(0, 1), schedule, build, options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "chimera"])
def test_tied_weights_and_skips_cross_devices(places, schedule):
    check_tied(places, places.of(0, 1), schedule)


def test_autocast_and_loss_scaling_are_those_of_the_device(places):
    check_scaling(places, places.of(0, 1))


@pytest.mark.parametrize(("policy", "replicas"), POLICIES, ids=str)
def test_asynchronous_training_is_that_of_one_device(places, policy, replicas):
    check_policy(places, places.of(1, 0, 2), policy, replicas)
