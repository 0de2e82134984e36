"""Arguments of a Trainer in the forms people know: losses and optimizers by name, arrays, weights to begin with."""
