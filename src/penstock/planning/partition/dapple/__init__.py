"""DAPPLE: cuts, replicas and devices of a chain for synchronous training.

Fan et al., PPoPP 2021, arXiv 2007.01045, section 4. ``search`` (``dapple_candidates``) adds stages
from the first to the last; ``rules`` says which devices the replicas of each may take, and
``bound`` how long a step with these stages is at least. Candidates come out best first, for a
simulator to rank.
"""

from penstock.planning.partition.dapple.rules import RULES, Rule
from penstock.planning.partition.dapple.search import DappleCandidate, dapple_candidates

__all__ = ["RULES", "DappleCandidate", "Rule", "dapple_candidates"]
