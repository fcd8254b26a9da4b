"""For each verb, what it is most often called with; the last thing that its help shows."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "check": ("check zb-v -p 4 -m 8", "check schedule.csv --capacity 0"),
    "checkpoint show": ("checkpoint show runs/a",),
    "checkpoint draw": ("checkpoint draw runs/a plan.json -o readings.svg",),
    "checkpoint export": (
        "checkpoint export runs/a -o weights.safetensors",
        "checkpoint export runs/a --to dcp -o exported",
    ),
    "cluster": ("cluster -p 2 -o cluster.json", "cluster cluster.toml"),
    "compare": (
        "compare gpipe 1f1b zb-h1 -p 8 -m 32",
        "compare plan.json run.json --memory memory.svg",
    ),
    "contest": ("contest --quick -o contest.html", "contest mymodel:workload -p 4 --on emulated"),
    "demo": ("demo --steps 20",),
    "draw": (
        "draw 1f1b -p 4 -m 8 -o 1f1b.svg",
        "draw plan.json -o plan.pdf --width 800",
        "draw pipedream --versions -o - > pipedream.svg",
    ),
    "explain": ("explain plan.json --learning-rate 0.1 --curvature 20",),
    "fleet": ("fleet fleet.toml --simulate -o fleet.svg",),
    "measure-cluster": ("measure-cluster --ranks 4 -o cluster.json",),
    "plan": (
        "plan graph.json -p 4 -m 16 -o plan.json",
        "plan graph.json cluster.toml --minibatch 64 --memory 8GiB",
    ),
    "profile": ("profile mymodel:workload -m 8 -o graph.json",),
    "rehearse": ("rehearse plan.json -o rehearsal.html", "rehearse 1f1b -p 8 -m 16 --op-ms 5"),
    "report": ("report penstock-report",),
    "run": ("run train.py -n 4 --restarts 3",),
    "schedules": ("schedules", "schedules zb-h1"),
    "serve": ("serve --listen 0.0.0.0:5600 --job run-7",),
    "simulate": (
        "simulate interleaved-1f1b:stages_per_rank=4 -p 4 -m 16",
        "simulate plan.json --json",
    ),
    "train": ("train mymodel:workload --plan plan.json --steps 100",),
    "verify": ("verify plan.json mymodel:workload --steps 3",),
}
"""By verb, or group and verb, without the program's name."""


def epilog_of(verb: str) -> str:
    """The examples of a verb as a paragraph that is not wrapped; nothing where there are none."""
    shown = EXAMPLES.get(verb, ())
    if not shown:
        return ""
    head = "Example:" if len(shown) == 1 else "Examples:"
    return "\n".join(["\b", head, *(f"  penstock {example}" for example in shown)])
