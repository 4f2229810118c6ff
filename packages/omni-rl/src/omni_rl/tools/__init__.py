"""Tools: the omni-rl command, the memory plan, the doctor, the hub and the converters."""
