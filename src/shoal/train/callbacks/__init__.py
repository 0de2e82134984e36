"""What happens beside training: a file per callback. `shoal.callbacks` is where users find them."""
