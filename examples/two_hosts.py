"""Two stages on two hosts, each with a replica on every device; a process loads its own rows only.

python examples/two_hosts.py                              four threads
torchrun --nproc-per-node=4 examples/two_hosts.py         four processes
docs/tutorial/two-hosts.md                                two hosts, by torchrun or Slurm
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import penstock as pk


class Rows(Dataset):
    """Stands for rows that take long to load."""

    num_loaded = 0

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        self.num_loaded += 1
        inputs = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return inputs, inputs[:4].argmax()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="examples/cluster.toml")
    parser.add_argument("--rows", type=int, default=64, help="of a minibatch")
    parser.add_argument("--save", metavar="FOLDER", help="where checkpoints are, for all hosts")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    model.append(nn.Linear(32, 4))
    rows, cluster = Rows(), pk.Cluster.load(options.cluster)
    half = len(cluster.devices) // 2
    inputs, targets = default_collate([rows[index] for index in range(options.rows // (2 * half))])
    graph = pk.profile(model, inputs, loss=F.cross_entropy, targets=targets)
    plan = pk.plan(graph, cluster, minibatch=options.rows, stages=2, replicas=(half, half))

    with pk.Pipeline(
        model,
        plan,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        compare_data=False,  # processes have different rows
        startup_seconds=900,  # hosts begin at different moments
        deadline_seconds=300,
    ) as pipeline:
        done = (pipeline.load(options.save) if options.save else None) or 0
        own, rows.num_loaded = pipeline.own_rows(rows), 0
        shuffled = torch.Generator().manual_seed(0)  # alike on all processes
        loader = DataLoader(own, options.rows, shuffle=True, generator=shuffled, drop_last=True)
        for step, batch in enumerate(loader):
            if step < done:
                continue
            loss = pipeline.step(*batch)
            if pipeline.is_first and step % 5 == 0:
                print(f"step {step}: loss {loss:.6f}", flush=True)
        if options.save:
            pipeline.save(options.save, keep=2)
        print(f"this process loaded {rows.num_loaded} of {len(loader) * options.rows} rows")


if __name__ == "__main__":
    main()
