"""Train a byte-level GPT on real text through a 2-stage pipeline.

python examples/train_lm.py                               two threads in this process
torchrun --nproc-per-node=2 examples/train_lm.py          two processes

With --save FOLDER it saves every ten steps, and goes on from there when it is started again.
"""

import argparse
import itertools

import torch

import penstock as pk
from penstock.demo import GPT, Corpus, loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--save", metavar="FOLDER", help="where checkpoints are")
    parser.add_argument("--draw", metavar="FILE", help="draw the last step, as .svg or .html")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(width=options.width, layers=options.blocks, dropout=options.dropout)
    corpus = Corpus.standard_library()
    batches = corpus.batches(rows=2 * options.microbatches, context=48)
    inputs, targets = corpus.held_out(rows=32, context=48)

    graph = pk.profile(model, inputs[:2], loss=loss, targets=targets[:2])
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=options.microbatches, stages=2)
    with pk.Pipeline(
        model,
        plan,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    ) as pipeline:
        if pipeline.is_first:
            print(plan)
        done = (pipeline.load(options.save) if options.save else None) or 0
        batches = itertools.islice(batches, done, None)  # those that were trained on are over
        for step in range(done + 1, options.steps + 1):
            training_loss = pipeline.step(*next(batches))
            if options.save and (step % 10 == 0 or step == options.steps):
                pipeline.save(options.save, keep=3)
            if step % 5 == 0:
                held_out_loss = loss(pipeline.evaluate(inputs), targets)
                if pipeline.is_first:
                    print(f"step {step}: loss {training_loss:.6f}, held out {held_out_loss:.6f}")
        if options.draw and pipeline.is_first:
            pk.draw(pipeline.timeline, options.draw)


if __name__ == "__main__":
    main()
