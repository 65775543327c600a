"""The four traps of reward design as four small trainings, each before and after the remedy: hacking, sparsity, collapse, conflict.

All four ask which weekday it will be. `weekdays.write(folder, seed)` writes the data and `rewards.py`; NAME.yaml is the recipe of a trap.
"""
