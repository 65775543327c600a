"""The demo's task: word problems that a small model learns to solve by calling a calculator.

`task.write(folder, seed)` writes the data, `tools.py` and `rewards.py`.
"""
