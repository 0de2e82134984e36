"""Recovery from a worker's death: elastic group, replay log, state transfer, process groups per view."""
