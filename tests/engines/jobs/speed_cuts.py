"""Where DeepSpeed's own functions cut, for arguments NUM_PARTS:WEIGHTS."""

from __future__ import annotations

import json
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime.utils import partition_balanced, partition_uniform

for argument in sys.argv[1:]:
    parts, weights = argument.split(":")
    items = json.loads(weights)
    cuts = partition_balanced(items, int(parts)), partition_uniform(len(items), int(parts))
    print([[int(cut) for cut in own] for own in cuts])
