"""Training: from a recipe to a finished model. Read `grpo` (or `sft`) first; the rest serves it.

recipe, recipe_file (what a YAML file may say, and reading it) · run (what the CLI and a Python user call) · setup (recipe → objects)
sft · grpo, with presets (the loss table), judging (scores → advantages) and judged (advantages → training rows)
loop (step, log, evaluate, save, resume) · order, schedule (which row, which learning rate) · checkpoint, files, run_directory, recorder
(what is written) · evaluate, statistics, metrics, notes (what is said)
"""
