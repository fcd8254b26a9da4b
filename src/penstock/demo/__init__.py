"""Something real to try the library on: a small GPT over bytes, and text that every machine has.

Nothing in the library imports this room but the command line.
"""

from penstock.demo.corpus import Corpus, small_workload, workload
from penstock.demo.gpt import GPT, loss

__all__ = ["GPT", "Corpus", "loss", "small_workload", "workload"]
