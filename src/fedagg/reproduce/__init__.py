"""The paper's tables and figures: what to run, running it, and comparing it with the paper's numbers."""
