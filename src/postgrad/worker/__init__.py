"""Code that others wrote runs in a process that can be killed: `parent` starts, asks and kills it, `child` is what runs inside.

The process is killed, not confined: it has the rights of the user. `limits` bounds its memory and CPU time, `processes` keeps it from
starting more.
"""
