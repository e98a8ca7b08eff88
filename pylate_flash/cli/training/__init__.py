"""Internals of `train`: the losses and trainers of both libraries, a run, its checkpoints, the model it writes."""
