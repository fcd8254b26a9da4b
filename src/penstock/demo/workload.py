"""The demo's GPT, text and optimizer as a workload."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from penstock.demo.corpus import Corpus
from penstock.demo.gpt import GPT, loss
from penstock.trial import Workload

ROWS = 16
CONTEXT = 48
MICROBATCHES = 8
SMALL = {"width": 128, "heads": 4, "layers": 4}


def build_model() -> nn.Module:
    """Build the GPT, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(context=CONTEXT)


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make AdamW in its fused form, which takes a third of the plain one's time on a CPU."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), fused=True)


def build_small_model() -> nn.Module:
    """Build a GPT of 0.9 M parameters, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(context=CONTEXT, **SMALL)


def small_workload() -> Workload:
    """A GPT of 0.9 M parameters on the text of ``workload``, which learns something in a minute."""
    return replace(workload(), build_model=build_small_model, name="small byte-level GPT")


def workload() -> Workload:
    """A byte-level GPT of 10 M parameters on the source code of Python's standard library."""
    corpus = Corpus.standard_library()
    megabytes = (len(corpus.training) + len(corpus.held_out_text)) / 1e6
    count = len(corpus.training_files) + len(corpus.held_out_files)
    return Workload(
        build_model=build_model,
        loss=loss,
        optimizer=build_optimizer,
        batches=lambda: corpus.batches(ROWS, CONTEXT),
        held_out=corpus.held_out(32, CONTEXT),
        name="byte-level GPT",
        unit="token",
        notes=f"{megabytes:.1f} MB of source code from {count} files of Python "
        f"{sys.version_info.major}.{sys.version_info.minor}'s standard library",
    )
