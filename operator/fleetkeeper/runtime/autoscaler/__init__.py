"""The control loop as a process part: reads samples, runs the tick, sends its results."""
