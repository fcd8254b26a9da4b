"""Something real to try the library on: a small GPT over bytes, and text that every machine has.

Nothing in the library imports this room but the command line.
"""

from penstock.demo.corpus import Corpus
from penstock.demo.gpt import GPT, loss
from penstock.demo.workload import small_workload, workload

__all__ = ["GPT", "Corpus", "loss", "small_workload", "workload"]
