"""Settings: fields with their bounds, recipes, and the command line. Imports no torch."""
