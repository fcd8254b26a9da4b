"""Rehearsing a plan on emulated devices: real processes, real messages, compute that is a wait."""

from penstock.rehearsal.conduct import rehearse
from penstock.rehearsal.result import Comparison, Rehearsal

__all__ = ["Comparison", "Rehearsal", "rehearse"]
