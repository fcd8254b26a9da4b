"""The demonstration text: real, the same every time, and honestly split."""

import itertools

import pytest
import torch

from penstock.base.errors import InputError
from penstock.demo import Corpus


@pytest.fixture(scope="module")
def corpus():
    return Corpus.standard_library()


@pytest.fixture
def small():
    return Corpus({f"{index:02}.py": bytes([65 + index]) * 20 for index in range(20)})


def test_the_standard_library_is_several_megabytes_of_source(corpus):
    assert len(corpus.training) > 3_000_000
    assert len(corpus.held_out_text) > 100_000
    assert "dataclasses.py" in corpus.training_files + corpus.held_out_files
    assert b"import" in bytes(corpus.training[:100_000].tolist())


def test_no_tests_and_no_installed_packages(corpus):
    names = corpus.training_files + corpus.held_out_files
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests"}
    # Tables of character sets are nearly a fifth of all bytes, and make the loss jump.
    assert "encodings" not in folders


def test_reading_twice_gives_the_same_bytes(corpus):
    again = Corpus.standard_library()
    assert torch.equal(again.training, corpus.training)
    assert torch.equal(again.held_out_text, corpus.held_out_text)
    assert again.held_out_files == corpus.held_out_files


def test_the_split_is_by_file_and_disjoint(corpus, small):
    assert not set(corpus.training_files) & set(corpus.held_out_files)
    assert small.held_out_files == ("00.py", "10.py")
    assert set(small.held_out_text.tolist()) == {ord("A"), ord("K"), ord("\n")}
    assert not {ord("A"), ord("K")} & set(small.training.tolist())


def test_batches_are_windows_of_the_training_text(corpus):
    inputs, targets = next(corpus.batches(4, 32, seed=3))
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = bytes(corpus.training.numpy())
    assert all(bytes(row.tolist()) in text for row in inputs)


def test_the_seed_decides_the_batches(corpus):
    def first(seed):
        return [inputs for inputs, _ in itertools.islice(corpus.batches(2, 16, seed), 3)]

    def same(left, right):
        return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

    assert same(first(1), first(1))
    assert not same(first(1), first(2))
    assert not torch.equal(first(1)[0], first(1)[1])


def test_batches_leave_the_default_random_stream_alone(corpus):
    before = torch.get_rng_state()
    next(corpus.batches(2, 16))
    assert torch.equal(before, torch.get_rng_state())


def test_held_out_is_fixed_and_spans_the_held_out_text(corpus):
    inputs, targets = corpus.held_out(8, 32)
    again, _ = corpus.held_out(8, 32)
    assert torch.equal(inputs, again)
    assert inputs.shape == targets.shape == (8, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[0], corpus.held_out_text[:32].long())
    assert torch.equal(targets[-1], corpus.held_out_text[-32:].long())


def test_one_window_may_be_the_whole_text():
    corpus = Corpus({"a.py": b"abcd", "b.py": b"wxyz"})
    assert corpus.held_out(1, 3)[1].tolist() == [list(b"bcd")]
    assert next(corpus.batches(1, 3))[0].tolist() == [list(b"wxy")]
    with pytest.raises(InputError, match="context 4 needs 5 bytes, but the text has 4"):
        corpus.held_out(1, 4)
    with pytest.raises(InputError, match="context 4 needs 5 bytes, but the text has 4"):
        corpus.batches(1, 4)


def test_a_folder_without_sources_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(InputError, match=f"found 1 non-empty Python sources in {tmp_path}"):
        Corpus.standard_library(tmp_path)


def test_sizes_below_one_are_refused(small):
    with pytest.raises(InputError, match="rows and context must be ≥ 1, but are 0 and 8"):
        small.batches(0, 8)
