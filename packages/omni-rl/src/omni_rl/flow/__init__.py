"""The flow of a step: sample, score, grade, batch; and evaluations."""
