"""The data flow of a step: samples, scores, advantages, batches; and evaluations."""
