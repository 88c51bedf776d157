"""The data that the digits model was trained on, its training, and its independent judge."""
