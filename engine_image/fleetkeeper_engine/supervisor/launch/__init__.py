"""Before vLLM starts: reads the model and the machine, plans the memory, and builds the command line."""
