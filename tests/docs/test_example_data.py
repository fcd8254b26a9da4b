"""The data of ``examples/models``: it can be learned, and a seed gives it again."""

from __future__ import annotations

import torch

from examples.models import data


def drawn():
    return torch.Generator().manual_seed(3)


def test_a_seed_gives_the_same_again():
    for make in (
        lambda draw: data.digits(3, 32, draw),
        lambda draw: data.boxes(3, 32, 4, draw),
        lambda draw: data.videos(3, 4, 16, draw),
        lambda draw: data.sounds(3, 3, 32, 16, draw),
        lambda draw: data.text(3, 8, 128, draw),
        lambda draw: data.masked_text(3, 8, 128, draw),
    ):
        for ours, again in zip(make(drawn()), make(drawn()), strict=True):
            assert torch.equal(ours, again)
            assert len(ours) == 3


def test_digits_show_what_their_labels_say():
    images, labels = data.digits(40, 32, drawn())
    assert images.shape == (40, 3, 32, 32)
    ones, eights = (images[labels == digit].clamp(min=1).mean() for digit in (1, 8))
    assert eights > ones  # it has nearly twice as many dots


def test_a_box_is_bright_where_its_target_says():
    images, targets = data.boxes(20, 32, 4, drawn())
    assert torch.equal(targets[..., 0].sum((1, 2)), torch.ones(20))
    for image, cells in zip(images, targets, strict=True):
        down, right = cells[..., 0].nonzero()[0].tolist()
        _, y, x, height, width, colour = cells[down, right].tolist()
        top, left = (down + y) * 8 - height * 16, (right + x) * 8 - width * 16
        inside = image[int(colour), round(top) : round(top + height * 32)]
        inside = inside[:, round(left) : round(left + width * 32)]
        assert inside.numel() == round(height * 32) * round(width * 32)
        assert inside.mean() > 0.8


def test_squares_move_where_captions_say():
    videos, captions = data.videos(30, 4, 16, drawn())
    for video, (colour, way, end) in zip(videos, captions.tolist(), strict=True):
        shown = video[:, colour - 2]
        down, right = data.DIRECTIONS[way - 5]
        step = torch.roll(shown[0], (2 * down, 2 * right), (0, 1))
        assert (shown[1] - step).abs().mean() < 0.3
        assert end == 1
    so_far = data.captions_so_far(captions)
    assert torch.equal(so_far[:, 1:], captions[:, :-1])
    assert not so_far[:, 0].any()


def test_a_translation_follows_its_rule():
    (source, so_far), target = data.translations(4, 5, 20, drawn())
    assert torch.equal(target.flip(1), (source + 2) % 19 + 1)
    assert torch.equal(so_far[:, 1:], target[:, :-1])
    assert sorted(data.translated(torch.arange(1, 20)[None], 20)[0].tolist()) == [*range(1, 20)]


def test_what_is_hidden_in_a_text_is_asked_for():
    tokens, targets = data.masked_text(50, 16, 129, drawn())
    hidden = targets != -100
    assert torch.equal(tokens == 128, hidden)
    assert hidden[:, 0].all()
    assert 0.1 < hidden[:, 1:].double().mean() < 0.2
    inputs, following = data.text(4, 16, 128, drawn())
    assert torch.equal(inputs[:, 1:], following[:, :-1])


def test_higher_tones_are_heard_in_higher_bands():
    energies, tones = data.sounds(60, 1, 32, 16, drawn())
    loudest = energies[:, 0].exp().mean(2).argmax(1).double()
    low, high = loudest[tones[:, 0] == 1].mean(), loudest[tones[:, 0] == 6].mean()
    assert high > low + 2
