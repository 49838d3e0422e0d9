"""Work of a stage on several hosts: `pool` and `hosts` in the stage's process, `worker` there, `plain` between them.

The stage's process starts a worker per parallel job by ssh, by Slurm's srun, or by any command that runs a shell line.
It talks to the worker through the standard input and output of that command, so nothing listens on a port, and a worker
ends when the stage's process or the connection does. Functions and values are sent in an encoding that can name only
our own functions and classes. The hosts share the file system, the checkout and its Python by the same paths.
"""
