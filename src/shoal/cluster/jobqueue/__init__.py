"""Queue of several jobs for one machine or a set of hosts: scheduler.py decides, queue.py stores, runner.py acts."""
