"""A model that was captured with labels is evaluated with them, or it is said what to do."""

import pytest
import torch

import penstock as pk
from penstock.engine.model.batches import BatchSplit

IDS = torch.ones(4, 6, dtype=torch.long)


@pytest.mark.parametrize("batch", [{"input_ids": IDS}, IDS])
def test_labels_that_are_missing_are_asked_for_in_a_sentence(batch):
    split = BatchSplit("labels", whole=True, taken=("input_ids", "labels"))
    with pytest.raises(pk.InputError, match=r"with labels.*'labels': batch\['input_ids'\]"):
        split.inputs_of(batch)


def test_labels_that_are_there_or_were_never_taken_are_no_matter():
    whole = BatchSplit("labels", whole=True, taken=("input_ids", "labels"))
    assert set(whole.inputs_of({"input_ids": IDS, "labels": IDS})) == {"input_ids", "labels"}
    apart = BatchSplit("labels", taken=("input_ids",))
    assert set(apart.inputs_of({"input_ids": IDS, "labels": IDS})) == {"input_ids"}
    assert apart.inputs_of(IDS) is IDS
