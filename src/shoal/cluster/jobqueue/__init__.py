"""Queue of several jobs for one machine or a set of hosts: scheduler.py decides, queue.py remembers, runner.py acts."""
