"""Checkpoints: everything that training needs to go on, in files that fit any layout.

A folder of a run has one folder per checkpoint, ``step-00000100``, and that has a ``plan.json`` and
one safetensors file per stage of the plan. ``header`` is what stands at the head of such a file,
``piece`` the file, ``folder`` what is there and what of it is complete, ``contents`` what it holds.
``taking`` reads a stage's state out of the engine, ``giving`` puts a checkpoint's into it.
``keeper`` is what ``Pipeline`` speaks to; ``agreeing`` says which pieces its process has and which
checkpoint all processes load, ``saving`` when a loop saves, and writes beside it. ``export`` and
``pretrained`` are for other programs.

Decisions:

- A file is written beside its place, flushed to the disk and renamed: that rename is the stage's
  commit. A checkpoint is complete when all pieces that its plan names are there and say that they
  are of the same attempt and step. No barrier and no coordinator, as in PipeDream (SOSP 2019,
  section 4): whenever a process is killed, the last complete checkpoint is whole.
- Weights stand under the model's own keys, optimizer state under ``optimizer/<parameter>/<key>``.
  Nothing in a file depends on where the model was cut, so another plan reads it.
- safetensors and strict JSON only. Nothing is unpickled, so a file cannot run code.
- Random streams are functions of seed, step, microbatch and layer; two numbers resume them.
"""
