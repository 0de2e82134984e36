"""Worker process and its connection to the coordinator and the supervisor."""
