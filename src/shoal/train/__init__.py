"""The Trainer: fit, evaluate, predict, save and load over any strategy."""
