"""The sizes that NeMo AutoModel's own parser reads from a recipe.

auto_sizes.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from nemo_automodel.recipes._dist_utils import parse_distributed_section

folder = Path(sys.argv[1])
recipe = yaml.safe_load((folder / "automodel_plan.yaml").read_text())
parsed = parse_distributed_section(recipe["distributed"])
pipeline = parsed["pipeline_config"]
report = {name: parsed[name] for name in ("dp_size", "dp_replicate_size", "pp_size", "tp_size")}
report |= {
    "checkpointing": parsed["activation_checkpointing"],
    "batch": pipeline.pp_batch_size,
    "microbatch": pipeline.pp_microbatch_size,
}
(folder / "report-0.json").write_text(json.dumps(report))
